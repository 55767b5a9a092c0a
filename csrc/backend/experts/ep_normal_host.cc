#include "backend/experts/ep_normal_host.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "backend/device/host_tensors.h"
#include "backend/errors.h"
#include "backend/experts/ep_normal_tensors.h"
#include "backend/experts/ep_tensors.h"

namespace mooncake {

using MaybeTensor = std::optional<at::Tensor>;

std::vector<int64_t> countsOf(const ep::Handle& handle) {
  std::vector<int64_t> counts;
  for (const auto& range : handle.ranges) counts.push_back(range.count);
  return counts;
}

HostTokens::Tensors HostTokens::newRows(const Tensors& like, int64_t rows,
                                        const c10::Device& device) const {
  Tensors made;
  for (const at::Tensor& one : like) {
    made.push_back(device.is_cpu()
                       ? newResult(*ours_.results(), {rows, one.size(1)}, one.scalar_type())
                       : at::empty({rows, one.size(1)}, one.options().device(device)));
  }
  return made;
}

void HostTokens::setParticipation(NormalRun& run, Staging* staging, const std::vector<bool>& among,
                                  const MaybeTensor& activeRanks, int64_t timeoutMicros) const {
  run.mask = ours_.buffer()->callerMask();
  run.patience = ours_.patienceOf(timeoutMicros);
  for (size_t r = 0; r < among.size(); ++r)
    if (!among[r]) run.mask -= GroupRanks{int(r)};
  if (activeRanks) {
    requireMask(*activeRanks, staging ? staging->stream().device() : c10::kCPU, size_);
    run.activeRanks = HostTensors(staging).inOut(activeRanks->narrow(0, 0, size_), "active_ranks");
  }
  if (!staging) throwIfError(run.read());
}

void HostTokens::fillIn(TokensRun& run, Staging* staging, const Tensors& fields, int64_t topk,
                        int64_t hidden, uint32_t agreed) const {
  ep::DispatchCall& call = run.call;
  call.format = ep::RowFormat::kFields;
  for (const at::Tensor& field : fields) {
    run.kept.push_back(HostTensors(staging).input(field, "x"));
    call.fields.push_back({.from = static_cast<const std::byte*>(run.kept.back().const_data_ptr()),
                           .bytes = size_t(field.size(1)) * field.itemsize()});
  }
  call.agreed = agreed;
  call.handle = std::make_shared<ep::Handle>();
  call.handle->shape = {size_, size_, 0, size_t(hidden)};
  call.handle->experts = std::make_shared<const ep::ExpertMap>(size_, size_);
  call.handle->tokens = fields.empty() ? 0 : size_t(fields.front().size(0));
  call.handle->topk = size_t(topk);
}

std::shared_ptr<TokensRun> HostTokens::placedRun(Staging* staging, const Tensors& fields,
                                                 const at::Tensor& ranks, int64_t step,
                                                 int64_t hidden, const Tensors& into,
                                                 const std::vector<int64_t>& begins,
                                                 const std::vector<int64_t>& counts,
                                                 uint32_t agreed) const {
  throwIfError(checkRanks(ranks, size_));
  auto run = std::make_shared<TokensRun>();
  fillIn(*run, staging, fields, ranks.size(1), hidden, agreed);
  ep::DispatchCall& call = run->call;
  call.handle->shape.maxTokens = size_t(step);
  const int32_t* const chosen = ranks.const_data_ptr<int32_t>();
  call.handle->chosen.assign(chosen, chosen + ranks.numel());
  for (size_t r = 0; r < begins.size(); ++r)
    call.places.push_back({size_t(begins[r]), size_t(begins[r] + counts[r])});
  for (size_t i = 0; i < fields.size(); ++i) {
    run->kept.push_back(HostTensors(staging).output(into[i], "recv_x"));
    call.fields[i].to = static_cast<std::byte*>(run->kept.back().mutable_data_ptr());
  }
  if (into.size() > fields.size()) call.sources = into.back().mutable_data_ptr<int32_t>();
  return run;
}

void HostTokens::placeBounded(TokensRun& run, Staging& staging, const Tensors& into,
                              const at::Tensor& usedRows) {
  for (size_t i = 0; i < into.size(); ++i) {
    run.kept.push_back(staging.output(into[i].unsqueeze(0), "recv_x", {.counts = usedRows}));
    run.call.fields[i].to = static_cast<std::byte*>(run.kept.back().mutable_data_ptr());
  }
  run.call.room = size_t(into.front().size(0));
}

std::shared_ptr<TokensRun> HostTokens::refusal(const std::string& why) const {
  auto run = std::make_shared<TokensRun>();
  fillIn(*run, nullptr, {}, 1, 1, 0);
  run->call.handle->shape.maxTokens = 1;
  run->refusal = Error{ErrorCode::kInvalidArgument, why};
  run->mask = ours_.buffer()->callerMask();
  return run;
}

EpBuffer::Call HostTokens::sumsOf(const EpNormal::Combine& given, const EpRoute::Piece& piece,
                                  const EpNormal::Combined& made, const MaybeTensor& mask) const {
  const auto& handle = piece.handle.dispatch;
  const c10::Device home = given.x.device();
  const bool isBounded = given.route.isBounded, isCpu = home.is_cpu();
  TORCH_CHECK_VALUE(!isBounded || home == piece.handle.device, "x is on ", home.str(),
                    ", the rows of the handle's dispatch are on ", piece.handle.device.str());
  std::vector<int64_t> counts;  // not known yet with a bound
  if (!isBounded) counts = countsOf(*handle);
  const size_t rows = isBounded ? size_t(given.route.rows) : size_t(sumOf(counts));
  const size_t weights = given.weights ? size_t(given.weights->size(1)) : 0;
  TORCH_CHECK_VALUE(ours_.buffer()->hasRoomForSums(rows, handle->shape.hidden, weights),
                    "combine: ", rows, " rows with ", weights,
                    " weights each do not fit into the buffer's memory: make it larger");
  const auto staging = ours_.stagingFor(home);
  const HostTensors host(staging.get());
  const auto run = std::make_shared<SumsRun>();
  ep::CombineCall& call = run->call;
  run->isBounded = isBounded;
  // The rows of the piece. On a device they are put side by side: a staged tensor is copied whole.
  const auto rowsOf = [&](const at::Tensor& all, const char* what) {
    const at::Tensor used = all.narrow(0, 0, given.route.rows);
    if (isBounded) {
      return staging->input(used.unsqueeze(0), what, {.counts = piece.handle.usedRows});
    }
    if (isCpu || piece.firstRows.empty()) return host.input(used, what);
    return host.input(joined(used, piece.firstRows, counts), what);
  };
  if (isCpu) call.firstRows.assign(piece.firstRows.begin(), piece.firstRows.end());
  const auto ofTokens = [&](const at::Tensor& all) {
    return all.narrow(0, piece.begin, piece.end - piece.begin);
  };
  const auto keep = [&](at::Tensor one) { return run->kept.emplace_back(std::move(one)); };
  call.x = static_cast<const std::byte*>(keep(rowsOf(given.x, "x")).const_data_ptr());
  call.rowStride = ep::bf16Bytes(handle->shape.hidden);
  if (!isBounded) {
    call.rows = rows;
    call.chosen = handle->chosen;
  }
  call.handle = handle;
  call.combined = static_cast<uint16_t*>(
      keep(host.output(ofTokens(made.sums), "combined_x")).mutable_data_ptr());
  for (const at::Tensor& bias : given.biases) {
    call.biases.push_back(
        static_cast<const uint16_t*>(keep(host.input(ofTokens(bias), "bias")).const_data_ptr()));
  }
  if (given.weights) {
    call.extras = weights;
    call.extrasOfRows = keep(rowsOf(*given.weights, "topk_weights")).const_data_ptr<float>();
    call.extraSums = keep(host.output(ofTokens(*made.weightSums), "combined_topk_weights"))
                         .mutable_data_ptr<float>();
  }
  call.missing =
      keep(host.output(ofTokens(made.missing), "missing_contributions")).mutable_data_ptr<bool>();
  run->weights.assign(handle->tokens * handle->topk, 1);
  call.weights = run->weights.data();
  setParticipation(*run, staging.get(), given.route.participants, mask, given.timeoutMicros);
  return {run, staging};
}

}  // namespace mooncake
