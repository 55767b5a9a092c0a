#include "engine/transports/registry.h"

#include "engine/transports/inproc/inproc_transport.h"
#include "engine/transports/shm/shm_transport.h"
#include "engine/transports/sim/sim_transport.h"
#include "engine/transports/tcp/tcp_transport.h"

namespace mooncake {

const std::vector<TransportEntry>& transportRegistry() {
  static const std::vector<TransportEntry> registry = {
      {"inproc", InprocTransport::create},
      {"shm", ShmTransport::create},
      {"tcp", TcpTransport::create},
      {"sim",
       [](const TransportContext& context) {
         return SimTransport::create(context, TcpTransport::create);
       },
       true},
  };
  return registry;
}

}  // namespace mooncake
