#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>

#include "engine/contract/transport.h"

namespace mooncake::transfer {

// Numbers of messages that peers have sent, so that a message that arrives twice counts once.
// Remembers the last kMostNumbers of each sender, and the kMostSenders that were heard last. Not
// thread-safe.
class SeenNumbers {
 public:
  static constexpr size_t kMostSenders = 4096;
  static constexpr size_t kMostNumbers = 1024;

  // Records the number. Returns whether it is the first time.
  bool isNew(const EngineId& from, uint64_t number);
  size_t senders() const { return byId_.size(); }

 private:
  struct Sender {
    EngineId id;
    std::deque<uint64_t> numbers;
  };
  std::list<Sender> senders_;  // the sender heard last is in front
  std::map<EngineId, std::list<Sender>::iterator> byId_;
};

}  // namespace mooncake::transfer
