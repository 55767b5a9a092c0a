#pragma once

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/engine.h"
#include "transfer/seen_numbers.h"

namespace mooncake::transfer {

struct Notification {
  std::string name;
  std::string message;
};

// Messages between engines that are not part of any registered memory. Each is acknowledged. If a
// connection breaks, the message is sent again, and the peer still receives it once. Any thread.
//
// Wire form, a control message of topic kNotificationTopic:
//   u8 1, u64 number, string name, string message    a notification
//   u8 2, u64 number                                 it has arrived
class Notifications {
 public:
  static constexpr size_t kMostBytes = size_t(60) << 10;      // name and message together
  static constexpr size_t kMostKeptBytes = size_t(64) << 20;  // above this the oldest are dropped

  explicit Notifications(Engine& engine);
  ~Notifications();

  // Returns once the peer has acknowledged it. kInvalidArgument: longer than kMostBytes.
  Status send(const std::shared_ptr<Peer>& peer, const Notification& notification,
              Deadline deadline);
  void keep(Notification notification);  // stores one from a peer, or from this engine
  std::vector<Notification> take();
  // Makes every send() return kAborted.
  void stop();

 private:
  void onMessage(const EngineId& from, ByteView message) EXCLUDES(mutex_);

  Engine& engine_;
  Doorbell acknowledged_;
  Interrupt stopped_;
  Mutex mutex_;
  uint64_t last_ GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, bool> underWay_ GUARDED_BY(mutex_);  // number -> has been acknowledged
  SeenNumbers seen_ GUARDED_BY(mutex_);
  std::deque<Notification> kept_ GUARDED_BY(mutex_);
  size_t keptBytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace mooncake::transfer
