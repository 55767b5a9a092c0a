#include "backend/ep_normal.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "backend/device/host_tensors.h"
#include "backend/ep_normal_runs.h"
#include "backend/ep_tensors.h"
#include "backend/errors.h"

namespace mooncake {
namespace {

std::vector<bool> flagsOf(const GroupRanks& ranks, int size) {
  std::vector<bool> flags;
  for (int r = 0; r < size; ++r) flags.push_back(ranks.contains(r));
  return flags;
}

// `staging`: null for CPU tensors: their values are read here.
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

// Makes a run of a dispatch without its results, and without the ranks of each token. `fields`: the
// tensors on the host.
template <typename Run>
std::shared_ptr<Run> makeRun(EpBuffer& ours, std::vector<at::Tensor> fields, int64_t tokens,
                             int64_t topk, int64_t hidden, uint32_t agreed) {
  const int size = ours.buffer()->group().size();
  const auto run = std::make_shared<Run>();
  ep::DispatchCall& call = run->call;
  call.format = ep::RowFormat::kFields;
  for (const at::Tensor& field : fields) {
    call.fields.push_back({.from = static_cast<const std::byte*>(field.const_data_ptr()),
                           .bytes = size_t(field.size(1)) * field.itemsize()});
  }
  run->given = std::move(fields);
  run->memory = ours.results();
  call.agreed = agreed;
  call.handle = std::make_shared<ep::Handle>();
  call.handle->shape = {size, size, 0, size_t(hidden)};
  call.handle->experts = std::make_shared<const ep::ExpertMap>(size, size);
  call.handle->tokens = size_t(tokens);
  call.handle->topk = size_t(topk);
  return run;
}

// A run with the ranks of each token.
std::shared_ptr<TokensRun> runOf(EpBuffer& ours, const EpNormal::DispatchArguments& given,
                                 std::vector<at::Tensor> fields) {
  auto run = makeRun<TokensRun>(ours, std::move(fields), given.ranks.size(0), given.ranks.size(1),
                                given.hidden, given.agreed);
  run->error = given.error;
  ep::Handle& handle = *run->call.handle;
  handle.shape.maxTokens = size_t(given.maxTokens);
  const int32_t* const ranks = given.ranks.const_data_ptr<int32_t>();
  handle.chosen.assign(ranks, ranks + given.ranks.numel());
  return run;
}

// Makes the rows go to `into` on a device, from the first place on. Only the used rows are copied.
void placeAtWorst(TokensRun& run, Staging& staging, const std::vector<at::Tensor>& into,
                  const at::Tensor& usedRows) {
  TORCH_CHECK_VALUE(into.size() == run.given.size(), "into has ", into.size(),
                    " tensors, expected ", run.given.size());
  const int64_t rows = into.front().size(0);
  for (size_t i = 0; i < into.size(); ++i) {
    requireTensor(into[i], "a result", staging.stream().device(), run.given[i].scalar_type(),
                  {rows, run.given[i].size(1)});
    run.made.push_back(staging.output(into[i].unsqueeze(0), "recv_x", {.counts = usedRows}));
    run.call.fields[i].to = static_cast<std::byte*>(run.made.back().mutable_data_ptr());
  }
  run.places = size_t(rows);
}

void checkTokens(EpBuffer& ours, const EpNormal::DispatchArguments& given,
                 const c10::Device& device) {
  const int64_t tokens = given.ranks.size(0);
  requireTensor(given.ranks, "token_ranks", c10::kCPU, at::kInt, {-1, -1});
  throwIfError(checkRanks(given.ranks, ours.buffer()->group().size()));
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
  run.places = size_t(rows);
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

EpNormal::Worst EpNormal::dispatchAtWorst(const WorstArguments& given) {
  TORCH_CHECK_VALUE(!given.fields.empty() && !given.into.empty(), "no rows, or no places of rows");
  const auto& buffer = buffer_.buffer();
  const int64_t size = buffer->group().size(), tokens = given.ranks.size(0);
  const c10::Device device = given.fields.front().device();
  requireDevice(given.fields.front(), "x");
  requireTensor(given.ranks, "token_ranks", device, at::kInt, {-1, -1});
  for (const at::Tensor& field : given.fields)
    requireTensor(field, "a field", device, field.scalar_type(), {tokens, -1});
  const int64_t rows = given.into.front().size(0);
  requireTensor(given.sources, "the sources", device, at::kInt, {rows});
  requireTensor(given.ends, "the ends", device, at::kInt, {size});
  requireTensor(given.table, "the table", device, at::kLong, {size, size + 1});
  requireTensor(given.participants, "the participants", device, at::kBool, {size});
  const auto staging = buffer_.stagingFor(device);
  std::vector<at::Tensor> fields;
  for (const at::Tensor& field : given.fields) fields.push_back(staging->input(field, "x"));
  const auto run = makeRun<WorstRun>(buffer_, std::move(fields), tokens, given.ranks.size(1),
                                     given.hidden, given.agreed);
  run->buffer = buffer.get();
  run->ranks = staging->input(given.ranks, "token_ranks");
  run->mostRows = uint32_t(rows);
  run->extras = size_t(given.extras);
  if (given.of) run->of = given.of->dispatch;
  run->usedRows = staging->newCounts(1);
  placeAtWorst(*run, *staging, given.into, run->usedRows);
  run->made.push_back(
      staging->output(given.sources.unsqueeze(0), "the sources", {.counts = run->usedRows}));
  run->call.sources = run->made.back().mutable_data_ptr<int32_t>();
  run->endsShown = staging->output(given.ends, "the ends");
  run->table = staging->output(given.table, "the table");
  run->participants = staging->output(given.participants, "the participants");
  setParticipation(*run, buffer_, staging.get(), {}, given.activeRanks, -1);
  return {.handle = {buffer, run->call.handle, device, std::nullopt, run->usedRows},
          .call = {run, staging}};
}

EpBuffer::Call EpNormal::dispatchAsWorst(const AgainArguments& given) {
  const auto& buffer = buffer_.buffer();
  const ep::Handle& first = *given.handle.dispatch;
  TORCH_CHECK_VALUE(given.handle.buffer == buffer, "the handle is of a dispatch of another buffer");
  TORCH_CHECK_VALUE(!given.fields.empty() && !given.into.empty(), "no rows, or no places of rows");
  const c10::Device& device = given.handle.device;
  for (const at::Tensor& field : given.fields)
    requireTensor(field, "x", device, field.scalar_type(), {int64_t(first.tokens), -1});
  const auto staging = buffer_.stagingFor(device);
  std::vector<at::Tensor> fields;
  for (const at::Tensor& field : given.fields) fields.push_back(staging->input(field, "x"));
  const auto run =
      makeRun<AsWorstRun>(buffer_, std::move(fields), int64_t(first.tokens), int64_t(first.topk),
                          int64_t(first.shape.hidden), given.agreed);
  run->first = given.handle.dispatch;
  run->usedRows = staging->newCounts(1);
  placeAtWorst(*run, *staging, given.into, run->usedRows);
  run->sources = at::empty({given.into.front().size(0)}, at::kInt);
  run->call.sources = run->sources.mutable_data_ptr<int32_t>();
  run->zerosOthers = true;
  setParticipation(*run, buffer_, staging.get(), {}, given.activeRanks, given.timeoutMicros);
  return {run, staging};
}

EpBuffer::Call EpNormal::combine(const CombineArguments& given) {
  const auto& buffer = buffer_.buffer();
  TORCH_CHECK_VALUE(given.handle.buffer == buffer, "the handle is of a dispatch of another buffer");
  const auto handle = given.handle.dispatch;
  const auto hidden = int64_t(handle->shape.hidden), tokens = int64_t(handle->tokens);
  const bool isOfWorst = given.handle.usedRows.defined(), hasMore = !given.firstRows.empty();
  const c10::Device device = given.x.device();
  requireDevice(given.x, "x");
  TORCH_CHECK_VALUE(!isOfWorst || device == given.handle.device, "x is on ", device.str(),
                    ", the rows of the handle's dispatch are on ", given.handle.device.str());
  size_t rows = isOfWorst ? size_t(given.x.size(0)) : 0;
  if (!isOfWorst)
    for (const auto& range : handle->ranges) rows += range.count;
  const int64_t xRows = hasMore ? given.x.size(0) : int64_t(rows);
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
  const auto rowsOf = [&](const at::Tensor& all, const char* what) {
    if (!isOfWorst) return host.input(all, what);
    return staging->input(all.unsqueeze(0), what, {.counts = given.handle.usedRows});
  };
  const at::Tensor x = rowsOf(given.x, "x"), sums = host.output(given.sums, "combined_x");
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
  run->isOfWorst = isOfWorst;
  if (!isOfWorst) call.chosen = handle->chosen;
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
    const at::Tensor of = rowsOf(*given.extras, "topk_weights");
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
  run->weights.assign(handle->tokens * handle->topk, 1);
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
