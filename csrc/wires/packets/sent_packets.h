#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "wires/packets/out_packet.h"
#include "wires/packets/packet.h"
#include "wires/packets/paths.h"

namespace mooncake {

// The packets for one peer that have left and are not acknowledged yet, by serial. If their path is
// left out, they wait for another one and leave again. A lost packet does so by itself. Decides
// only: the time comes in from outside.
class SentPackets {
 public:
  struct Sent {
    std::shared_ptr<OutPacket> packet;
    size_t path = 0;
    Packet::Kind kind = Packet::Kind::kPut;
    Packet::Status status = Packet::Status::kOk;
    uint64_t number = 0;
    bool waits = false;        // for another path
    Clock::time_point leftAt;  // on this path
  };

  // `paths` counts the packets in flight on each path.
  explicit SentPackets(Paths& paths) : paths_(paths) {}

  size_t size() const { return sent_.size(); }
  bool empty() const { return sent_.empty(); }
  auto begin() const { return sent_.begin(); }
  auto end() const { return sent_.end(); }
  size_t waiting() const { return waiting_; }

  void add(uint64_t serial, Sent sent, Clock::time_point now);
  void acknowledge(uint64_t below, const std::vector<uint64_t>& above, Clock::time_point now);
  void holdBack(size_t path);
  // Holds back the packets that later ones have overtaken: they are lost. The peer drops a packet that
  // comes twice.
  void holdBackOvertaken(Clock::time_point now);
  // Returns the first packet that waits, from this serial on.
  std::optional<uint64_t> firstWaiting(uint64_t from) const;
  const Sent& at(uint64_t serial) const { return sent_.at(serial); }
  const Sent& moveTo(size_t path, uint64_t serial, Clock::time_point now);
  // Returns when the peer has last acknowledged a packet. If it had acknowledged all then: when the
  // next packet left.
  Clock::time_point progress() const { return progress_; }

  // Drops all packets: they will not be acknowledged.
  void drop();
  // The same, without a word to the paths, which begin anew.
  void clear();

 private:
  void hold(Sent& sent);
  void erase(std::map<uint64_t, Sent>::iterator sent, Clock::time_point now);

  Paths& paths_;
  std::map<uint64_t, Sent> sent_;
  size_t waiting_ = 0;
  Clock::time_point progress_;
};

}  // namespace mooncake
