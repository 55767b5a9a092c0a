#include "base/stop_signal.h"

#include <cerrno>
#include <poll.h>
#include <sys/eventfd.h>

namespace mooncake {

Result<std::unique_ptr<StopSignal>> StopSignal::make() {
  Fd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event) return systemError("eventfd", errno);
  return std::unique_ptr<StopSignal>(new StopSignal(std::move(event)));
}

void StopSignal::stop() { ::eventfd_write(event_.get(), 1); }

bool StopSignal::isStopped() const {
  pollfd one{.fd = event_.get(), .events = POLLIN, .revents = 0};
  return ::poll(&one, 1, 0) > 0;
}

}  // namespace mooncake
