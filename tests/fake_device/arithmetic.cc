#include <ATen/MemoryOverlap.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sub.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "launch.h"

// The operations that run on the streams' threads. Each does on the caller's thread all that may
// fail: shapes, types and overlaps are checked on tensors without data, as any device's are.
namespace fake_device {

namespace {

bool isHostScalar(const at::Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0; }

at::Tensor withoutData(const at::Tensor& tensor) {
  if (isHostScalar(tensor)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// Returns a view, or a copy of a scalar of the host: its value is that of the time of the call.
at::Tensor operand(const at::Tensor& tensor) {
  if (!isHostScalar(tensor)) return hostView(tensor);
  at::Tensor copy = tensor.detach().clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

void checkType(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kBool:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "fake device: no arithmetic for ", tensor.scalar_type());
  }
}

// Returns the device of both. Scalars of the host go with any device.
c10::Device deviceOf(const at::Tensor& a, const at::Tensor& b) {
  const c10::Device device = isHostScalar(a) ? b.device() : a.device();
  TORCH_CHECK(device.type() == kType && (isHostScalar(b) || b.device() == device),
              "Expected all tensors to be on the same device, but found ", a.device(), " and ",
              b.device());
  return device;
}

template <typename Operation, typename... Rest>
void launchBinary(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, Rest... rest) {
  checkType(a);
  checkType(b);
  checkType(out);
  if (out.numel() == 0) return;
  launch(currentStream(out), [out = hostView(out), a = operand(a), b = operand(b),
                              rest...]() mutable { Operation::run(out, a, b, rest...); });
}

template <typename Operation, typename... Rest>
at::Tensor binary(const at::Tensor& a, const at::Tensor& b, Rest... rest) {
  const c10::Device device = deviceOf(a, b);
  const at::Tensor shape = Operation::result(withoutData(a), withoutData(b), rest...);
  const at::Tensor out =
      at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
  launchBinary<Operation>(out, a, b, rest...);
  return out;
}

template <typename Operation, typename... Rest>
at::Tensor& binaryOut(const at::Tensor& a, const at::Tensor& b, Rest... rest, at::Tensor& out) {
  TORCH_CHECK(out.device() == deviceOf(a, b),
              "Expected all tensors to be on the same device, but found the result on ",
              out.device());
  at::Tensor shape = withoutData(out);
  Operation::run(shape, withoutData(a), withoutData(b), rest...);
  if (shape.sizes() != out.sizes()) out.resize_(shape.sizes());
  at::assert_no_internal_overlap(out);
  for (const at::Tensor& in : {a, b})
    if (!isHostScalar(in)) at::assert_no_partial_overlap(out, in);
  launchBinary<Operation>(out, a, b, rest...);
  return out;
}

template <typename Operation, typename... Rest>
at::Tensor& binaryInPlace(at::Tensor& self, const at::Tensor& other, Rest... rest) {
  const at::Tensor shape = Operation::result(withoutData(self), withoutData(other), rest...);
  TORCH_CHECK(shape.sizes() == self.sizes(), "output with shape ", self.sizes(),
              " doesn't match the broadcast shape ", shape.sizes());
  return binaryOut<Operation, Rest...>(self, other, rest..., self);
}

struct Add {
  static at::Tensor result(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
    return at::add(a, b, alpha);
  }
  static void run(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                  const at::Scalar& alpha) {
    at::add_out(out, a, b, alpha);
  }
};

struct Subtract {
  static at::Tensor result(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
    return at::sub(a, b, alpha);
  }
  static void run(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                  const at::Scalar& alpha) {
    at::sub_out(out, a, b, alpha);
  }
};

struct Multiply {
  static at::Tensor result(const at::Tensor& a, const at::Tensor& b) { return at::mul(a, b); }
  static void run(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
    at::mul_out(out, a, b);
  }
};

struct Divide {
  static at::Tensor result(const at::Tensor& a, const at::Tensor& b) { return at::div(a, b); }
  static void run(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
    at::div_out(out, a, b);
  }
};

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  // Fails here if the type cannot hold the value.
  const at::Tensor one = at::empty({}, self.options().device(at::kCPU)).fill_(value);
  if (self.numel() > 0)
    launch(currentStream(self), [self = hostView(self), one] { self.copy_(one); });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using Scalar = const at::Scalar&;
  m.impl("add.Tensor", &binary<Add, Scalar>);
  m.impl("add.out", &binaryOut<Add, Scalar>);
  m.impl("add_.Tensor", &binaryInPlace<Add, Scalar>);
  m.impl("sub.Tensor", &binary<Subtract, Scalar>);
  m.impl("sub.out", &binaryOut<Subtract, Scalar>);
  m.impl("sub_.Tensor", &binaryInPlace<Subtract, Scalar>);
  m.impl("mul.Tensor", &binary<Multiply>);
  m.impl("mul.out", &binaryOut<Multiply>);
  m.impl("mul_.Tensor", &binaryInPlace<Multiply>);
  m.impl("div.Tensor", &binary<Divide>);
  m.impl("div.out", &binaryOut<Divide>);
  m.impl("div_.Tensor", &binaryInPlace<Divide>);
  m.impl("fill_.Scalar", &fill);
  m.impl("zero_", &zero);
}

}  // namespace

}  // namespace fake_device
