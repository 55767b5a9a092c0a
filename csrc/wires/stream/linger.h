#pragma once

#include "base/event_loop.h"
#include "base/fd.h"

namespace mooncake {

// Closes a socket whose sending side is shut down. A socket that is closed with unread bytes resets
// the connection, and the goodbye may be lost with it. So the socket stays open until the peer has
// closed its end, at most for 1 s.
void linger(EventLoop& loop, Fd closing);

}  // namespace mooncake
