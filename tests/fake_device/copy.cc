#include "copy.h"

#include <atomic>
#include <chrono>
#include <thread>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "event.h"
#include "launch.h"

// Copies between tensors, asynchronous exactly where CUDA's are.
namespace fake_device {

namespace {

bool isOnDevice(const at::Tensor& tensor) { return tensor.device().type() == kType; }

// Whether the two have the same bytes in the same places once `from` is copied to `to`.
bool haveSameLayout(const at::Tensor& from, const at::Tensor& to) {
  return from.scalar_type() == to.scalar_type() && from.is_conj() == to.is_conj() &&
         from.is_neg() == to.is_neg() && from.strides().equals(to.strides()) &&
         to.is_non_overlapping_and_dense();
}

void copyOnDevice(const at::Tensor& from, const at::Tensor& to, const c10::Stream& stream) {
  launch(stream, [from = hostView(from), to = hostView(to)] { to.copy_(from); });
}

// The copy runs on the source's stream. The destination's stream has passed its work so far
// before it, and waits for it.
void copyBetweenDevices(const at::Tensor& from, const at::Tensor& to) {
  const c10::Stream source = currentStream(from), destination = currentStream(to);
  Event ready(destination.device_index(), false), done(source.device_index(), false);
  ready.record(destination);
  ready.block(source);
  copyOnDevice(from, to, source);
  done.record(source);
  done.block(destination);
}

std::atomic<double> secondsPerByte = 0;

void copyBytes(const at::Tensor& from, const at::Tensor& to, const c10::Stream& stream,
               bool isNonBlocking) {
  check(devices().copy(nativeStream(stream), to.data_ptr(), from.data_ptr(), to.nbytes()));
  if (const std::chrono::duration<double> rest(secondsPerByte * double(to.nbytes())); rest.count())
    enqueue(stream, [rest] { std::this_thread::sleep_for(rest); });
  if (!isNonBlocking) check(devices().synchronize(nativeStream(stream)));
}

// Conversions run where the source is. Their result on the host is pageable.
void copyToDevice(const at::Tensor& from, const at::Tensor& to, bool isNonBlocking) {
  const c10::Stream stream = currentStream(to);
  if (haveSameLayout(from, to)) return copyBytes(from, to, stream, isNonBlocking);
  const at::Tensor source = from.resolve_conj().resolve_neg().to(to.scalar_type()).contiguous();
  const at::Tensor landed = at::empty(to.sizes(), to.options());
  copyBytes(source, landed, stream, isNonBlocking);
  copyOnDevice(landed, to, stream);
}

void copyToHost(const at::Tensor& from, const at::Tensor& to, bool isNonBlocking) {
  const c10::Stream stream = currentStream(from);
  if (haveSameLayout(from, to)) return copyBytes(from, to, stream, isNonBlocking);
  const at::Tensor source = at::empty(from.sizes(), from.options().dtype(to.scalar_type()));
  copyOnDevice(from, source, stream);
  const bool isDirect = to.is_contiguous() && !to.is_conj() && !to.is_neg();
  const at::Tensor landed = isDirect ? to : at::empty(to.sizes(), to.options());
  copyBytes(source, landed, stream, isNonBlocking);
  if (!isDirect) to.copy_(landed);  // pageable memory: the copy is over
}

at::Tensor copyFrom(const at::Tensor& source, const at::Tensor& to, bool isNonBlocking) {
  const at::Tensor from = source.expand_as(to);
  if (to.numel() == 0) return to;
  const c10::DeviceGuard guard(isOnDevice(to) ? to.device() : from.device());
  if (!isOnDevice(from)) {
    copyToDevice(from, to, isNonBlocking);
  } else if (!isOnDevice(to)) {
    copyToHost(from, to, isNonBlocking);
  } else if (from.device() == to.device()) {
    copyOnDevice(from, to, currentStream(to));
  } else {
    copyBetweenDevices(from, to);
  }
  return to;
}

at::Tensor copyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copyFrom(from, to, false);
}

at::Scalar localScalar(const at::Tensor& tensor) { return tensor.to(at::kCPU).item(); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copyFrom);
  m.impl("_copy_from_and_resize", &copyFromAndResize);
  m.impl("_local_scalar_dense", &localScalar);
}

// Copies understand both bits. Otherwise torch would clone the source first, by such a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace

void slowCopies(double bytesPerSecond) {
  secondsPerByte = bytesPerSecond > 0 ? 1 / bytesPerSecond : 0;
}

}  // namespace fake_device
