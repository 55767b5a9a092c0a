#include "backend/ep_normal.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "backend/device/host_tensors.h"
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
  Status read() override {
    if (activeRanks) mask &= maskOf(*activeRanks, int(activeRanks->numel()));
    return {};
  }

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
    if (zerosOthers) zeroOthers(ranges);
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
  bool zerosOthers = false;            // and the places of ranks that sent nothing become zeros
  std::vector<at::Tensor> given, made;
  at::Tensor sources, ends;

 private:
  void zeroOthers(const std::vector<int64_t>& ranges) const {
    for (size_t r = 0; r < ranges.size(); ++r) {
      const auto [begin, end] = call.places[r];
      if ((ranges[r] & 0xffffffff) != 0) continue;
      for (const ep::Field& field : call.fields)
        std::memset(field.to + begin * field.bytes, 0, (end - begin) * field.bytes);
    }
  }
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

// `staging`: null for CPU tensors, whose values are read here.
void setParticipation(NormalRun& run, EpBuffer& buffer, Staging* staging,
                      const std::vector<bool>& among, const std::optional<at::Tensor>& activeRanks,
                      int64_t timeoutMicros) {
  const int size = buffer.buffer()->group().size();
  run.mask = buffer.buffer()->callerMask();
  run.patience = buffer.patienceOf(timeoutMicros);
  TORCH_CHECK_VALUE(among.empty() || among.size() == size_t(size), "among has ", among.size(),
                    " ranks of ", size);
  for (size_t r = 0; r < among.size(); ++r)
    if (!among[r]) run.mask -= GroupRanks{int(r)};
  if (!activeRanks) return;
  requireMask(*activeRanks, staging ? staging->stream().device() : c10::kCPU, size);
  const at::Tensor shown = activeRanks->narrow(0, 0, size);
  run.activeRanks = HostTensors(staging).inOut(shown, "active_ranks");
  if (!staging) throwIfError(run.read());
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

// The run of a dispatch, without its results. `fields`: the tensors on the host.
std::shared_ptr<TokensRun> runOf(EpBuffer& ours, const EpNormal::DispatchArguments& given,
                                 std::vector<at::Tensor> fields) {
  const int size = ours.buffer()->group().size();
  const auto run = std::make_shared<TokensRun>();
  ep::DispatchCall& call = run->call;
  call.format = ep::RowFormat::kFields;
  for (const at::Tensor& field : fields) {
    call.fields.push_back({.from = static_cast<const std::byte*>(field.const_data_ptr()),
                           .bytes = size_t(field.size(1)) * field.itemsize()});
  }
  run->given = std::move(fields);
  run->memory = ours.results();
  run->error = given.error;
  call.agreed = given.agreed;
  const auto handle = std::make_shared<ep::Handle>();
  handle->shape = {size, size, size_t(given.maxTokens), size_t(given.hidden)};
  handle->experts = std::make_shared<const ep::ExpertMap>(size, size);
  handle->tokens = size_t(given.ranks.size(0));
  handle->topk = size_t(given.ranks.size(1));
  const int32_t* const ranks = given.ranks.const_data_ptr<int32_t>();
  handle->chosen.assign(ranks, ranks + given.ranks.numel());
  call.handle = handle;
  return run;
}

void checkTokens(EpBuffer& ours, const EpNormal::DispatchArguments& given,
                 const c10::Device& device) {
  const int64_t tokens = given.ranks.size(0);
  requireTensor(given.ranks, "token_ranks", c10::kCPU, at::kInt, {-1, -1});
  requireRanks(given.ranks, ours.buffer()->group().size());
  TORCH_CHECK_VALUE(tokens <= given.maxTokens, "rank ", ours.buffer()->group().rank(), " gives ",
                    tokens, " tokens of at most ", given.maxTokens);
  for (const at::Tensor& field : given.fields)
    requireTensor(field, "a field", device, field.scalar_type(), {tokens, -1});
}

// Results that go into tensors of the caller. `into`: those tensors on the host, and the sources.
void placeResults(TokensRun& run, const EpNormal::DispatchArguments& given,
                  const std::vector<at::Tensor>& into, int size) {
  const size_t fields = given.fields.size();
  TORCH_CHECK_VALUE(into.size() == fields + 1, "into has ", into.size(), " tensors, expected ",
                    fields + 1);
  TORCH_CHECK_VALUE(given.begins.size() == size_t(size) && given.ends.size() == size_t(size),
                    "into needs the places of ", size, " ranks");
  const at::Tensor& sources = into.back();
  requireTensor(sources, "the sources", c10::kCPU, at::kInt, {-1});
  const int64_t rows = sources.size(0);
  for (size_t r = 0; r < size_t(size); ++r) {
    const int64_t begin = given.begins[r], end = given.ends[r];
    TORCH_CHECK_VALUE(0 <= begin && begin <= end && end <= rows, "the rows of rank ", r,
                      " have the places from ", begin, " to ", end, " of ", rows);
    run.call.places.push_back({size_t(begin), size_t(end)});
  }
  for (size_t i = 0; i < fields; ++i) {
    requireTensor(into[i], "a result", c10::kCPU, given.fields[i].scalar_type(),
                  {rows, given.fields[i].size(1)});
    run.call.fields[i].to = static_cast<std::byte*>(into[i].mutable_data_ptr());
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
  setParticipation(*run, buffer_, nullptr, {}, activeRanks, timeoutMicros);
  run->census.numbers = std::move(numbers);
  buffer_.submit({run, nullptr}, EpBuffer::Ends::kAtOnce);
  return {std::move(run->census.all), flagsOf(run->ending.participants, size)};
}

EpNormal::Dispatch EpNormal::dispatch(const DispatchArguments& given) {
  const auto& buffer = buffer_.buffer();
  const int size = buffer->group().size();
  checkTokens(buffer_, given, c10::kCPU);
  const auto run = runOf(buffer_, given, given.fields);
  if (!given.into.empty()) placeResults(*run, given, given.into, size);
  setParticipation(*run, buffer_, nullptr, given.among, given.activeRanks, given.timeoutMicros);
  buffer_.submit({run, nullptr}, EpBuffer::Ends::kAtOnce);
  return {.fields = std::move(run->made),
          .sources = std::move(run->sources),
          .ends = std::move(run->ends),
          .participants = flagsOf(run->ending.participants, size),
          .handle = {buffer, run->call.handle, c10::kCPU}};
}

EpBuffer::Call EpNormal::dispatchOnDevice(const DispatchArguments& given) {
  TORCH_CHECK_VALUE(!given.fields.empty() && !given.ends.empty(), "no rows, or no places of rows");
  const c10::Device device = given.fields.front().device();
  requireDevice(given.fields.front(), "x");
  checkTokens(buffer_, given, device);
  const auto staging = buffer_.stagingFor(device);
  const HostTensors host(staging.get());
  std::vector<at::Tensor> fields, into;
  for (const at::Tensor& field : given.fields) fields.push_back(host.input(field, "x"));
  for (const at::Tensor& made : given.into) into.push_back(host.output(made, "recv_x"));
  const auto run = runOf(buffer_, given, std::move(fields));
  run->sources = at::empty({given.ends.back()}, at::kInt);
  into.push_back(run->sources);
  placeResults(*run, given, into, buffer_.buffer()->group().size());
  run->zerosOthers = true;
  run->made = std::move(into);
  setParticipation(*run, buffer_, staging.get(), given.among, given.activeRanks,
                   given.timeoutMicros);
  return {run, staging};
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
  const c10::Device device = given.x.device();
  requireDevice(given.x, "x");
  requireTensor(given.x, "x", device, at::kBFloat16, {xRows, hidden});
  requireTensor(given.sums, "combined_x", device, at::kBFloat16, {tokens, hidden});
  const size_t extras = given.extras ? size_t(given.extras->size(1)) : 0;
  TORCH_CHECK_VALUE(buffer->hasRoomForSums(rows, handle->shape.hidden, extras), "combine: ", rows,
                    " rows with ", extras,
                    " weights each do not fit into the buffer's memory: ", "make it larger");
  const auto staging = buffer_.stagingFor(device);
  const HostTensors host(staging.get());
  const auto run = std::make_shared<SumsRun>();
  ep::CombineCall& call = run->call;
  const at::Tensor x = host.input(given.x, "x"), sums = host.output(given.sums, "combined_x");
  call.x = static_cast<const std::byte*>(x.const_data_ptr());
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
  call.combined = static_cast<uint16_t*>(sums.mutable_data_ptr());
  for (const at::Tensor& bias : given.biases) {
    requireTensor(bias, "bias", device, at::kBFloat16, {tokens, hidden});
    run->kept.push_back(host.input(bias, "bias"));
    call.biases.push_back(static_cast<const uint16_t*>(run->kept.back().const_data_ptr()));
  }
  if (given.extras) {
    requireTensor(*given.extras, "topk_weights", device, at::kFloat, {xRows, int64_t(extras)});
    requireTensor(*given.extraSums, "combined_topk_weights", device, at::kFloat,
                  {tokens, int64_t(extras)});
    const at::Tensor of = host.input(*given.extras, "topk_weights");
    const at::Tensor added = host.output(*given.extraSums, "combined_topk_weights");
    call.extras = extras;
    call.extrasOfRows = of.const_data_ptr<float>();
    call.extraSums = added.mutable_data_ptr<float>();
    run->kept.insert(run->kept.end(), {of, added});
  }
  requireTensor(given.missing, "missing_contributions", device, at::kBool, {tokens});
  const at::Tensor missing = host.output(given.missing, "missing_contributions");
  call.missing = missing.mutable_data_ptr<bool>();
  run->kept.insert(run->kept.end(), {x, sums, missing});
  run->weights.assign(handle->chosen.size(), 1);
  call.weights = run->weights.data();
  setParticipation(*run, buffer_, staging.get(), given.among, given.activeRanks,
                   given.timeoutMicros);
  return {run, staging};
}

int64_t EpNormal::mostTokens(const std::vector<int64_t>& fieldBytes, int64_t hidden, int64_t extras,
                             double rowsPerToken) const {
  size_t rowBytes = 0;
  for (const int64_t bytes : fieldBytes) rowBytes += ep::sentBytes({.bytes = size_t(bytes)});
  return int64_t(buffer_.buffer()->mostTokens(std::max<size_t>(rowBytes, 1), size_t(hidden),
                                              size_t(extras), rowsPerToken));
}

}  // namespace mooncake
