#include "backend/backend_env.h"

#include <string>
#include <string_view>

namespace mooncake {
namespace {

bool parseOnFailure(std::string_view value, BackendEnv& env, std::string& allowed) {
  allowed = "continue or raise";
  env.raises = value == "raise";
  return value == "continue" || value == "raise";
}

constexpr EnvEntry<BackendEnv> kTable[] = {
    {{"MOONCAKE_ON_FAILURE", "continue",
      "What a loss does to the operation that it interrupts: continue or raise"},
     parseOnFailure},
    {{"MOONCAKE_STREAM_WORDS", "1",
      "0: wait() for tensors of a device waits on the host for the operation, and only then makes "
      "the stream wait for the copies"},
     flagInto<&BackendEnv::streamWords>},
    {{"MOONCAKE_EP_STREAM_WORDS", "1",
      "0: waits of an EP Buffer for tensors of a device wait on the host for the operation, as "
      "with "
      "MOONCAKE_STREAM_WORDS=0"},
     flagInto<&BackendEnv::epStreamWords>},
    {{"MOONCAKE_EP_KERNELS", "0",
      "1: the calls of EP Buffers go by kernels for tensors of devices. The same on all ranks"},
     flagInto<&BackendEnv::epKernels>},
    {{"MOONCAKE_PINNED_CACHE", "536870912",
      "Bytes of pinned memory per device that wait for the next operation on the device's tensors"},
     numberInto<&BackendEnv::pinnedCache, 0, uint64_t(1) << 40>},
    {{"MOONCAKE_PEER_BYTES", "0",
      "Collectives on tensors of devices go by kernels, which exchange so many bytes of a rank at "
      "once; 0: no kernels. The same on all ranks"},
     numberInto<&BackendEnv::peerBytes, 0, uint64_t(1) << 30>},
    {{"MOONCAKE_PEER_TABLE", "",
      "A file of benchmarks/bench_peer_table.py: forms of collectives by kernels, by their sizes. "
      "The same lines on all ranks"},
     textInto<&BackendEnv::peerTable>},
    {{"MOONCAKE_GRAPH_MEMORY", "1073741824",
      "Bytes of pinned memory that a group keeps for its operations in graphs"},
     numberInto<&BackendEnv::graphMemory, 0, uint64_t(1) << 40>},
    {{"MOONCAKE_BLOCKING_WAIT", "0",
      "1: wait() for tensors of a device waits on the host until the outputs are there, a future "
      "until the operation has ended"},
     flagInto<&BackendEnv::blockingWait>},
};

}  // namespace

Result<BackendEnv> BackendEnv::read() { return readEnv(kTable); }

}  // namespace mooncake
