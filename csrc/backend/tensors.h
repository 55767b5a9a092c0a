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

// Refuses what no operation can take: not on the CPU, not strided (sparse, nested), quantized,
// without memory, not defined. `what` names the argument.
Status checkTensor(const at::Tensor& tensor, const char* what);

// The bytes of a contiguous tensor.
std::span<std::byte> bytesOf(const at::Tensor& contiguous);

// While it lives, results are written to the tensor as data, on whatever thread: nothing is
// recorded for gradients, and an inference tensor may be written, which is an error outside of that
// mode.
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
  // `flat`: of the same type and as many elements, contiguous. It has the contents.
  Flat(at::Tensor tensor, at::Tensor flat) : tensor_(std::move(tensor)), flat_(std::move(flat)) {}
  // The product of the tensor and a factor.
  static Flat scaled(at::Tensor tensor, const at::Scalar& factor);

  // Where the bytes lie or will lie; their number.
  std::span<std::byte> place() const { return bytesOf(flat_); }
  // The bytes. Fills a copy the first time.
  std::span<std::byte> bytes() const;
  const at::Tensor& tensor() const { return tensor_; }
  bool isCopy() const { return !flat_.is_same(tensor_); }
  // From here on a copy, so that nothing else that overlaps it matters. Before bytes().
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
// From the first to the last element; strides are never negative.
ConstSpan extentOf(const at::Tensor& tensor);
// Its parts for or from each rank, of the same length.
std::vector<Span> partsOf(Span bytes, int size);
// Cuts a run of bytes into consecutive pieces.
std::vector<Span> cut(Span bytes, const std::vector<int64_t>& elements, size_t elementSize);
// Of all, where it is ok.
void copyBack(const Status& status, const std::vector<Flat>& flats);

// A gathering rank's inputs; outputs[r * inputs.size() + i] is for rank r's i-th one, and none
// overlaps another. Copies where other data is written over them: each may lie where its own goes.
std::vector<Flat> inputsBeside(const std::vector<at::Tensor>& inputs,
                               const std::vector<Span>& outputs, int rank);
// An output that shares memory with inputs is written when the operation is over: a rank that is
// lost may make it run again, and others may read the inputs until then.
Flat outputBeside(const at::Tensor& output, std::span<const Flat> inputs);

// Those whose tensors may share memory become copies: each is read as it was, and where they do
// share it the last that is given back stays.
void keepApart(std::vector<Flat>& flats);

// Several of them in one operation, as few buffers: what is too short to be fetched by itself
// travels together with others of its type, in a copy.
class FlatList {
 public:
  // Each tensor is `rows` rows of the same length. What is short is told by its rows: lists whose
  // tensors have rows of the same lengths are put together alike. `isShort`: all of it fits a slot,
  // where nothing is fetched.
  FlatList(std::vector<Flat> flats, int rows, bool isShort);

  // With the contents of the tensors: see Flat.
  Buffers buffers() const;
  // Of all buffers, row by row: outputs of all_gather.
  std::vector<Span> rows() const;
  void copyBack() const;

 private:
  // Buffers that are copies: of these tensors, row by row.
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
