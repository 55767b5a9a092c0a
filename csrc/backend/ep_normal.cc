#include "backend/ep_normal.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "backend/ep_tensors.h"
#include "backend/errors.h"
#include "ep/census.h"

namespace mooncake {
namespace {

std::vector<bool> flagsOf(const GroupRanks& ranks, int size) {
  std::vector<bool> flags;
  for (int r = 0; r < size; ++r) flags.push_back(ranks.contains(r));
  return flags;
}

// The common part of the calls of the normal mode.
class NormalRun : public EpRun {
 public:
  Status read() override { return {}; }

  std::optional<at::Tensor> activeRanks;
  GroupRanks mask;
  std::optional<Clock::duration> patience;
  ep::Ending ending;

 protected:
  template <typename Call>
  void fillIn(Call& call, const Status& inputs, Deadline deadline) const {
    call.inputs = inputs;
    call.mask = mask;
    call.deadline = deadline;
    call.patience = patience;
  }
  Status ended(Status status, const ep::Memory& memory) const {
    MOONCAKE_TRY(std::move(status));
    if (activeRanks) clearOthers(*activeRanks, memory.group.size(), ending.participants);
    return {};
  }
};

class CountRun final : public NormalRun {
 public:
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override {
    fillIn(census, inputs, deadline);
    return ended(ep::count(memory, census, ending), memory);
  }

  ep::Census census;
};

class TokensRun final : public NormalRun {
 public:
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override {
    const int size = memory.group.size();
    int32_t count = 0;
    std::vector<int64_t> ranges(static_cast<size_t>(size));
    fillIn(call, error.empty() ? inputs : Status(ErrorCode::kInvalidArgument, error), deadline);
    call.counts = &count;
    call.ranges = ranges.data();
    call.makeRoom = [&](size_t rows) { return makeRoom(memory.group, int64_t(rows)); };
    MOONCAKE_TRY(ended(ep::dispatch(memory, call, ending), memory));
    ends = at::empty({size}, at::kInt);
    int64_t end = 0;
    for (int r = 0; r < size; ++r) {
      end += ranges[size_t(r)] & 0xffffffff;
      ends.mutable_data_ptr<int32_t>()[r] = int32_t(end);
    }
    return {};
  }

  ep::DispatchCall call;
  std::string error;
  std::shared_ptr<BlockCache> memory;  // of the results
  bool isPlaced = false;               // the results have their memory already
  std::vector<at::Tensor> given, made;
  at::Tensor sources, ends;

 private:
  // Other ranks may have ended the operation, and this rank would try again without end. So it
  // leaves the group.
  Status makeRoom(Group& group, int64_t rows) {
    if (isPlaced) return {};
    try {
      made.clear();
      for (size_t i = 0; i < given.size(); ++i) {
        made.push_back(newResult(*memory, {rows, given[i].size(1)}, given[i].scalar_type()));
        call.fields[i].to = static_cast<std::byte*>(made[i].mutable_data_ptr());
      }
      sources = at::empty({rows}, at::kInt);
      call.sources = sources.mutable_data_ptr<int32_t>();
      return {};
    } catch (const std::exception& error) {
      const Error why{ErrorCode::kExhausted,
                      "dispatch: no memory for " + std::to_string(rows) + " rows: " + error.what()};
      group.fail(why);
      return why;
    }
  }
};

class SumsRun final : public NormalRun {
 public:
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override {
    fillIn(call, inputs, deadline);
    return ended(ep::combine(memory, call, ending), memory);
  }

