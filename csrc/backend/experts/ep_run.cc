#include "backend/experts/ep_run.h"

#include <cstring>
#include <string>
#include <utility>

#include "backend/experts/ep_tensors.h"

namespace mooncake {
namespace {

void readMask(const std::optional<at::Tensor>& activeRanks, int size, GroupRanks& mask) {
  if (activeRanks) mask &= maskOf(*activeRanks, size);
}

}  // namespace

Status DispatchRun::read() {
  ep::Handle& handle = *call.handle;
  auto chosen = chosenExperts(topk, handle.shape.numExperts);
  if (!chosen.ok()) return chosen.error();
  MOONCAKE_TRY(ep::checkRepeated(*handle.experts, *chosen, handle.shape.maxTokens, rank));
  handle.chosen = std::move(*chosen);
  readMask(activeRanks, handle.shape.numRanks, call.mask);
  return {};
}

Status DispatchRun::run(const ep::Memory& memory, const Status& inputs, Deadline deadline) {
  ep::Handle& handle = *call.handle;
  if (!inputs.ok()) handle.chosen.assign(handle.tokens * handle.topk, ep::kNoExpert);
  call.inputs = inputs;
  call.deadline = deadline;
  call.x = static_cast<const uint16_t*>(x.const_data_ptr());
  call.counts = counts.mutable_data_ptr<int32_t>();
  call.sources = sources.mutable_data_ptr<int32_t>();
  call.ranges = ranges.mutable_data_ptr<int64_t>();
  if (addedCounts) call.addedCounts = addedCounts->mutable_data_ptr<int32_t>();
  if (waits) call.waits = waits->mutable_data_ptr<int64_t>();
  ep::Ending ending;
  MOONCAKE_TRY(ep::dispatch(memory, call, ending));
  MOONCAKE_TRY(inputs);  // the other ranks have skipped this one
  if (activeRanks) clearOthers(*activeRanks, handle.shape.numRanks, ending.participants);
  if (usedRows.defined())
    std::memcpy(usedRows.mutable_data_ptr(), counts.const_data_ptr(), counts.nbytes());
  return {};
}

Status CombineRun::read() {
  const ep::Handle& handle = *call.handle;
  auto chosen = chosenExperts(topk, handle.shape.numExperts);
  if (!chosen.ok()) return chosen.error();
  call.chosen = std::move(*chosen);
  for (size_t i = 0; i < call.chosen.size(); ++i) {
    if (call.chosen[i] == handle.chosen[i] || call.chosen[i] == ep::kNoExpert) continue;
    return {ErrorCode::kInvalidArgument, "topk_idx: token " + std::to_string(i / handle.topk) +
                                             " chooses expert " + std::to_string(call.chosen[i]) +
                                             ", at its dispatch it chose " +
                                             std::to_string(handle.chosen[i])};
  }
  readMask(activeRanks, handle.shape.numRanks, call.mask);
  return {};
}

Status CombineRun::run(const ep::Memory& memory, const Status& inputs, Deadline deadline) {
  if (!inputs.ok()) call.chosen.assign(call.handle->chosen.size(), ep::kNoExpert);
  call.inputs = inputs;
  call.deadline = deadline;
  if (x.defined()) call.x = static_cast<const std::byte*>(x.const_data_ptr());
  call.weights = weights.const_data_ptr<float>();
  call.combined = static_cast<uint16_t*>(sums.mutable_data_ptr());
  call.missing = missing.mutable_data_ptr<bool>();
  if (waits) call.waits = waits->mutable_data_ptr<int64_t>();
  ep::Ending ending;
  MOONCAKE_TRY(ep::combine(memory, call, ending));
  MOONCAKE_TRY(inputs);  // the other ranks have skipped this one
  if (!sums.is_same(target))
    std::memcpy(target.mutable_data_ptr(), sums.const_data_ptr(), sums.nbytes());
  if (activeRanks) clearOthers(*activeRanks, call.handle->shape.numRanks, ending.participants);
  return {};
}

void MaskRun::show(const Group& group) const {
  const auto view = group.agent().viewWhenIdle();
  int32_t* shown = shown_.mutable_data_ptr<int32_t>();
  for (int r = 0; r < group.size(); ++r) shown[r] = !callerMask_.contains(r) || !view->contains(r);
}

Status MaskRun::run(const ep::Memory& memory, const Status& inputs, Deadline) {
  MOONCAKE_TRY(inputs);
  show(memory.group);
  return {};
}

}  // namespace mooncake
