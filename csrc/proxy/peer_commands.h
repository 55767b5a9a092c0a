#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "engine/peers/peer.h"
#include "proxy/command_ring.h"
#include "proxy/flights.h"
#include "proxy/regions.h"

namespace mooncake::proxy {

struct PeerLimits {
  // A reading of a signal word may be torn. It is then too high by 255 at least, so it is found out
  // while fewer commands are under way.
  static constexpr size_t kMostUnderWay = 128;

  uint64_t bytesUnderWay = uint64_t(64) << 20;  // but for one command
  Clock::duration timeout = std::chrono::seconds(10);
};

// Gives the commands of one peer's ring to its channel, and tells the ring how they end. One
// thread, but for status() and drop().
//
// Once a write has completed, its signal follows: a put without data. If no other command of the
// same word is under way, the bytes of a small command and its signal go in one put. A put has no
// completion, so the peer's words are read back until they count it.
//
// If the connection breaks and is made again, commands that have not completed are repeated. That
// harms nothing: no signal has told the peer of such a write, and a put with one stamp lands once.
class PeerCommands {
 public:
  // `ours` is this rank's number. The bell must outlive the peer's channel.
  PeerCommands(uint32_t ours, uint32_t number, std::shared_ptr<Peer> peer, CommandRing ring,
               std::span<const LocalRegion> sources, Regions targets, PeerLimits limits,
               Doorbell* bell);

  // Goes as far as it can without waiting. Returns whether anything has changed.
  bool drive(Clock::time_point now);
  // Returns whether drive() has something to do at once.
  bool hasNews();
  // No command reads its source any more when this returns. The ring ends, unless it has before.
  void end(kernels::ProxyEnd why, Error error);
  // Has drive() end the ring: the peer takes no part any more. Any thread.
  void drop() { isDropped_.store(true, std::memory_order_release); }
  bool isEnded() const { return isEnded_; }
  // Returns whether the peer said goodbye.
  bool hasLeft() const { return peer_->disconnected && peer_->evidence.isGoodbye(); }
  // Returns whether commands are under way.
  bool isBusy() const { return !isEnded_ && flights_.size() > 0; }
  // Why the ring has ended. Any thread.
  Status status() const;

 private:
  bool takeCommands(Clock::time_point now);
  bool fitsPut(const kernels::ProxyCommand& command) const;
  bool begin(Clock::time_point now);
  bool giveWrites(Clock::time_point now);
  bool collect(Clock::time_point now);
  bool popDone();
  void finish(Flight& flight);
  bool putSignal(uint32_t word, uint64_t stamp, std::span<const std::byte> data,
                 const kernels::ProxyCommand* command, Clock::time_point now);
  void announce(Clock::time_point now);
  static bool isArriving(const Flight& flight);
  bool isUp(const Flight& flight) const;
  bool confirm(Clock::time_point now);
  void readWords(uint32_t first, size_t count, Clock::time_point now);
  void repeatLate(Clock::time_point now);
  void onError(ErrorCode code, const std::string& why, Clock::time_point now);
  bool renew(Clock::time_point now);

  const uint32_t ours_;
  const std::shared_ptr<Peer> peer_;
  const std::string name_;  // "rank 3"
  CommandRing ring_;
  const std::span<const LocalRegion> sources_;
  const Regions targets_;
  const PeerLimits limits_;
  Flights flights_;
  uint64_t bytesUnderWay_ = 0;
  size_t due_ = 0;
  size_t signalled_ = 0;  // flights with a signal that are not done
  // A command that was taken and had no room.
  bool isHeld_ = false;
  kernels::ProxyCommand held_{};

  std::vector<WriteRequest> writes_;
  std::vector<Flight*> writing_;  // of these requests

  // For each signal word of the peer.
  std::vector<uint64_t> issued_;     // commands that were taken
  std::vector<uint32_t> underWay_;   // number of them that are not done
  std::vector<uint64_t> seen_;       // the word's value, as last read
  std::vector<uint32_t> blockedIn_;  // the turn of collect() in which no signal may follow
  std::vector<uint64_t> toAnnounce_;
  std::vector<uint32_t> announcing_;
  uint32_t turn_ = 0;

  Completion reading_;  // of the words
  bool isReading_ = false;
  bool isProbing_ = false;  // the reading has begun after the break

  bool isBroken_ = false;  // the connection; the peer may come back
  Clock::time_point pausedUntil_;

  std::atomic<bool> isDropped_{false};
  bool isEnded_ = false;
  mutable Mutex mutex_;
  Status status_ GUARDED_BY(mutex_);
};

}  // namespace mooncake::proxy
