#include <ATen/TensorIterator.h>
#include <ATen/native/BinaryOps.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sub.h>
#include <torch/library.h>

#include "launch.h"

// The operations that run on the streams' threads. All that may fail is done at the call: torch's
// iterator checks devices, shapes, types and overlaps, and allocates the result.
namespace fake_device {

namespace {

// The CPU has no arithmetic for the other types.
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

// `out` may be undefined. Returns the result, which an operation of a stream fills.
template <typename Operation, typename... Rest>
at::Tensor launchBinary(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                        const Rest&... rest) {
  checkType(a);
  checkType(b);
  at::TensorIterator checked;
  Operation::build(checked, out, a, b, rest...);
  const at::Tensor result = checked.output();
  checkType(result);
  if (result.numel() == 0) return result;
  launch(currentStream(result), [result = hostView(result), a = hostOperand(a), b = hostOperand(b),
                                 rest...]() mutable { Operation::run(result, a, b, rest...); });
  return result;
}

template <typename Operation, typename... Rest>
at::Tensor binary(const at::Tensor& a, const at::Tensor& b, Rest... rest) {
  return launchBinary<Operation>(at::Tensor(), a, b, rest...);
}

template <typename Operation, typename... Rest>
at::Tensor& binaryOut(const at::Tensor& a, const at::Tensor& b, Rest... rest, at::Tensor& out) {
  launchBinary<Operation>(out, a, b, rest...);
  return out;
}

template <typename Operation, typename... Rest>
at::Tensor& binaryInPlace(at::Tensor& self, const at::Tensor& other, Rest... rest) {
  launchBinary<Operation>(self, self, other, rest...);
  return self;
}

using at::Scalar;
using at::Tensor;
using at::TensorIterator;

struct Add {
  static void build(TensorIterator& iterator, const Tensor& out, const Tensor& a, const Tensor& b,
                    const Scalar& alpha) {
    iterator.build_binary_op(out, a, b);
    at::native::alpha_check(iterator.common_dtype(), alpha);
  }
  static void run(Tensor& out, const Tensor& a, const Tensor& b, const Scalar& alpha) {
    at::add_out(out, a, b, alpha);
  }
};

struct Subtract {
  static void build(TensorIterator& iterator, const Tensor& out, const Tensor& a, const Tensor& b,
                    const Scalar& alpha) {
    at::native::sub_check(a, b);
    Add::build(iterator, out, a, b, alpha);
  }
  static void run(Tensor& out, const Tensor& a, const Tensor& b, const Scalar& alpha) {
    at::sub_out(out, a, b, alpha);
  }
};

struct Multiply {
  static void build(TensorIterator& iterator, const Tensor& out, const Tensor& a, const Tensor& b) {
    iterator.build_binary_op(out, a, b);
  }
  static void run(Tensor& out, const Tensor& a, const Tensor& b) { at::mul_out(out, a, b); }
};

struct Divide {
  static void build(TensorIterator& iterator, const Tensor& out, const Tensor& a, const Tensor& b) {
    iterator.build_binary_float_op(out, a, b);
  }
  static void run(Tensor& out, const Tensor& a, const Tensor& b) { at::div_out(out, a, b); }
};

Tensor& fill(Tensor& self, const Scalar& value) {
  // Fails here if the type cannot hold the value.
  const Tensor one = at::empty({}, self.options().device(at::kCPU)).fill_(value);
  if (self.numel() > 0)
    launch(currentStream(self), [self = hostView(self), one] { self.copy_(one); });
  return self;
}

Tensor& zero(Tensor& self) { return fill(self, 0); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using Alpha = const Scalar&;
  m.impl("add.Tensor", &binary<Add, Alpha>);
  m.impl("add.out", &binaryOut<Add, Alpha>);
  m.impl("add_.Tensor", &binaryInPlace<Add, Alpha>);
  m.impl("sub.Tensor", &binary<Subtract, Alpha>);
  m.impl("sub.out", &binaryOut<Subtract, Alpha>);
  m.impl("sub_.Tensor", &binaryInPlace<Subtract, Alpha>);
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
