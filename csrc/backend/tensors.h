#pragma once

#include <optional>
#include <span>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include "base/dtype.h"
#include "base/result.h"
#include "collectives/collectives.h"

namespace mooncake {

// kInvalidArgument for a type that the wire does not know.
Result<DType> dtypeOf(const at::Tensor& tensor);

// Refuses tensors that no operation can take, on any device: not defined, not strided (sparse,
// nested), quantized, without memory. `what` names the argument.
Status checkDense(const at::Tensor& tensor, const char* what);
// The same, and refuses tensors that are not the CPU's.
Status checkTensor(const at::Tensor& tensor, const char* what);

// The bytes of a contiguous tensor.
std::span<std::byte> bytesOf(const at::Tensor& contiguous);

// While this lives, its thread writes results to the tensor as plain data. Autograd records
// nothing. An inference tensor may be written, which is an error outside of inference mode.
class PlainWrites {
 public:
  explicit PlainWrites(const at::Tensor& tensor);

 private:
  const at::NoGradGuard noGrad_;
  std::optional<c10::InferenceMode> inference_;
};

// A tensor that an operation works on as one run of bytes: the tensor itself when it is contiguous
// and holds its elements as they are (no view that conjugates or negates when it is read), else a
// copy, which copyBack() writes back.
//
// An asynchronous operation waits for earlier ones, which may still write the tensor. Therefore the
// copy is made by bytes(), when the operation runs, and not when it is called.
class Flat {
 public:
  explicit Flat(at::Tensor tensor);
  // `flat`: contiguous, of the same type and number of elements. It has the contents already.
  Flat(at::Tensor tensor, at::Tensor flat) : tensor_(std::move(tensor)), flat_(std::move(flat)) {}
  // The product of the tensor and a factor.
  static Flat scaled(at::Tensor tensor, const at::Scalar& factor);

  // The memory of the bytes. A copy may not be filled yet.
  std::span<std::byte> place() const { return bytesOf(flat_); }
  // The bytes. Fills a copy the first time.
  std::span<std::byte> bytes() const;
  const at::Tensor& tensor() const { return tensor_; }
  bool isCopy() const { return !flat_.is_same(tensor_); }
  // Makes this a copy, so that writes to memory that overlaps the tensor do not matter. Called
  // before bytes().
  void standApart();
  void copyBack() const;

 private:
  at::Tensor tensor_;
  at::Tensor flat_;
  at::Tensor source_;  // of a copy: keeps the shape that the tensor had at the call
  mutable bool isFilled_ = true;
  std::optional<at::Scalar> factor_;
};

std::vector<Flat> flatten(const std::vector<at::Tensor>& tensors);
std::vector<Span> spansOf(const std::vector<Flat>& flats);
std::vector<Span> placesOf(const std::vector<Flat>& flats);
// The bytes from the first to the last element; strides are never negative.
ConstSpan extentOf(const at::Tensor& tensor);
// Cuts a run of bytes into one part for each rank, all of the same length.
std::vector<Span> partsOf(Span bytes, int size);
// Cuts a run of bytes into consecutive pieces.
std::vector<Span> cut(Span bytes, const std::vector<int64_t>& elements, size_t elementSize);
// Copies all of them back, if the status is ok.
void copyBack(const Status& status, const std::vector<Flat>& flats);

// The inputs of a gathering operation. outputs[r * inputs.size() + i] receives the i-th input of
// rank r, and no two outputs overlap. An input becomes a copy if it overlaps an output that
// receives other data; it may lie in its own output.
std::vector<Flat> inputsBeside(const std::vector<at::Tensor>& inputs,
                               const std::vector<Span>& outputs, int rank);
// The output of an operation, a copy if it shares memory with inputs. So the shared memory is
// written when the operation is over: the loss of a rank may make it run again, and other ranks may
// read the inputs until then.
Flat outputBeside(const at::Tensor& output, std::span<const Flat> inputs);

// Makes copies of tensors that may share memory with each other. Each is read as it was. Where two
// share memory, the one that is copied back last stays.
void keepApart(std::vector<Flat>& flats);

// Several tensors of one operation, as few buffers. Tensors that are too short to be fetched one by
// one are packed with other tensors of their type into one copy.
class FlatList {
 public:
  // Each tensor has `rows` rows of the same length. The length of a row decides whether a tensor is
  // short, so lists with the same lengths of rows are packed alike. `isShort`: all tensors together
  // fit a slot, and none is fetched.
  FlatList(std::vector<Flat> flats, int rows, bool isShort);

  // Returns the buffers, with the contents of the tensors: see Flat.
  Buffers buffers() const;
  // Returns the parts of all buffers, row by row: the outputs of all_gather.
  std::vector<Span> rows() const;
  void copyBack() const;

 private:
  // A buffer that is a copy of several tensors, row by row.
  struct Bundle {
    at::Tensor bytes;
    std::vector<size_t> members;
  };
  template <typename Copy>
  void forEachPiece(const Bundle& bundle, Copy&& copy) const;

  void fill() const;

  std::vector<Flat> flats_;
  int rows_;
  mutable bool isFilled_ = false;
  std::vector<Buffer> buffers_;
  std::vector<Bundle> bundles_;
};

}  // namespace mooncake
