#include "backend/tensors.h"

namespace mooncake {

Result<DType> dtypeOf(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kByte:
      return DType::kUInt8;
    case at::kChar:
      return DType::kInt8;
    case at::kUInt16:
      return DType::kUInt16;
    case at::kShort:
      return DType::kInt16;
    case at::kUInt32:
      return DType::kUInt32;
    case at::kInt:
      return DType::kInt32;
    case at::kUInt64:
      return DType::kUInt64;
    case at::kLong:
      return DType::kInt64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kBool:
      return DType::kBool;
    case at::kComplexFloat:
      return DType::kComplex64;
    case at::kComplexDouble:
      return DType::kComplex128;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8E4M3FN;
    case at::kFloat8_e5m2:
      return DType::kFloat8E5M2;
    case at::kFloat8_e4m3fnuz:
      return DType::kFloat8E4M3FNUZ;
    case at::kFloat8_e5m2fnuz:
      return DType::kFloat8E5M2FNUZ;
    case at::kFloat8_e8m0fnu:
      return DType::kFloat8E8M0FNU;
    default:
      return Error{
          ErrorCode::kInvalidArgument,
          std::string("tensors of type ") + at::toString(tensor.scalar_type()) + " cannot be sent"};
  }
}

Status checkTensor(const at::Tensor& tensor, const char* what) {
  if (!tensor.defined())
    return Error{ErrorCode::kInvalidArgument, std::string(what) + " is undefined"};
  if (tensor.is_cuda()) {
    return Error{ErrorCode::kUnsupported,
                 std::string(what) +
                     " is a CUDA tensor: this version of the mooncake backend "
                     "moves CPU tensors only. Use tensor.cpu(), or another backend for CUDA, "
                     "e.g. init_process_group(\"cpu:mooncake,cuda:nccl\")"};
  }
  if (!tensor.is_cpu()) {
    return Error{ErrorCode::kInvalidArgument,
                 std::string(what) + " is on " + tensor.device().str() + ", must be a CPU tensor"};
  }
  if (tensor.layout() != at::kStrided) {
    return Error{ErrorCode::kInvalidArgument, std::string(what) + " is sparse, must be dense"};
  }
  return {};
}

std::span<std::byte> bytesOf(const at::Tensor& contiguous) {
  return {static_cast<std::byte*>(contiguous.data_ptr()), contiguous.nbytes()};
}

std::vector<std::span<std::byte>> cut(std::span<std::byte> bytes,
                                      const std::vector<int64_t>& elements, size_t elementSize) {
  std::vector<std::span<std::byte>> pieces;
  for (const int64_t count : elements) {
    pieces.push_back(bytes.first(size_t(count) * elementSize));
    bytes = bytes.subspan(pieces.back().size());
  }
  return pieces;
}

std::vector<Flat> flatten(const std::vector<at::Tensor>& tensors) {
  return std::vector<Flat>(tensors.begin(), tensors.end());
}

std::vector<std::span<std::byte>> spansOf(const std::vector<Flat>& flats) {
  std::vector<std::span<std::byte>> spans;
  for (const Flat& flat : flats) spans.push_back(flat.bytes());
  return spans;
}

void give(const Status& status, const std::vector<Flat>& flats) {
  if (!status.ok()) return;
  for (const Flat& flat : flats) flat.give();
}

}  // namespace mooncake
