#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>

#include "wires/cards/card_memories.h"
#include "wires/cards/control.h"

namespace mooncake {

// The keys that the two ends of a channel have told each other: keys that the peer has granted for
// its regions, and the regions of ours that it may write into because it was asked to. Under the
// channel's lock.
class PeerKeys {
 public:
  // Without `memories` no card moves bytes by itself, and every answer is empty.
  PeerKeys(const char* name, std::shared_ptr<CardMemories> memories, control::Tell tell)
      : name_(name), memories_(std::move(memories)), tell_(std::move(tell)) {}

  // Sets this end of the channel, which holds the keys that the peer is told.
  void attach(std::weak_ptr<KeyHolder> holder) { holder_ = std::move(holder); }

  // ---- keys of the peer Returns the keys of a region of the peer. Null: there are none, and the
  // peer is asked, unless it was asked in the last 100 ms.
  std::shared_ptr<control::Grant> find(uint64_t region);
  // Returns whether the peer has answered for this region. Asks it if not.
  bool isAnswered(uint64_t region);
  void onGrant(control::Grant grant);
  // The keys of this region, or of all regions, are void.
  void forget(uint64_t region) { granted_.erase(region); }
  void forgetAll() { granted_.clear(); }
  // Forgets the keys of this region, and makes them unusable for transfers that have them.
  void withdraw(uint64_t region);

  // ---- keys of ours
  // Tells the peer the keys of a region that it is going to be asked to write into.
  void offer(uint64_t region);
  // Offers all regions that any peer may write into.
  void offerAll();
  // Answers the question of the peer for the keys of a region.
  void answer(uint64_t region);
  // The peer's keys of this region, or of all regions, are void.
  void forgetOffer(uint64_t region) { offered_.erase(region); }
  void forgetOffers() { offered_.clear(); }

 private:
  struct Granted {
    std::shared_ptr<control::Grant> grant;  // null: no card has keys
    Clock::time_point askAt;
    bool isAnswered = false;  // also if no card has keys
  };

  const char* const name_;
  const std::shared_ptr<CardMemories> memories_;
  const control::Tell tell_;
  std::weak_ptr<KeyHolder> holder_;
  std::map<uint64_t, Granted> granted_;  // by region of the peer
  std::set<uint64_t> offered_;           // regions of ours
  bool hasToldUse_ = false;              // in the log
};

}  // namespace mooncake
