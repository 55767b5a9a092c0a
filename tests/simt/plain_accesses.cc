#include "tests/simt/calls.h"

// clang calls these at each plain access of kernels that it compiles with
// -fsanitize-coverage=trace-pc,trace-loads,trace-stores.

using mooncake::simt::Access;
using mooncake::simt::beforePlain;

extern "C" {
void __sanitizer_cov_trace_pc() {}
#define MOONCAKE_SIMT_ACCESS(bytes)                                                               \
  void __sanitizer_cov_load##bytes(void* address) { beforePlain(address, bytes, Access::kLoad); } \
  void __sanitizer_cov_store##bytes(void* address) { beforePlain(address, bytes, Access::kStore); }
MOONCAKE_SIMT_ACCESS(1)
MOONCAKE_SIMT_ACCESS(2)
MOONCAKE_SIMT_ACCESS(4)
MOONCAKE_SIMT_ACCESS(8)
MOONCAKE_SIMT_ACCESS(16)
#undef MOONCAKE_SIMT_ACCESS
}
