#include "bindings/ep_normal.h"

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/experts/ep_normal.h"
#include "backend/experts/ep_tensors.h"

namespace py = pybind11;

namespace mooncake {
namespace {

using MaybeTensor = std::optional<at::Tensor>;
using MaybeBound = std::optional<std::pair<size_t, std::optional<size_t>>>;
using AgreedArguments = std::vector<std::pair<std::string, decltype(Agreed::value)>>;
using Work = std::shared_ptr<EpWork>;
// See EpNormal::Arrived.
using Arrived = std::tuple<std::vector<at::Tensor>, at::Tensor, at::Tensor, at::Tensor, EpRoute,
                           at::Tensor, at::Tensor, Work>;

EpNormal::Bound boundOf(const std::pair<size_t, std::optional<size_t>>& given) {
  return {given.first, given.second};
}

Arrived dispatch(EpBuffer& buffer, std::vector<at::Tensor> fields, const at::Tensor& isInRank,
                 const MaybeTensor& ranks, const at::Tensor& perExpert,
                 const AgreedArguments& agreed, std::optional<size_t> weights,
                 const MaybeBound& bound, const EpRoute* of, size_t shownRows,
                 const MaybeTensor& activeRanks, int64_t timeoutMicros) {
  py::gil_scoped_release unlocked;
  EpNormal::Dispatch given{.fields = std::move(fields),
                           .isInRank = isInRank,
                           .ranks = ranks,
                           .perExpert = perExpert,
                           .weights = weights,
                           .of = of,
                           .shownRows = shownRows,
                           .activeRanks = activeRanks,
                           .timeoutMicros = timeoutMicros};
  for (const auto& [name, value] : agreed) given.agreed.push_back({name, value});
  if (bound) given.bound = boundOf(*bound);
  auto made = buffer.normal().dispatch(given);
  return {std::move(made.fields),  std::move(made.sources), std::move(made.table),
          std::move(made.there),   std::move(*made.route),  std::move(made.counted),
          std::move(made.experts), std::move(made.work)};
}

std::vector<at::Tensor> dispatchAgain(EpBuffer& buffer, std::vector<at::Tensor> fields,
                                      const EpRoute& route, const MaybeTensor& activeRanks,
                                      int64_t timeoutMicros) {
  py::gil_scoped_release unlocked;
  return buffer.normal()
      .dispatch({.fields = std::move(fields),
                 .again = &route,
                 .activeRanks = activeRanks,
                 .timeoutMicros = timeoutMicros})
      .fields;
}

std::tuple<at::Tensor, at::Tensor, MaybeTensor, Work> combine(
    EpBuffer& buffer, const at::Tensor& x, const EpRoute& route, const MaybeTensor& weights,
    std::vector<at::Tensor> biases, const MaybeTensor& activeRanks, int64_t timeoutMicros,
    bool inBackground) {
  py::gil_scoped_release unlocked;
  auto made = buffer.normal().combine({.x = x,
                                       .route = route,
                                       .weights = weights,
                                       .biases = std::move(biases),
                                       .activeRanks = activeRanks,
                                       .timeoutMicros = timeoutMicros,
                                       .inBackground = inBackground});
  return {std::move(made.sums), std::move(made.missing), std::move(made.weightSums),
          std::move(made.work)};
}

}  // namespace

void bindNormalMode(py::module_& m, py::class_<EpBuffer>& buffer) {
  using WithoutLock = py::call_guard<py::gil_scoped_release>;
  const auto none = py::none();
  py::class_<EpRoute>(m, "EpRoute")
      .def_readonly("tokens", &EpRoute::tokens)
      .def_readonly("hidden", &EpRoute::hidden)
      .def_readonly("num_rows", &EpRoute::rows)
      .def_readonly("is_token_in_rank", &EpRoute::isInRank)
      .def_readonly("ends", &EpRoute::ends)
      .def_readonly("participants", &EpRoute::participants)
      .def_readonly("is_at_worst", &EpRoute::isBounded)
      .def_property_readonly("number", &EpRoute::number)
      .def_property_readonly("kernels",
                             [](const EpRoute& route) -> std::optional<uint64_t> {
                               if (!route.kernels) return std::nullopt;
                               return route.kernels->number;
                             })
      .def_property_readonly("pieces",
                             [](const EpRoute& route) {
                               std::vector<std::pair<int64_t, int64_t>> tokens;
                               for (const EpRoute::Piece& piece : route.pieces)
                                 tokens.emplace_back(piece.begin, piece.end);
                               return tokens;
                             })
      .def("is_of", [](const EpRoute& route, const EpBuffer& ours) {
        return route.buffer == ours.buffer();
      });
  const auto normal = [](EpBuffer& ours) -> EpNormal& { return ours.normal(); };
  buffer
      .def(
          "begin_call",
          [=](EpBuffer& ours, int operations, bool isAlone) {
            normal(ours).begin(operations, isAlone);
          },
          py::arg("operations"), py::arg("is_alone"))
      .def(
          "refuse_call",
          [=](EpBuffer& ours, const std::string& why) { return normal(ours).refuse(why); },
          WithoutLock(), py::arg("why"))
      .def(
          "goes_by_kernels",
          [=](EpBuffer& ours, const c10::Device& device) { return normal(ours).byKernels(device); },
          WithoutLock(), py::arg("device"))
      .def(
          "takes_bound",
          [=](EpBuffer& ours, const std::vector<at::Tensor>& fields,
              const std::pair<size_t, std::optional<size_t>>& bound, std::optional<size_t> weights,
              int64_t timeoutMicros) {
            return normal(ours).takesBound(fields, boundOf(bound), weights, timeoutMicros);
          },
          WithoutLock(), py::arg("fields"), py::arg("bound"), py::arg("weights"),
          py::arg("timeout_us"))
      .def("normal_dispatch", &dispatch, py::arg("fields"), py::arg("is_token_in_rank"),
           py::arg("token_ranks"), py::arg("num_tokens_per_expert"), py::arg("agreed"),
           py::arg("weights") = none, py::arg("bound") = none, py::arg("of") = none,
           py::arg("shown_rows") = 0, py::arg("active_ranks") = none, py::arg("timeout_us") = -1)
      .def("normal_dispatch_again", &dispatchAgain, py::arg("fields"), py::arg("route"),
           py::arg("active_ranks") = none, py::arg("timeout_us") = -1)
      .def("normal_combine", &combine, py::arg("x"), py::arg("route"),
           py::arg("topk_weights") = none, py::arg("biases") = std::vector<at::Tensor>(),
           py::arg("active_ranks") = none, py::arg("timeout_us") = -1,
           py::arg("background") = false)
      .def(
          "normal_barrier", [=](EpBuffer& ours) { normal(ours).barrier(); }, WithoutLock())
      .def(
          "most_tokens",
          [=](EpBuffer& ours, const std::vector<size_t>& fieldBytes, size_t hidden, size_t weights,
              double rowsPerToken) {
            return normal(ours).mostTokens(fieldBytes, hidden, weights, rowsPerToken);
          },
          py::arg("field_bytes"), py::arg("hidden"), py::arg("weights"), py::arg("rows_per_token"))
      .def(
          "new_result",
          [](EpBuffer& ours, const std::vector<int64_t>& sizes, const at::Tensor& like) {
            return newResult(*ours.results(), sizes, like.scalar_type());
          },
          py::arg("sizes"), py::arg("like"))
      .def("uses_words", &EpBuffer::usesWords, py::arg("device"));
}

}  // namespace mooncake
