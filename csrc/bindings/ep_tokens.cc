#include "bindings/ep_tokens.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/device/token_kernels.h"
#include "backend/ep_tensors.h"
#include "backend/ep_work.h"

namespace py = pybind11;

namespace mooncake {
namespace {

using MaybeTensor = std::optional<at::Tensor>;
using Work = std::shared_ptr<EpWork>;
// Handle, sources, ends, table; see TokenKernels.
using DispatchedTokens = std::tuple<TokenHandle, at::Tensor, at::Tensor, at::Tensor, Work>;

TokenKernels::Call callOf(const EpBuffer& buffer, const c10::Device& device,
                          const std::vector<bool>& among, const MaybeTensor& activeRanks,
                          int64_t timeoutMicros) {
  const int size = buffer.buffer()->group().size();
  TORCH_CHECK_VALUE(among.size() == size_t(size), "among has ", among.size(), " ranks of ", size);
  TokenKernels::Call call{.limit = buffer.kernelLimits(timeoutMicros).most};
  for (int rank = 0; rank < size; ++rank)
    if (among[size_t(rank)]) call.among |= uint64_t(1) << rank;
  if (activeRanks) {
    requireMask(*activeRanks, device, size);
    call.activeRanks = *activeRanks;
  }
  return call;
}

void requireFields(const TokenKernels::Fields& fields, const c10::Device& device, int64_t tokens,
                   int64_t capacity) {
  TORCH_CHECK_VALUE(fields.made.size() == fields.given.size(), "into has ", fields.made.size(),
                    " tensors, expected ", fields.given.size());
  for (size_t i = 0; i < fields.given.size(); ++i) {
    const at::Tensor& given = fields.given[i];
    requireTensor(given, "a field", device, given.scalar_type(), {tokens, -1});
    requireTensor(fields.made[i], "a result", device, given.scalar_type(),
                  {capacity, given.size(1)});
  }
}

DispatchedTokens dispatchTokens(EpBuffer& buffer, std::vector<at::Tensor> fields,
                                std::vector<at::Tensor> into, const at::Tensor& choices,
                                const at::Tensor& counts, int64_t capacity,
                                std::optional<size_t> mostTokens, size_t mostRows, int64_t hidden,
                                int64_t weights, const std::vector<bool>& among,
                                const MaybeTensor& activeRanks, int64_t timeoutMicros,
                                uint32_t agreed) {
  const c10::Device device = choices.device();
  const int64_t size = buffer.buffer()->group().size(), tokens = choices.size(0);
  const TokenKernels::Fields rows{std::move(fields), std::move(into), agreed};
  requireTensor(choices, "choices", device, at::kInt, {-1, -1, 2});
  requireTensor(counts, "counts", device, at::kInt, {size});
  requireFields(rows, device, tokens, capacity);
  const auto call = callOf(buffer, device, among, activeRanks, timeoutMicros);
  const auto ints = at::TensorOptions(at::kInt).device(device);
  // A dispatch that fails writes nothing, and the program may use the results as indices.
  TokenHandle handle{
      .shape = {.mostTokens = mostTokens, .mostRows = mostRows, .width = unsigned(choices.size(1))},
      .tokens = tokens,
      .capacity = capacity,
      .hidden = hidden,
      .choices = choices,
      .counts = counts,
      .sources = at::zeros({capacity}, ints),
      .ends = at::zeros({size}, ints),
      .dispatched = at::empty({int64_t(sizeof(kernels::Dispatched))}, ints.dtype(at::kByte))};
  const at::Tensor table = at::zeros({size, size + 1}, ints);
  py::gil_scoped_release unlocked;
  auto work = buffer.tokens()->dispatch(call, rows, handle, table, weights);
  return {handle, handle.sources, handle.ends, table, std::move(work)};
}

void requireHandle(const EpBuffer& buffer, const TokenHandle& handle) {
  TORCH_CHECK_VALUE(handle.kernels == buffer.tokens(),
                    "the handle is of a dispatch of another buffer");
}

Work dispatchAgain(EpBuffer& buffer, std::vector<at::Tensor> fields, std::vector<at::Tensor> into,
                   const TokenHandle& handle, const std::vector<bool>& among,
                   const MaybeTensor& activeRanks, int64_t timeoutMicros, uint32_t agreed) {
  requireHandle(buffer, handle);
  const c10::Device device = handle.choices.device();
  const TokenKernels::Fields rows{std::move(fields), std::move(into), agreed};
  requireFields(rows, device, handle.tokens, handle.capacity);
  const auto call = callOf(buffer, device, among, activeRanks, timeoutMicros);
  py::gil_scoped_release unlocked;
  return buffer.tokens()->dispatchAgain(call, rows, handle);
}

Work combineTokens(EpBuffer& buffer, const at::Tensor& x, const TokenHandle& handle,
                   const at::Tensor& sums, const at::Tensor& missing, const MaybeTensor& weights,
                   const MaybeTensor& weightSums, std::vector<at::Tensor> biases,
                   const std::vector<bool>& among, const MaybeTensor& activeRanks,
                   int64_t timeoutMicros, bool inBackground) {
  requireHandle(buffer, handle);
  const c10::Device device = handle.choices.device();
  const int64_t tokens = handle.tokens, hidden = handle.hidden;
  requireTensor(x, "x", device, at::kBFloat16, {-1, hidden});
  TORCH_CHECK_VALUE(x.size(0) >= handle.capacity, "x has ", x.size(0), " rows, the dispatch has ",
                    handle.capacity);
  requireTensor(sums, "combined_x", device, at::kBFloat16, {tokens, hidden});
  requireTensor(missing, "missing_contributions", device, at::kBool, {tokens});
  TORCH_CHECK_VALUE(biases.size() <= kernels::kMostBiases, "bias has ", biases.size(),
                    " tensors: give one, or two");
  for (const at::Tensor& bias : biases)
    requireTensor(bias, "bias", device, at::kBFloat16, {tokens, hidden});
  TORCH_CHECK_VALUE(weights.has_value() == weightSums.has_value(),
                    "topk_weights and their sums belong together");
  if (weights) {
    requireTensor(*weights, "topk_weights", device, at::kFloat, {-1, -1});
    TORCH_CHECK_VALUE(weights->size(0) >= handle.capacity, "topk_weights has ", weights->size(0),
                      " rows, the dispatch has ", handle.capacity);
    requireTensor(*weightSums, "combined_topk_weights", device, at::kFloat,
                  {tokens, weights->size(1)});
  }
  auto call = callOf(buffer, device, among, activeRanks, timeoutMicros);
  call.waits = !inBackground;
  py::gil_scoped_release unlocked;
  return buffer.tokens()->combine(call,
                                  {.x = x,
                                   .weights = weights,
                                   .biases = std::move(biases),
                                   .sums = sums,
                                   .missing = missing,
                                   .weightSums = weightSums},
                                  handle);
}

}  // namespace

void bindTokenKernels(py::module_& m, py::class_<EpBuffer>& buffer) {
  const auto none = py::none();
  py::class_<TokenHandle>(m, "EpTokenHandle")
      .def_readonly("number", &TokenHandle::number)
      .def_readonly("dispatched", &TokenHandle::dispatched);
  buffer
      .def(
          "takes_tokens",
          [](const EpBuffer& ours, const c10::Device& device) {
            return ours.tokens() && !device.is_cpu() && ours.tokens()->takes(device);
          },
          py::call_guard<py::gil_scoped_release>(), py::arg("device"))
      .def(
          "end_on_device",
          [](const EpBuffer& ours, std::string why) {
            ours.tokens()->fail({ErrorCode::kInvalidArgument, std::move(why)});
          },
          py::call_guard<py::gil_scoped_release>(), py::arg("why"))
      .def("dispatch_on_device", &dispatchTokens, py::arg("fields"), py::arg("into"),
           py::arg("choices"), py::arg("counts"), py::arg("capacity"), py::arg("most_tokens"),
           py::arg("most_rows"), py::arg("hidden"), py::arg("weights"), py::arg("among"),
           py::arg("active_ranks") = none, py::arg("timeout_us") = -1, py::arg("agreed") = 0)
      .def("dispatch_on_device_again", &dispatchAgain, py::arg("fields"), py::arg("into"),
           py::arg("handle"), py::arg("among"), py::arg("active_ranks") = none,
           py::arg("timeout_us") = -1, py::arg("agreed") = 0)
      .def("combine_on_device", &combineTokens, py::arg("x"), py::arg("handle"), py::arg("out"),
           py::arg("missing"), py::arg("weights"), py::arg("weight_sums"), py::arg("biases"),
           py::arg("among"), py::arg("active_ranks") = none, py::arg("timeout_us") = -1,
           py::arg("background") = false);
}

}  // namespace mooncake
