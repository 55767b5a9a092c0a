#include "backend/device/sparse_staging.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <c10/core/StreamGuard.h>

#include "backend/device/keep_until_passed.h"
#include "backend/tensors.h"

namespace mooncake {

SparseStaging::~SparseStaging() {
  dropOnDevice([&] { tensor_ = at::Tensor(); });
}

at::Tensor SparseStaging::sparse(const at::Tensor& tensor, const char* what) {
  const at::NoGradGuard plain;
  tensor_ = tensor;  // a detached one would get a sum of its own
  at::Tensor own;
  enqueue([&] { own = tensor.detach().coalesce(); });
  const at::Tensor indices = input(own._indices(), what), values = input(own._values(), what);
  host_ = at::_sparse_coo_tensor_unsafe(indices, values, own.sizes(), /*dtype=*/{}, /*layout=*/{},
                                        /*device=*/{}, /*pin_memory=*/{}, /*is_coalesced=*/true);
  return host_;
}

// Replaces the tensor's memory.
void SparseStaging::copyResults() {
  const c10::StreamGuard on(stream());
  const PlainWrites plain(tensor_);
  tensor_.copy_(host_);
}

void SparseStaging::block() {
  HostStaging::block();
  if (!isGiven()) return;
  const c10::Stream callers = callersStream();
  keepUntilPassed(tensor_._indices(), callers);
  keepUntilPassed(tensor_._values(), callers);
}

}  // namespace mooncake
