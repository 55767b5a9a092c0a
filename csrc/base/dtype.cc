#include "base/dtype.h"

namespace mooncake {
namespace {

struct Traits {
  const char* name = "unknown";
  size_t size = 0;
  bool reducible = false;
};

Traits traitsOf(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
      return {"uint8", 1, true};
    case DType::kInt8:
      return {"int8", 1, true};
    case DType::kUInt16:
      return {"uint16", 2, true};
    case DType::kInt16:
      return {"int16", 2, true};
    case DType::kUInt32:
      return {"uint32", 4, true};
    case DType::kInt32:
      return {"int32", 4, true};
    case DType::kUInt64:
      return {"uint64", 8, true};
    case DType::kInt64:
      return {"int64", 8, true};
    case DType::kFloat16:
      return {"float16", 2, true};
    case DType::kBFloat16:
      return {"bfloat16", 2, true};
    case DType::kFloat32:
      return {"float32", 4, true};
    case DType::kFloat64:
      return {"float64", 8, true};
    case DType::kBool:
      return {"bool", 1, true};
    case DType::kComplex64:
      return {"complex64", 8, true};
    case DType::kComplex128:
      return {"complex128", 16, true};
    case DType::kFloat8E4M3FN:
      return {"float8_e4m3fn", 1, false};
    case DType::kFloat8E5M2:
      return {"float8_e5m2", 1, false};
    case DType::kFloat8E4M3FNUZ:
      return {"float8_e4m3fnuz", 1, false};
    case DType::kFloat8E5M2FNUZ:
      return {"float8_e5m2fnuz", 1, false};
    case DType::kFloat8E8M0FNU:
      return {"float8_e8m0fnu", 1, false};
  }
  return {};  // a number that came off a wire
}

}  // namespace

size_t dtypeSize(DType dtype) { return traitsOf(dtype).size; }

const char* dtypeName(DType dtype) { return traitsOf(dtype).name; }

bool isReducible(DType dtype) { return traitsOf(dtype).reducible; }

const char* reduceName(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::kSum:
      return "SUM";
    case ReduceKind::kAvg:
      return "AVG";
    case ReduceKind::kProduct:
      return "PRODUCT";
    case ReduceKind::kMin:
      return "MIN";
    case ReduceKind::kMax:
      return "MAX";
    case ReduceKind::kBitAnd:
      return "BAND";
    case ReduceKind::kBitOr:
      return "BOR";
    case ReduceKind::kBitXor:
      return "BXOR";
    case ReduceKind::kPremulSum:
      return "PREMUL_SUM";
  }
  return "unknown";
}

}  // namespace mooncake
