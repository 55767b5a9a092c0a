#include <chrono>
#include <vector>

#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include "streams.h"

// Sparse tensors: their parts are tensors of the device. All that reads data runs on the CPU.
namespace fake_device {

namespace {

at::Tensor onCpu(const at::Tensor& self) {
  return at::_sparse_coo_tensor_unsafe(self._indices().cpu(), self._values().cpu(), self.sizes(),
                                       {}, {}, {}, {}, self.is_coalesced());
}

at::Tensor coalesced(const at::Tensor& self) {
  const at::Tensor sum = onCpu(self).coalesce();
  return at::_sparse_coo_tensor_unsafe(sum._indices().to(self.device()),
                                       sum._values().to(self.device()), sum.sizes(), {}, {}, {}, {},
                                       true);
}

at::Tensor toDense(const at::Tensor& self, std::optional<c10::ScalarType> type,
                   std::optional<bool>) {
  const at::Tensor dense = onCpu(self).to_dense().to(self.device());
  return type ? dense.to(*type) : dense;
}

// As torch does for CUDA. Boxed, because torch adds arguments.
void allreduce(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const size_t count = operation.schema().arguments().size();
  const c10::ArrayRef<c10::IValue> arguments(stack->data() + stack->size() - count, count);
  std::vector<at::Tensor> tensors = arguments[0].toTensorVector();
  const auto group = arguments[1].toCustomClass<c10d::ProcessGroup>();
  c10d::AllreduceOptions options;
  options.reduceOp = *arguments[2].toCustomClass<c10d::ReduceOp>();
  options.timeout = std::chrono::milliseconds(arguments[count - 1].toInt());
  auto work = group->getBackend(kType)->allreduce_sparse(tensors, options);
  torch::jit::drop(*stack, count);
  torch::jit::push(*stack, std::move(tensors), std::move(work));
}

TORCH_LIBRARY_IMPL(c10d, SparsePrivateUse1, m) {
  m.impl("allreduce_", torch::CppFunction::makeFromBoxedFunction<&allreduce>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors",
         &at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("_sparse_coo_tensor_with_dims", &at::native::new_with_dims_sparse);
  m.impl("empty.memory_format", &at::native::empty_sparse_symint);
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
  m.impl("copy_", &at::native::copy_sparse_wrapper_);
  m.impl("copy_sparse_to_sparse_", &at::native::copy_sparse_);
  m.impl("_coalesce", &coalesced);
  m.impl("_to_dense", &toDense);
}

}  // namespace

}  // namespace fake_device
