#pragma once

#include <cstdint>
#include <string>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/result.h"
#include "base/stop_signal.h"
#include "engine/env.h"
#include "transfer/session_id.h"
#include "transfer/transfer_env.h"

namespace mooncake::transfer {

struct SessionListener {
  Fd socket;            // non-blocking
  std::string address;  // numeric; the engine itself listens on it, too
  uint16_t port = 0;
};

// Listens on one address of this host: MOONCAKE_HOST_IP, else MC_TCP_BIND_ADDRESS, else the address
// of `host` if it is ours, else the first address that other hosts can reach. With `isAddress`, a
// numeric `host` that is not ours is refused. `port` 0 means a random free port from
// settings.leastRpcPort to mostRpcPort.
Result<SessionListener> listenForSessions(const EngineEnv& env, const TransferEnv& settings,
                                          const std::string& host, bool isAddress, uint16_t port);

// Returns a connected socket. kSystem: the name does not resolve; kPeerLost: every address
// refuses; kTimeout: an address gives no answer, or is unreachable; kAborted: `stop` came first.
Result<Fd> connectTo(const SessionId& where, Deadline deadline, const StopSignal* stop = nullptr);

// Waits for one of poll()'s events. kTimeout: the deadline passed; kAborted: `stop` came first.
Status await(int socket, short events, Deadline deadline, const StopSignal* stop);

}  // namespace mooncake::transfer
