#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include "streams.h"

namespace fake_device {

// Returns the tensor's memory as a CPU tensor, which owns nothing: for the work of streams.
at::Tensor hostView(const at::Tensor& tensor);
// The same for an operand. Of a scalar of the host a copy: its value is that of the time of the call.
at::Tensor hostOperand(const at::Tensor& tensor);

// Runs an operation on host views later, on the stream's thread. The operation must not fail.
template <typename Operation>
void launch(const c10::Stream& stream, Operation operation) {
  enqueue(stream, [operation = std::move(operation)]() mutable {
    const at::AutoDispatchBelowADInplaceOrView without_autograd;
    operation();
  });
}

inline c10::Stream currentStream(const at::Tensor& tensor) {
  return currentStream(tensor.device().index());
}

}  // namespace fake_device
