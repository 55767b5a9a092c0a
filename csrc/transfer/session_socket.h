#pragma once

#include <cstdint>
#include <string>

#include "base/deadline.h"
#include "base/env.h"
#include "base/fd.h"
#include "base/result.h"
#include "base/stop_signal.h"
#include "base/transfer_env.h"
#include "transfer/session_id.h"

namespace mooncake::transfer {

struct SessionListener {
  Fd socket;            // non-blocking
  std::string address;  // in digits: the engine listens there, too
  uint16_t port = 0;
};

// On one address of this host: MOONCAKE_HOST_IP, MC_TCP_BIND_ADDRESS, what `host` stands for if
// that is ours, or the first that leads off the host. With `isAddress`, digits that are not ours
// are refused. At `port`, or at a random free one from
// settings.leastRpcPort to mostRpcPort where that is 0.
Result<SessionListener> listenForSessions(const Env& env, const TransferEnv& settings,
                                          const std::string& host, bool isAddress, uint16_t port);

// A connected socket. kSystem: the name does not resolve; kPeerLost: nobody is there; kTimeout;
// kAborted: `stop` came first.
Result<Fd> connectTo(const SessionId& where, Deadline deadline, const StopSignal* stop = nullptr);

// Waits for one of poll()'s events, at most until the deadline: kTimeout. kAborted: `stop` came
// first.
Status await(int socket, short events, Deadline deadline, const StopSignal* stop);

}  // namespace mooncake::transfer
