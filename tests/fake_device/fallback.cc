#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include "deferred.h"
#include "generator.h"
#include "streams.h"

// All other operations run on the CPU, at their place in the current stream: their arguments are
// copied to the host on it, so it has passed all its work so far. Tests may defer them.
namespace fake_device {

namespace {

// Returns the device of the first tensor on one, or the current device.
c10::DeviceIndex deviceOf(c10::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& value : arguments) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kType)
      return value.toTensor().device().index();
  }
  return currentDevice();
}

// Gives the operation a CPU generator in place of the device's.
void replaceGenerators(const c10::FunctionSchema& schema, torch::jit::Stack& stack) {
  const size_t count = schema.arguments().size();
  c10::IValue* const values = stack.data() + stack.size() - count;
  for (size_t i = 0; i < count; ++i) {
    if (!c10::GeneratorType::get()->isSubtypeOf(*schema.arguments()[i].type())) continue;
    at::Generator generator =
        values[i].isNone() ? defaultGenerator(deviceOf(c10::ArrayRef<c10::IValue>(values, count)))
                           : values[i].toGenerator();
    if (generator.device().type() != kType) continue;
    const std::lock_guard lock(generator.mutex());
    values[i] = generator.get<Generator>()->forOneCall();
  }
}

void runOnCpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  if (defer(operation, stack)) return;
  replaceGenerators(operation.schema(), *stack);
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&runOnCpu>());
}

}  // namespace

}  // namespace fake_device
