#pragma once

#include "base/event_loop.h"
#include "base/fd.h"

namespace mooncake {

// Closes a socket whose sending side is shut down. One that is closed before all was read that
// comes resets the connection, and the goodbye may be lost with it. So it stays until the peer has
// closed its own, at most for a second.
void linger(EventLoop& loop, Fd closing);

}  // namespace mooncake
