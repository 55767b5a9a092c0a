#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <utility>

#include "engine/contract/transfer.h"
#include "wires/packets/packet_source.h"

namespace mooncake {

// The puts of a stream that have not left, in order. Numbers them, and names in each the one before
// it with the same word, so that the peer lets them land in that order. Not thread-safe.
class PutQueue {
 public:
  // Returns whether a put of this size may be added: copies of at most 256 MiB wait.
  bool hasRoomFor(size_t bytes) const;
  // Adds a put and returns its number. `request.data` must stay until copyUnsent().
  uint64_t add(const PutRequest& request, uint64_t firstRail);
  // Copies the part of this put that has not left, so that its caller may reuse the data.
  void copyUnsent(uint64_t number);

  bool empty() const { return puts_.empty(); }
  size_t size() const { return puts_.size(); }
  PacketSource& front() { return puts_.front(); }
  void pop();
  // Drops the puts that wait.
  void clear();
  // The same, and numbers begin anew: for another connection.
  void restart();

  // Returns whether the last puts of too many words are remembered: the landed ones should be
  // forgotten.
  bool remembersMany() const;
  // Forgets words of which the last put has landed: all with numbers below this one have, unless
  // they wait here.
  void forgetBelow(uint64_t number);
  uint64_t last() const { return last_; }

 private:
  std::deque<PacketSource> puts_;
  size_t copiedBytes_ = 0;
  uint64_t last_ = 0;                                             // number
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> lastOfWord_;  // by region and offset
};

}  // namespace mooncake
