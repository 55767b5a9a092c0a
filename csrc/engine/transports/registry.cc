#include "engine/transports/registry.h"

#include "engine/transports/fabric/libfabric_transport.h"
#include "engine/transports/inproc/inproc_transport.h"
#include "engine/transports/shm/shm_transport.h"
#include "engine/transports/tcp/tcp_transport.h"
#ifdef MOONCAKE_WITH_SIM
#include "engine/transports/sim/sim_transport.h"
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
