#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "transfer/seen_numbers.h"

namespace mooncake::transfer {

struct Notification {
  std::string name;
  std::string message;
};

// Words that engines send each other, outside of any memory. Each is acknowledged, and sent again
// when a connection broke meanwhile; it arrives once. Any thread.
//
// Wire form, a control message of topic kNotificationTopic:
//   u8 1, u64 number, string name, string message    a notification
//   u8 2, u64 number                                 it has arrived
class Notifications {
 public:
  static constexpr size_t kMostBytes = size_t(60) << 10;      // of name and message together
  static constexpr size_t kMostKeptBytes = size_t(64) << 20;  // the oldest go first

  explicit Notifications(Engine& engine);
  ~Notifications();

  // Returns when the peer has it. kInvalidArgument: too long.
  Status send(const std::shared_ptr<Peer>& peer, const Notification& notification,
              Deadline deadline);
  void keep(Notification notification);  // of ourselves, or of a peer
  std::vector<Notification> take();
  // Whoever waits in send() returns.
  void stop();

 private:
  void onMessage(const EngineId& from, ByteView message);

  Engine& engine_;
  Doorbell acknowledged_;
  Interrupt stopped_;
  std::mutex mutex_;  // guards all below
  uint64_t last_ = 0;
  std::map<uint64_t, bool> underWay_;  // has arrived
  SeenNumbers seen_;
  std::deque<Notification> kept_;
  size_t keptBytes_ = 0;
};

}  // namespace mooncake::transfer
