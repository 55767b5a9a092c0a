#include "engine/contract/registry.h"

#include "wires/fabric/libfabric_transport.h"
#include "wires/inproc/inproc_transport.h"
#include "wires/shm/shm_transport.h"
#include "wires/tcp/tcp_transport.h"
#ifdef MOONCAKE_WITH_SIM
#include "wires/sim/sim_transport.h"
#endif

namespace mooncake {

const std::vector<TransportEntry>& transportRegistry() {
  static const std::vector<TransportEntry> registry = {
      {"inproc", InprocTransport::create},
      {"shm", ShmTransport::create},
      {"tcp", TcpTransport::create},
      {"fabric",
       [](const TransportContext& context) {
         return createLibfabricTransport(context, TcpTransport::create);
       },
       true},
#ifdef MOONCAKE_WITH_SIM
      {"sim",
       [](const TransportContext& context) {
         return createSimTransport(context, TcpTransport::create, defaultSimOptions());
       },
       true},
#endif
  };
  return registry;
}

}  // namespace mooncake
