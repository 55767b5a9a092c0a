#pragma once

#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend/errors.h"
#include "backend/tensors.h"
#include "base/result.h"
#include "collectives/reduce_cpu.h"

// What all calls of c10d ask of their arguments. Everything here throws what Python is to see,
// before anything is sent. `operation`: the call, as Python knows it.
namespace mooncake {

[[noreturn]] void refuse(const std::string& message);  // ValueError

template <typename T>
T orThrow(Result<T> result) {
  if (!result.ok()) throwError(result.error());
  return std::move(*result);
}

DType typeOf(const at::Tensor& tensor, const char* operation);
ReduceKind kindOf(const c10d::ReduceOp& op, const char* operation);
Reduction reductionOf(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* operation);
// What the tensor gives to a reduction: itself, or with PREMUL_SUM its product with the factor.
Flat premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* operation);

std::string sizesOf(const at::Tensor& tensor);
void checkSameType(const at::Tensor& output, const at::Tensor& input, const char* operation);
// Of a tensor that is written to: its elements are in places of their own.
void checkOutput(const at::Tensor& tensor, const char* what);
// Of one that is written to on some ranks.
void checkUsed(const at::Tensor& tensor, bool isWritten, const char* what);
// As many tensors as ranks, each checked, of the input's type and size.
void checkOnePerRank(const std::vector<at::Tensor>& tensors, const at::Tensor& like, int size,
                     const char* operation, const char* role);
// The same where ranks may have more or less than others: ours is of the size of `own`.
void checkEachRank(const std::vector<at::Tensor>& tensors, const at::Tensor& own, int rank,
                   int size, const char* operation, const char* role);
bool areAlike(const std::vector<at::Tensor>& tensors);  // in size
// Two of them would write into the same memory.
void checkApart(const std::vector<at::Tensor>& outputs, const char* operation);

}  // namespace mooncake
