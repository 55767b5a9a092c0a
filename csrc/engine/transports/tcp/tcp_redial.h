#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/transports/tcp/tcp_call.h"
#include "engine/transports/tcp/tcp_channel.h"

namespace mooncake {

// Calls that renew a channel: what somebody else waits for on a thread of its own goes on here by
// the loop's events.
class TcpRedial : public std::enable_shared_from_this<TcpRedial> {
 public:
  using Done = std::function<void(Status)>;
  explicit TcpRedial(EventLoop& loop) : loop_(loop) {}

  // On the loop's thread, where `done` runs once, unless shutdown() was faster.
  void begin(std::unique_ptr<TcpCall> call, std::shared_ptr<TcpChannel> channel, Deadline deadline,
             Done done);
  // Nothing is called any more that does not run already.
  void shutdown();

 private:
  struct One {
    std::unique_ptr<TcpCall> call;
    std::shared_ptr<TcpChannel> channel;
    Done done;
    EventLoop::TimerId timer = 0;
    std::vector<int> sockets;  // in the loop
  };
  void goOn(const std::shared_ptr<One>& one);
  void listen(const std::shared_ptr<One>& one);
  void unlisten(One& one);
  void end(const std::shared_ptr<One>& one, Status how);

  EventLoop& loop_;
  std::mutex mutex_;  // guards what follows, and the sockets of each
  bool isShutDown_ = false;
  std::vector<std::shared_ptr<One>> calls_;
};

}  // namespace mooncake
