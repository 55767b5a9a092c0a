#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>

#include "engine/transports/transport.h"

namespace mooncake::transfer {

// The numbers of messages that peers have sent, so that a message that comes twice counts once.
// Remembers the last kMostNumbers of each of the kMostSenders that were heard last: a sender that
// is gone is forgotten when others have come. Not thread-safe.
class SeenNumbers {
 public:
  static constexpr size_t kMostSenders = 4096;
  static constexpr size_t kMostNumbers = 1024;

  // Whether the number has not come before.
  bool isNew(const EngineId& from, uint64_t number);
  size_t senders() const { return byId_.size(); }

 private:
  struct Sender {
    EngineId id;
    std::deque<uint64_t> numbers;
  };
  std::list<Sender> senders_;  // the one that was heard last stands in front
  std::map<EngineId, std::list<Sender>::iterator> byId_;
};

}  // namespace mooncake::transfer
