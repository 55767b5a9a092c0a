#pragma once

#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend/errors.h"
#include "backend/tensors.h"
#include "base/result.h"
#include "collectives/reduce_cpu.h"

// Checks of the arguments of c10d's calls. Before anything is sent, they throw the exceptions that
// Python sees. `operation`: the name of the call in Python.
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
// The factor of PREMUL_SUM for the tensor. Waits for the device, if the factor is there.
at::Scalar factorOf(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* operation);
bool isFactorOnDevice(const c10d::ReduceOp& op);
// The tensor's contribution to a reduction: itself, or with PREMUL_SUM its product with the factor.
Flat premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* operation);
std::vector<Flat> premultipliedAll(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op,
                                   const char* operation);

// The only tensor, or list, of this rank: c10d passes lists, for backends with several devices.
const at::Tensor& onlyTensor(const std::vector<at::Tensor>& tensors, const char* operation);
const std::vector<at::Tensor>& onlyList(const std::vector<std::vector<at::Tensor>>& lists,
                                        const char* operation);
bool isRoot(int64_t root, int64_t rootTensor, int size);  // of a group of that size
int rootOf(int64_t root, int64_t rootTensor, int size, const char* operation);
// Whether there is one list, of a tensor for each rank, all as large as `like`.
bool isListFor(const std::vector<std::vector<at::Tensor>>& lists, const at::Tensor& like, int size);
std::vector<size_t> bytesOfEach(const std::vector<at::Tensor>& tensors);

std::string sizesOf(const at::Tensor& tensor);
void checkSameType(const at::Tensor& output, const at::Tensor& input, const char* operation);
// Checks a tensor that the operation writes: no two of its elements may share memory.
void checkOutput(const at::Tensor& tensor, const char* what);
// Refuses a tensor with two elements in one place. The device does not matter.
void refuseOwnOverlap(const at::Tensor& tensor, const char* what);
// Number of ranks for which `whole` has a part as large as `part`: all, or the first ones. In a call
// without parts for the last ranks these must be lost. Refuses other sizes with `message`.
int partsIn(const at::Tensor& whole, const at::Tensor& part, int size, const std::string& message);
// Checks a tensor that the operation writes on some ranks only.
void checkUsed(const at::Tensor& tensor, bool isWritten, const char* what);
// Checks a list with one tensor for each rank: all have the type of `like`, and its number of
// elements.
void checkOnePerRank(const std::vector<at::Tensor>& tensors, const at::Tensor& like, int size,
                     const char* operation, const char* role);
// The same, but the tensors of other ranks may have any size. Ours must have the size of `own`. There
// may be tensors for the first ranks only, as in partsIn(): then all must have its size.
void checkEachRank(const std::vector<at::Tensor>& tensors, const at::Tensor& own, int rank,
                   int size, const char* operation, const char* role);
// Returns the number of elements that all_to_all_single sends to, or gets from, each rank.
// `splits` divides the first dimension; if it is empty, all ranks have equal parts.
std::vector<int64_t> elementsPerRank(const at::Tensor& tensor, const std::vector<int64_t>& splits,
                                     int size, const char* what);
bool areAlike(const std::vector<at::Tensor>& tensors);  // in size
// Refuses outputs that share memory with each other or with themselves, on any device. They are
// tensors that the operation takes.
void checkApart(const std::vector<at::Tensor>& outputs, const char* operation);

}  // namespace mooncake
