#pragma once

#include <cstddef>
#include <cstdint>

namespace mooncake {

// Element types as they travel in an operation's header. Numbers are wire format: append only.
enum class DType : uint8_t {
  kUInt8 = 0,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kBool,
  kComplex64,
  kComplex128,
  kFloat8E4M3FN,
  kFloat8E5M2,
  kFloat8E4M3FNUZ,
  kFloat8E5M2FNUZ,
  kFloat8E8M0FNU,
};

enum class ReduceKind : uint8_t {
  kSum = 0,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kBitAnd,
  kBitOr,
  kBitXor,
  kPremulSum,
};

size_t dtypeSize(DType dtype);            // 0 for a number that is no DType
const char* dtypeName(DType dtype);       // torch's spelling without "torch.": "float32"
const char* reduceName(ReduceKind kind);  // c10d's spelling: "SUM"
bool isReducible(DType dtype);            // all but fp8

}  // namespace mooncake
