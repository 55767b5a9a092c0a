#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/mutex.h"
#include "engine/contract/engine_id.h"

namespace mooncake {

// Messages whose senders have ended, such as a leave report of a destroyed group. A connection that
// breaks may have lost them. Their senders hear of no reconnection, so the engine sends them again.
//
// The messages that a break has lost were sent shortly before it: a peer that hears nothing for a
// failure timeout counts as silent, and a connection that is not made again in another one is given
// up. So the messages are kept for a few failure timeouts. Thread-safe.
class LastWords {
 public:
  // Bound of all messages together. The oldest are dropped first.
  static constexpr size_t kMostBytes = size_t(4) << 20;
  struct Word {
    uint64_t topic = 0;
    Bytes message;
  };

  // `kept`: how long messages are kept after they were sent.
  explicit LastWords(Clock::duration kept) : kept_(kept) {}

  // Keeps messages that are sent to each of these peers at `now`.
  void keep(std::vector<EngineId> to, uint64_t topic, std::vector<Bytes> messages,
            Clock::time_point now);
  // Returns the messages for a peer whose connection was made again, in the order of keep(). The
  // caller sends them now, so they are kept anew.
  std::vector<Word> repeat(const EngineId& peer, Clock::time_point now);

 private:
  struct Kept {
    std::vector<EngineId> to;
    uint64_t topic;
    std::vector<Bytes> messages;
    Clock::time_point until;

    size_t bytes() const;
  };
  void dropOldest() REQUIRES(mutex_);
  void dropExpired(Clock::time_point now) REQUIRES(mutex_);

  const Clock::duration kept_;
  Mutex mutex_;
  std::deque<Kept> all_ GUARDED_BY(mutex_);  // in the order of keep()
  size_t bytes_ GUARDED_BY(mutex_) = 0;      // of all_
};

}  // namespace mooncake
