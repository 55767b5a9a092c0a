#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "allocator.h"
#include "storage.h"
#include "streams.h"

// Tensors, their memory and their views: all that touches no data.
namespace fake_device {

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device deviceOr(std::optional<c10::Device> device) {
  return device.value_or(c10::Device(kType, currentDevice()));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> type,
                 std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(deviceOr(device));
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(type), format);
}

at::Tensor emptyStrided(c10::IntArrayRef size, c10::IntArrayRef stride,
                        std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
                        std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(deviceOr(device));
  return at::detail::empty_strided_generic(size, stride, &allocator(), kKeys,
                                           c10::dtype_or_default(type));
}

// Gives the tensor's storage at least the memory that its shape needs.
void growStorage(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const size_t bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                        tensor.itemsize(), tensor.storage_offset());
  if (bytes > tensor.storage().nbytes()) resizeStorage(tensor.storage(), bytes);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef symbolicSize,
                         std::optional<c10::MemoryFormat> format) {
  const auto size = C10_AS_INTARRAYREF_SLOW(symbolicSize);
  if (self.sizes() != size) self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  growStorage(self);
  return self;
}

at::Tensor& setStorage(at::Tensor& self, c10::Storage storage, c10::SymInt offset,
                       c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  at::native::checkSetStorage<int64_t>(self, std::move(storage), offset.expect_int(),
                                       C10_AS_INTARRAYREF_SLOW(size),
                                       C10_AS_INTARRAYREF_SLOW(stride));
  auto* const tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_offset(offset.expect_int());
  if (stride.empty() && !size.empty()) {
    tensor->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  } else {
    tensor->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  }
  growStorage(self);
  return self;
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshapeAlias(const at::Tensor& self, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor asStrided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<c10::SymInt> offset) {
  const auto begin = offset ? std::make_optional(offset->expect_int()) : std::optional<int64_t>();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), begin);
}

void recordStream(at::Tensor& self, c10::Stream stream) {
  allocator().recordUse(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &emptyStrided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &setStorage);
  m.impl("set_.source_Storage",
         static_cast<at::Tensor& (*)(at::Tensor&, c10::Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshapeAlias);
  m.impl("as_strided", &asStrided);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("record_stream", &recordStream);
}

}  // namespace

}  // namespace fake_device
