#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "wires/tcp/tcp_call.h"

namespace mooncake {

// Makes calls for an existing channel: they reconnect it, or add a lane to it. Such a call advances
// by the loop's events, while a Connecting has a thread that waits.
class TcpRedial : public std::enable_shared_from_this<TcpRedial> {
 public:
  using Use = std::function<Status(TcpCall&)>;  // uses a call that succeeded
  using Done = std::function<void(Status)>;
  explicit TcpRedial(EventLoop& loop) : loop_(loop) {}

  // Call it on the loop's thread. `use` runs there at most once, and then `done` once, unless
  // shutdown() comes first.
  void begin(std::unique_ptr<TcpCall> call, Deadline deadline, Use use, Done done);
  // Afterwards no callback starts any more.
  void shutdown();

 private:
  struct One {
    std::unique_ptr<TcpCall> call;
    Use use;
    Done done;
    EventLoop::TimerId timer = 0;
    int socket = -1;  // in the loop
  };
  void goOn(const std::shared_ptr<One>& one) EXCLUDES(mutex_);
  void listen(const std::shared_ptr<One>& one) EXCLUDES(mutex_);
  void unlisten(One& one) REQUIRES(mutex_);
  void end(const std::shared_ptr<One>& one, Status how) EXCLUDES(mutex_);

  EventLoop& loop_;
  Mutex mutex_;  // also guards the socket of each call
  bool isShutDown_ GUARDED_BY(mutex_) = false;
  std::vector<std::shared_ptr<One>> calls_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
