#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace mooncake {

// Keeps the tensor's memory until the stream has passed its work so far. Otherwise the allocator may
// give the memory to another stream once the caller drops the tensor.
void keepUntilPassed(const at::Tensor& tensor, const c10::Stream& stream);
void keepUntilPassed(const std::vector<at::Tensor>& tensors, const c10::Stream& stream);

}  // namespace mooncake
