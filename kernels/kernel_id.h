#pragma once

#include <cstddef>
#include <cstdint>

// The kernels of this library, for the code that launches them. Knows neither CUDA nor torch.
namespace mooncake {

enum class KernelId : uint32_t {
  kProbe,
  kAcknowledge,
  kMove,
  kAllToAll,
  kReduceUint8,
  kReduceInt8,
  kReduceUint16,
  kReduceInt16,
  kReduceUint32,
  kReduceInt32,
  kReduceUint64,
  kReduceInt64,
  kReduceFloat16,
  kReduceBfloat16,
  kReduceFloat32,
  kReduceFloat64,
  kReduceBool,
  kReduceComplex64,
  kReduceComplex128,
  kSignal,
  kDispatchSend,
  kDispatchReceive,
  kCombineSend,
  kCombineReceive,
  kDispatchTokens,
  kCombineTokens,
  kCopyRows,
};

// Their names in the fatbin, in the order of KernelId.
inline constexpr const char* kKernelNames[] = {
    "mooncake_probe",
    "mooncake_acknowledge",
    "mooncake_move",
    "mooncake_all_to_all",
    "mooncake_reduce_uint8",
    "mooncake_reduce_int8",
    "mooncake_reduce_uint16",
    "mooncake_reduce_int16",
    "mooncake_reduce_uint32",
    "mooncake_reduce_int32",
    "mooncake_reduce_uint64",
    "mooncake_reduce_int64",
    "mooncake_reduce_float16",
    "mooncake_reduce_bfloat16",
    "mooncake_reduce_float32",
    "mooncake_reduce_float64",
    "mooncake_reduce_bool",
    "mooncake_reduce_complex64",
    "mooncake_reduce_complex128",
    "mooncake_signal",
    "mooncake_dispatch_send",
    "mooncake_dispatch_receive",
    "mooncake_combine_send",
    "mooncake_combine_receive",
    "mooncake_dispatch_tokens",
    "mooncake_combine_tokens",
    "mooncake_copy_rows",
};
inline constexpr size_t kKernelCount = sizeof(kKernelNames) / sizeof(kKernelNames[0]);

inline constexpr const char* kernelName(KernelId kernel) {
  return kKernelNames[static_cast<size_t>(kernel)];
}

}  // namespace mooncake
