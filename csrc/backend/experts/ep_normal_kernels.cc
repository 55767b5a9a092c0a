#include "backend/experts/ep_normal_kernels.h"

#include <utility>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "backend/experts/ep_agreed.h"
#include "backend/experts/ep_normal_tensors.h"
#include "backend/experts/ep_tensors.h"

namespace mooncake {
namespace {

TokenKernels::Call callOf(const EpBuffer& ours, const std::vector<bool>& among,
                          const std::optional<at::Tensor>& activeRanks, int64_t timeoutMicros,
                          const c10::Device& device) {
  TokenKernels::Call call{.activeRanks = activeRanks,
                          .limit = ours.kernelLimits(timeoutMicros).most};
  for (size_t r = 0; r < among.size(); ++r)
    if (among[r]) call.among |= uint64_t(1) << r;
  if (activeRanks) requireMask(*activeRanks, device, int(among.size()));
  return call;
}

std::vector<at::Tensor> emptyRows(const std::vector<at::Tensor>& like, int64_t rows) {
  std::vector<at::Tensor> made;
  for (const at::Tensor& one : like) made.push_back(at::empty({rows, one.size(1)}, one.options()));
  return made;
}

}  // namespace

void requireFewRanks(int64_t width) {
  TORCH_CHECK_VALUE(width <= kernels::kMostOwners, "tokens have up to ", width,
                    " ranks, kernels take ", kernels::kMostOwners);
}

EpNormal::Arrived dispatchByKernels(EpBuffer& ours, const EpNormal::Dispatch& given,
                                    std::vector<at::Tensor> fields, EpRoute route,
                                    const EpNormal::Bound& most, size_t capacity, uint32_t agreed) {
  const c10::Device home = fields.front().device();
  const auto rows = int64_t(capacity), size = int64_t(route.participants.size());
  const auto ints = at::TensorOptions(at::kInt).device(home);
  // A dispatch that fails writes nothing, and the program may use the results as indices.
  TokenHandle handle{
      .shape = {.mostTokens = most.tokens,
                .mostRows = most.rows,
                .width = unsigned(route.ranks.size(1))},
      .tokens = route.tokens,
      .capacity = rows,
      .hidden = route.hidden,
      .choices = choicesOf(route.isInRank, route.ranks),
      .counts = route.isInRank.sum(0).to(at::kInt),
      .sources = at::zeros({rows}, ints),
      .ends = at::zeros({size}, ints),
      .dispatched = at::empty({int64_t(sizeof(kernels::Dispatched))}, ints.dtype(at::kByte))};
  const at::Tensor table = at::zeros({size, size + 1}, ints);
  EpNormal::Arrived arrived{.fields = emptyRows(fields, rows)};
  arrived.work = ours.tokens()->dispatch(
      callOf(ours, route.participants, given.activeRanks, given.timeoutMicros, home),
      {std::move(fields), arrived.fields, agreed}, handle, table, int64_t(route.sizes.weights));
  arrived.sources = handle.sources.clone();
  arrived.table = table.to(at::kLong);
  // The second word has a bit for each rank that took part.
  const at::Tensor bits = handle.dispatched.view(at::kLong).narrow(0, 1, 1);
  const at::Tensor numbers = at::arange(size, bits.options());
  arrived.there = bits.bitwise_right_shift(numbers).bitwise_and(1).eq(1);
  route.rows = rows;
  route.ends = handle.ends;
  route.kernels = std::move(handle);
  arrived.route = std::move(route);
  return arrived;
}

EpNormal::Arrived againByKernels(EpBuffer& ours, const EpNormal::Dispatch& given,
                                 const std::vector<at::Tensor>& fields) {
  const EpRoute& route = *given.again;
  EpNormal::Arrived arrived{.fields = emptyRows(fields, route.rows)};
  arrived.work = ours.tokens()->dispatchAgain(
      callOf(ours, route.participants, given.activeRanks, given.timeoutMicros, route.ends.device()),
      {fields, arrived.fields, hashOf(fields, 0)}, *route.kernels);
  return arrived;
}

void combineByKernels(EpBuffer& ours, const EpNormal::Combine& given, EpNormal::Combined& made) {
  const EpRoute& route = given.route;
  const c10::Device home = route.ends.device();
  requireHome(home, given.x, "x");
  TORCH_CHECK_VALUE(given.biases.size() <= kernels::kMostBiases, "bias has ", given.biases.size(),
                    " tensors: give one, or two");
  auto call = callOf(ours, route.participants, given.activeRanks, given.timeoutMicros, home);
  call.waits = !given.inBackground;
  made.work = ours.tokens()->combine(call,
                                     {.x = given.x,
                                      .weights = given.weights,
                                      .biases = given.biases,
                                      .sums = made.sums,
                                      .missing = made.missing,
                                      .weightSums = made.weightSums},
                                     *route.kernels);
}

}  // namespace mooncake
