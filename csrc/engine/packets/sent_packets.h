#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "engine/packets/out_packet.h"
#include "engine/packets/packet.h"
#include "engine/packets/paths.h"

namespace mooncake {

// What has left for one peer and is not acknowledged yet, by serial. What is on a path that is left
// out waits for another one, and leaves again. Decides only: time comes in from outside.
class SentPackets {
 public:
  struct Sent {
    std::shared_ptr<OutPacket> packet;
    size_t path = 0;
    Packet::Kind kind = Packet::Kind::kPut;
    Packet::Status status = Packet::Status::kOk;
    uint64_t number = 0;
    bool waits = false;  // for a path
  };

  // `paths` are told what is under way on each.
  explicit SentPackets(Paths& paths) : paths_(paths) {}

  size_t size() const { return sent_.size(); }
  bool empty() const { return sent_.empty(); }
  auto begin() const { return sent_.begin(); }
  auto end() const { return sent_.end(); }
  size_t waiting() const { return waiting_; }

  void add(uint64_t serial, Sent sent, Clock::time_point now);
  void acknowledge(uint64_t below, const std::vector<uint64_t>& above, Clock::time_point now);
  void holdBack(size_t path, Clock::time_point now);
  // The first that waits, from this serial on.
  std::optional<uint64_t> firstWaiting(uint64_t from) const;
  const Sent& at(uint64_t serial) const { return sent_.at(serial); }
  const Sent& moveTo(size_t path, uint64_t serial, Clock::time_point now);
  // When the peer has acknowledged something last; if everything was acknowledged then, when the
  // first packet left after that.
  Clock::time_point progress() const { return progress_; }

  // Nobody acknowledges it any more.
  void drop(Clock::time_point now);
  // The same where the paths begin anew.
  void clear();

 private:
  void erase(std::map<uint64_t, Sent>::iterator sent, Clock::time_point now);

  Paths& paths_;
  std::map<uint64_t, Sent> sent_;
  size_t waiting_ = 0;
  Clock::time_point progress_;
};

}  // namespace mooncake