  ep::CombineCall call;
  std::vector<float> weights;
  std::vector<at::Tensor> kept;
};

void setParticipation(NormalRun& run, EpBuffer& buffer,
                      const std::optional<at::Tensor>& activeRanks, int64_t timeoutMicros) {
  const int size = buffer.buffer()->group().size();
  run.mask = buffer.buffer()->callerMask();
  run.patience = buffer.patienceOf(timeoutMicros);
  if (!activeRanks) return;
  requireMask(*activeRanks, c10::kCPU, size);
  run.activeRanks = activeRanks->narrow(0, 0, size);
  run.mask &= maskOf(*activeRanks, size);
}

// Throws unless each token names ranks of the group, and each once.
void requireRanks(const at::Tensor& ranks, int size) {
  const auto tokens = size_t(ranks.size(0)), most = size_t(ranks.size(1));
  for (size_t t = 0; t < tokens; ++t) {
    const int32_t* const of = ranks.const_data_ptr<int32_t>() + t * most;
    for (size_t i = 0; i < most; ++i) {
      if (of[i] == ep::kNoExpert) continue;
      TORCH_CHECK_VALUE(of[i] >= 0 && of[i] < size, "token ", t, " names rank ", of[i], " of ",
                        size);
      TORCH_CHECK_VALUE(std::find(of, of + i, of[i]) == of + i, "token ", t, " names rank ", of[i],
                        " twice");
    }
  }
}

// Results that go into tensors of the caller.
void placeResults(TokensRun& run, const EpNormal::DispatchArguments& given, int size) {
  const size_t fields = given.fields.size();
  TORCH_CHECK_VALUE(given.into.size() == fields + 1, "into has ", given.into.size(),
                    " tensors, expected ", fields + 1);
  TORCH_CHECK_VALUE(given.begins.size() == size_t(size) && given.ends.size() == size_t(size),
                    "into needs the places of ", size, " ranks");
  const at::Tensor& sources = given.into.back();
  requireTensor(sources, "the sources", c10::kCPU, at::kInt, {-1});
  const int64_t rows = sources.size(0);
  for (size_t r = 0; r < size_t(size); ++r) {
    const int64_t begin = given.begins[r], end = given.ends[r];
    TORCH_CHECK_VALUE(0 <= begin && begin <= end && end <= rows, "the rows of rank ", r,
                      " have the places from ", begin, " to ", end, " of ", rows);
    run.call.places.push_back({size_t(begin), size_t(end)});
  }
  for (size_t i = 0; i < fields; ++i) {
    requireTensor(given.into[i], "a result", c10::kCPU, given.fields[i].scalar_type(),
                  {rows, given.fields[i].size(1)});
    run.call.fields[i].to = static_cast<std::byte*>(given.into[i].mutable_data_ptr());
  }
  run.call.sources = sources.mutable_data_ptr<int32_t>();
  run.isPlaced = true;
}

}  // namespace

EpNormal::Count EpNormal::count(std::vector<uint32_t> numbers,
                                const std::optional<at::Tensor>& activeRanks,
                                int64_t timeoutMicros) {
  const int size = buffer_.buffer()->group().size();
  const auto run = std::make_shared<CountRun>();
  setParticipation(*run, buffer_, activeRanks, timeoutMicros);
  run->census.numbers = std::move(numbers);
  buffer_.submit({run, nullptr}, EpBuffer::Ends::kAtOnce);
  return {std::move(run->census.all), flagsOf(run->ending.participants, size)};
}

EpNormal::Dispatch EpNormal::dispatch(const DispatchArguments& given) {
  const auto& buffer = buffer_.buffer();
  const int size = buffer->group().size();
  const int64_t tokens = given.ranks.size(0);
  requireTensor(given.ranks, "token_ranks", c10::kCPU, at::kInt, {-1, -1});
  requireRanks(given.ranks, size);
  TORCH_CHECK_VALUE(tokens <= given.maxTokens, "rank ", buffer->group().rank(), " gives ", tokens,
                    " tokens of at most ", given.maxTokens);
  const auto run = std::make_shared<TokensRun>();
  ep::DispatchCall& call = run->call;
  call.format = ep::RowFormat::kFields;
  for (const at::Tensor& field : given.fields) {
    requireTensor(field, "a field", c10::kCPU, field.scalar_type(), {tokens, -1});
    call.fields.push_back({.from = static_cast<const std::byte*>(field.const_data_ptr()),
                           .bytes = size_t(field.size(1)) * field.itemsize()});
  }
  run->given = given.fields;
  run->memory = buffer_.results();
  if (!given.into.empty()) placeResults(*run, given, size);
  run->error = given.error;
  call.agreed = given.agreed;
  const auto handle = std::make_shared<ep::Handle>();
  handle->shape = {size, size, size_t(given.maxTokens), size_t(given.hidden)};
  handle->experts = std::make_shared<const ep::ExpertMap>(size, size);
  handle->tokens = size_t(tokens);
  handle->topk = size_t(given.ranks.size(1));
  const int32_t* const ranks = given.ranks.const_data_ptr<int32_t>();
  handle->chosen.assign(ranks, ranks + given.ranks.numel());
  call.handle = handle;
  setParticipation(*run, buffer_, given.activeRanks, given.timeoutMicros);
  buffer_.submit({run, nullptr}, EpBuffer::Ends::kAtOnce);
  return {.fields = std::move(run->made),
          .sources = std::move(run->sources),
          .ends = std::move(run->ends),
          .participants = flagsOf(run->ending.participants, size),
          .handle = {buffer, handle, c10::kCPU}};
}

EpBuffer::Call EpNormal::combine(const CombineArguments& given) {
  const auto& buffer = buffer_.buffer();
  TORCH_CHECK_VALUE(given.handle.buffer == buffer, "the handle is of a dispatch of another buffer");
  const auto handle = given.handle.dispatch;
  const auto hidden = int64_t(handle->shape.hidden), tokens = int64_t(handle->tokens);
  size_t rows = 0;
  for (const auto& range : handle->ranges) rows += range.count;
  const bool hasMore = !given.firstRows.empty();
  const int64_t xRows = hasMore ? given.x.size(0) : int64_t(rows);
  requireTensor(given.x, "x", c10::kCPU, at::kBFloat16, {xRows, hidden});
  requireTensor(given.sums, "combined_x", c10::kCPU, at::kBFloat16, {tokens, hidden});
  const size_t extras = given.extras ? size_t(given.extras->size(1)) : 0;
  TORCH_CHECK_VALUE(buffer->hasRoomForSums(rows, handle->shape.hidden, extras), "combine: ", rows,
                    " rows with ", extras,
                    " weights each do not fit into the buffer's memory: ", "make it larger");
  const auto run = std::make_shared<SumsRun>();
  ep::CombineCall& call = run->call;
  call.x = static_cast<const std::byte*>(given.x.const_data_ptr());
  call.rows = rows;
  if (hasMore) {
    TORCH_CHECK_VALUE(given.firstRows.size() == handle->ranges.size(), "first_rows has ",
                      given.firstRows.size(), " places, expected ", handle->ranges.size());
    for (size_t r = 0; r < given.firstRows.size(); ++r) {
      const int64_t first = given.firstRows[r];
      TORCH_CHECK_VALUE(0 <= first && first + int64_t(handle->ranges[r].count) <= xRows,
                        "the rows of rank ", r, " begin at ", first, " of ", xRows);
      call.firstRows.push_back(size_t(first));
    }
  }
  call.rowStride = ep::bf16Bytes(handle->shape.hidden);
  call.chosen = handle->chosen;
  call.handle = handle;
  call.combined = static_cast<uint16_t*>(given.sums.mutable_data_ptr());
  run->kept = given.biases;
  for (const at::Tensor& bias : given.biases) {
    requireTensor(bias, "bias", c10::kCPU, at::kBFloat16, {tokens, hidden});
    call.biases.push_back(static_cast<const uint16_t*>(bias.const_data_ptr()));
  }
  if (given.extras) {
    requireTensor(*given.extras, "topk_weights", c10::kCPU, at::kFloat, {xRows, int64_t(extras)});
    requireTensor(*given.extraSums, "combined_topk_weights", c10::kCPU, at::kFloat,
                  {tokens, int64_t(extras)});
    call.extras = extras;
    call.extrasOfRows = given.extras->const_data_ptr<float>();
    call.extraSums = given.extraSums->mutable_data_ptr<float>();
    run->kept.insert(run->kept.end(), {*given.extras, *given.extraSums});
  }
  requireTensor(given.missing, "missing_contributions", c10::kCPU, at::kBool, {tokens});
  call.missing = given.missing.mutable_data_ptr<bool>();
  run->kept.insert(run->kept.end(), {given.x, given.sums, given.missing});
  run->weights.assign(handle->chosen.size(), 1);
  call.weights = run->weights.data();
  setParticipation(*run, buffer_, given.activeRanks, given.timeoutMicros);
  return {run, nullptr};
}

int64_t EpNormal::mostTokens(const std::vector<int64_t>& fieldBytes, int64_t hidden, int64_t extras,
                             double rowsPerToken) const {
  size_t rowBytes = 0;
  for (const int64_t bytes : fieldBytes) rowBytes += ep::sentBytes({.bytes = size_t(bytes)});
  return int64_t(buffer_.buffer()->mostTokens(std::max<size_t>(rowBytes, 1), size_t(hidden),
                                              size_t(extras), rowsPerToken));
}

}  // namespace mooncake
