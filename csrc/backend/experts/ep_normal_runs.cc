#include "backend/experts/ep_normal_runs.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/experts/ep_tensors.h"

namespace mooncake {
namespace {

size_t rowsOf(const ep::Handle& handle) {
  size_t rows = 0;
  for (const auto& range : handle.ranges) rows += range.count;
  return rows;
}

// The dispatch's number is the same on all ranks.
uint32_t with(uint32_t agreed, const ep::Handle& dispatch) {
  return agreed * 31 + uint32_t(dispatch.number);
}

void setCount(const at::Tensor& usedRows, size_t rows) {
  *usedRows.mutable_data_ptr<int32_t>() = int32_t(rows);
}

}  // namespace

Status NormalRun::read() {
  if (activeRanks) mask &= maskOf(*activeRanks, int(activeRanks->numel()));
  return {};
}

Status NormalRun::ended(Status status, const ep::Memory& memory) const {
  MOONCAKE_TRY(std::move(status));
  if (activeRanks) clearOthers(*activeRanks, memory.group.size(), ending.participants);
  return {};
}

Status CountRun::run(const ep::Memory& memory, const Status& inputs, Deadline deadline) {
  fillIn(census, inputs, deadline);
  return ended(ep::count(memory, census, ending), memory);
}

Status TokensRun::run(const ep::Memory& memory, const Status& inputs, Deadline deadline) {
  int32_t count = 0;
  std::vector<int64_t> ranges(size_t(memory.group.size()));
  fillIn(call, refusal.ok() ? inputs : refusal, deadline);
  call.counts = &count;
  call.ranges = ranges.data();
  MOONCAKE_TRY(ended(ep::dispatch(memory, call, ending), memory));
  if (zerosOthers) zeroOthers();
  return {};
}

void TokensRun::zeroOthers() const {
  for (size_t r = 0; r < call.places.size(); ++r) {
    const auto [begin, end] = call.places[r];
    if (call.handle->ranges[r].count != 0) continue;
    for (const ep::Field& field : call.fields)
      std::memset(field.to + begin * field.bytes, 0, (end - begin) * field.bytes);
  }
}

Status BoundedRun::read() {
  ep::Handle& handle = *call.handle;
  MOONCAKE_TRY(checkRanks(ranks, handle.shape.numRanks));
  const int32_t* const chosen = ranks.const_data_ptr<int32_t>();
  handle.chosen.assign(chosen, chosen + ranks.numel());
  return NormalRun::read();
}

Status BoundedRun::run(const ep::Memory& memory, const Status& inputs, Deadline deadline) {
  if (of) call.agreed = with(call.agreed, *of);
  MOONCAKE_TRY(countAll(memory, inputs, deadline));
  if (Status checked = checkCounts(memory.group); !checked.ok()) {
    memory.group.renewal().callEnds();  // as on all ranks
    return checked;
  }
  mask &= counted_;
  MOONCAKE_TRY(TokensRun::run(memory, {}, deadline));
  show(memory.group.rank());
  return {};
}

Status BoundedRun::countAll(const ep::Memory& memory, const Status& inputs, Deadline deadline) {
  const ep::Handle& handle = *call.handle;
  census_.numbers.assign(kForRanks + size_t(memory.group.size()), 0);
  census_.numbers[kTokens] = uint32_t(handle.tokens);
  census_.numbers[kMostRows] = uint32_t(*call.room);
  census_.numbers[kAgreed] = call.agreed;
  if (inputs.ok()) {
    for (const int32_t rank : handle.chosen)
      if (rank != ep::kNoExpert) ++census_.numbers[kForRanks + size_t(rank)];
  }
  fillIn(census_, inputs, deadline);
  census_.goesOn = true;
  ep::Ending counted;
  MOONCAKE_TRY(ep::count(memory, census_, counted));
  counted_ = std::move(counted.participants);
  return {};
}

Status BoundedRun::checkCounts(const Group& group) {
  const auto refusal = [](const std::string& why) {
    return Error{ErrorCode::kInvalidArgument, "dispatch: " + why};
  };
  const int size = group.size();
  int first = -1;
  size_t tokens = 1, rows = 0;
  for (int r = 0; r < size; ++r) {
    const auto& numbers = census_.all[size_t(r)];
    tokens = std::max<size_t>(tokens, numbers[kTokens]);
    if (!counted_.contains(r)) continue;
    if (first < 0) first = r;
    const auto& others = census_.all[size_t(first)];
    const std::string ranks = group.nameRank(first) + " and " + group.nameRank(r);
    const bool isAgreed = numbers[kAgreed] == others[kAgreed];
    if (of && !isAgreed) {
      return refusal(ranks + " combine rows of different dispatches: give the handle of the same " +
                     "one on all ranks");
    }
    if (numbers[kMostRows] != others[kMostRows]) {
      return refusal(ranks + " have places for " + std::to_string(others[kMostRows]) + " and " +
                     std::to_string(numbers[kMostRows]) +
                     " rows: give all ranks the same num_worst_tokens, or num_max_tokens_per_rank");
    }
    if (!isAgreed) {
      return refusal(ranks +
                     " gave tensors of other dtypes or columns, or another "
                     "num_max_tokens_per_rank: give the same on all ranks");
    }
    size_t its = 0;
    for (int from = 0; from < size; ++from)
      if (counted_.contains(from)) its += census_.all[size_t(from)][kForRanks + size_t(r)];
    if (its > *call.room) {
      return refusal(group.nameRank(r) + " receives " + std::to_string(its) +
                     " tokens and has places for " + std::to_string(*call.room) +
                     ": give a larger num_worst_tokens, or num_max_tokens_per_rank");
    }
    rows = std::max(rows, its);
  }
  const double rowsPerToken = double(std::max<size_t>(rows, 1)) / double(tokens);
  ep::Shape& shape = call.handle->shape;
  if (tokens > buffer->mostTokens(call.rowBytes(), shape.hidden, weights, rowsPerToken)) {
    return refusal("the buffer's memory has no room for " + std::to_string(tokens) +
                   " tokens of a rank at once: make it larger");
  }
  shape.maxTokens = tokens;
  return {};
}

void BoundedRun::show(int rank) {
  const auto size = size_t(call.handle->shape.numRanks);
  int64_t* const shown = table.mutable_data_ptr<int64_t>();
  bool* const flags = there.mutable_data_ptr<bool>();
  size_t end = 0;
  for (size_t r = 0; r < size; ++r) {
    const auto& numbers = census_.all[r];
    end += call.handle->ranges[r].count;
    ends.mutable_data_ptr<int32_t>()[r] = int32_t(end);
    flags[r] = ending.participants.contains(int(r));
    const bool isHere = flags[r] && ending.participants.contains(rank);
    for (size_t to = 0; to < size; ++to)
      shown[r * (size + 1) + to] = isHere ? numbers[kForRanks + to] : 0;
    shown[r * (size + 1) + size] = numbers[kTokens];
  }
  setCount(usedRows, end);
}

Status BoundedAgainRun::run(const ep::Memory& memory, const Status& inputs, Deadline deadline) {
  ep::Handle& handle = *call.handle;
  handle.shape.maxTokens = first->shape.maxTokens;
  handle.chosen = first->chosen;
  size_t end = 0;
  for (const auto& range : first->ranges) {
    call.places.push_back({end, end + range.count});
    end += range.count;
  }
  call.agreed = with(call.agreed, *first);
  mask &= first->participants;
  MOONCAKE_TRY(TokensRun::run(memory, inputs, deadline));
  setCount(usedRows, end);
  return {};
}

Status SumsRun::run(const ep::Memory& memory, const Status& inputs, Deadline deadline) {
  fillIn(call, inputs, deadline);
  if (isBounded) {
    call.chosen = call.handle->chosen;
    call.rows = rowsOf(*call.handle);
  }
  return ended(ep::combine(memory, call, ending), memory);
}

Status checkRanks(const at::Tensor& ranks, int size) {
  const auto tokens = size_t(ranks.size(0)), most = size_t(ranks.size(1));
  const auto refusal = [](size_t token, int32_t rank, const std::string& why) {
    return Error{ErrorCode::kInvalidArgument,
                 "token " + std::to_string(token) + " names rank " + std::to_string(rank) + why};
  };
  for (size_t t = 0; t < tokens; ++t) {
    const int32_t* const of = ranks.const_data_ptr<int32_t>() + t * most;
    for (size_t i = 0; i < most; ++i) {
      if (of[i] == ep::kNoExpert) continue;
      if (of[i] < 0 || of[i] >= size) return refusal(t, of[i], " of " + std::to_string(size));
      if (std::find(of, of + i, of[i]) != of + i) return refusal(t, of[i], " twice");
    }
  }
  return {};
}

}  // namespace mooncake
