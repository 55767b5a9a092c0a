#include "deferred.h"

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ops/empty_strided.h>

#include "launch.h"

namespace fake_device {

namespace {

using c10::IValue;

std::atomic<bool> isDeferred = false;

bool isOfOurs(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

bool isMask(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

// Returns the value with `change` applied to its tensors.
template <typename Change>
IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : value.toTensorVector()) list.push_back(change(one));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
      list.push_back(one && one->defined() ? std::optional(change(*one)) : one);
    return list;
  }
  return value;
}

at::Tensor withoutData(const at::Tensor& tensor) {
  if (!isOfOurs(tensor)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// Returns the stream of the arguments; none if the operation cannot run later.
std::optional<c10::Stream> streamOf(const std::vector<IValue>& arguments) {
  std::optional<c10::Stream> stream;
  bool isPossible = true;
  for (const IValue& value : arguments) {
    if (value.isDevice() || value.isGenerator()) return std::nullopt;
    changed(value, [&](const at::Tensor& tensor) {
      isPossible &= isOfOurs(tensor) || (tensor.is_cpu() && tensor.dim() == 0);
      isPossible &= !value.isOptionalTensorList() || !isMask(tensor);  // an index
      if (isOfOurs(tensor) && !stream) stream = currentStream(tensor);
      return tensor;
    });
  }
  return isPossible ? stream : std::nullopt;
}

// Runs the operation on tensors without data. Returns false if it needs them.
bool inferShapes(const c10::OperatorHandle& operation, torch::jit::Stack& values) {
  for (IValue& value : values) value = changed(value, withoutData);
  try {
    operation.callBoxed(values);
  } catch (const std::exception&) {
    return false;
  }
  for (const IValue& value : values)
    if (!value.isTensor() || !value.toTensor().is_meta()) return false;
  return true;
}

}  // namespace

void setDeferred(bool isOn) { isDeferred = isOn; }

bool defer(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  if (!isDeferred) return false;
  const auto& schema = operation.schema();
  const size_t count = schema.arguments().size();
  const std::vector<IValue> arguments(stack->end() - ptrdiff_t(count), stack->end());
  const std::optional<c10::Stream> stream = streamOf(arguments);
  torch::jit::Stack shapes = arguments;
  if (!stream || !inferShapes(operation, shapes)) return false;
  std::vector<at::Tensor> written;  // arguments that are results
  for (size_t i = 0; i < count; ++i) {
    const auto* const alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite()) written.push_back(arguments[i].toTensor());
  }
  std::vector<at::Tensor> results;
  std::vector<std::pair<size_t, at::Tensor>> made;  // by their number
  for (size_t i = 0; i < shapes.size(); ++i) {
    const at::Tensor& shape = shapes[i].toTensor();
    const auto* const alias = schema.returns()[i].alias_info();
    if (alias) {
      if (!alias->isWrite() || i >= written.size()) return false;
      if (written[i].sizes() != shape.sizes()) written[i].resize_(shape.sizes());
      results.push_back(written[i]);
      continue;
    }
    results.push_back(at::empty_strided(shape.sizes(), shape.strides(),
                                        shape.options().device(stream->device())));
    made.emplace_back(i, hostView(results.back()));
  }
  torch::jit::Stack views = arguments;
  for (IValue& value : views) value = changed(value, hostOperand);
  launch(*stream, [operation, views = std::move(views), made = std::move(made)]() mutable {
    operation.callBoxed(views);
    for (auto& [number, view] : made) view.copy_(views[number].toTensor());
  });
  stack->erase(stack->end() - ptrdiff_t(count), stack->end());
  for (at::Tensor& result : results) stack->emplace_back(std::move(result));
  return true;
}

}  // namespace fake_device
