#include "launch.h"

#include <ATen/ops/from_blob.h>

namespace fake_device {

at::Tensor hostView(const at::Tensor& tensor) {
  at::Tensor view = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                                  tensor.options().device(at::kCPU));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor hostOperand(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.dim() != 0) return hostView(tensor);
  at::Tensor copy = tensor.detach().clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

}  // namespace fake_device
