#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/transports/tcp/tcp_call.h"

namespace mooncake {

// Calls on behalf of a channel that is there: they reconnect it, or add a lane to it. What somebody
// else waits for on a thread of its own goes on here by the loop's events.
class TcpRedial : public std::enable_shared_from_this<TcpRedial> {
 public:
  using Use = std::function<Status(TcpCall&)>;  // of a call that came through
  using Done = std::function<void(Status)>;
  explicit TcpRedial(EventLoop& loop) : loop_(loop) {}

  // On the loop's thread, where `use` runs at most once and then `done` once, unless shutdown() was
  // faster.
  void begin(std::unique_ptr<TcpCall> call, Deadline deadline, Use use, Done done);
  // Nothing is called any more that does not run already.
  void shutdown();

 private:
  struct One {
    std::unique_ptr<TcpCall> call;
    Use use;
    Done done;
    EventLoop::TimerId timer = 0;
    int socket = -1;  // in the loop
  };
  void goOn(const std::shared_ptr<One>& one);
  void listen(const std::shared_ptr<One>& one);
  void unlisten(One& one);
  void end(const std::shared_ptr<One>& one, Status how);

  EventLoop& loop_;
  std::mutex mutex_;  // guards what follows, and the socket of each
  bool isShutDown_ = false;
  std::vector<std::shared_ptr<One>> calls_;
};

}  // namespace mooncake
