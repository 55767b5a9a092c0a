#pragma once

#include <span>
#include <vector>

#include <ATen/ATen.h>

#include "base/dtype.h"
#include "base/result.h"

namespace mooncake {

// kInvalidArgument for a type that the wire does not know.
Result<DType> dtypeOf(const at::Tensor& tensor);

// Refuses what no operation can take: not on the CPU, not strided (sparse), not defined. `what`
// names the argument.
Status checkTensor(const at::Tensor& tensor, const char* what);

// The bytes of a contiguous tensor.
std::span<std::byte> bytesOf(const at::Tensor& contiguous);

// A tensor that an operation works on as one run of bytes: the tensor itself when it is contiguous,
// else a copy, which give() writes back.
class Flat {
 public:
  explicit Flat(at::Tensor tensor) : tensor_(std::move(tensor)), flat_(tensor_.contiguous()) {}
  std::span<std::byte> bytes() const { return bytesOf(flat_); }
  void give() const {
    if (!flat_.is_same(tensor_)) tensor_.copy_(flat_);
  }

 private:
  at::Tensor tensor_;
  at::Tensor flat_;
};
std::vector<Flat> flatten(const std::vector<at::Tensor>& tensors);
std::vector<std::span<std::byte>> spansOf(const std::vector<Flat>& flats);
// Of all, where it is ok.
void give(const Status& status, const std::vector<Flat>& flats);

// Cuts a run of bytes into consecutive pieces.
std::vector<std::span<std::byte>> cut(std::span<std::byte> bytes,
                                      const std::vector<int64_t>& elements, size_t elementSize);

}  // namespace mooncake
