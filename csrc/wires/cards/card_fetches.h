#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "engine/contract/transfer.h"
#include "engine/memory/region_table.h"
#include "wires/cards/card_mover.h"
#include "wires/cards/control.h"

namespace mooncake {

// Gets that the cards of the owner serve, because the cards of the asking end do not read: FETCH
// asks, the owner's cards write, FETCHED says that they have. This class has both ends. Bytes that
// the owner's cards cannot write come as packets. Under the channel's lock.
class CardFetches {
 public:
  CardFetches(size_t leastByCard, Clock::duration servedLimit, const CardMover::Parts& parts,
              CardMover& mover, RegionTable& regions, control::Tell tell)
      : leastByCard_(leastByCard),
        servedLimit_(servedLimit),
        parts_(parts),
        mover_(mover),
        regions_(regions),
        tell_(std::move(tell)) {}

  // ---- the asking end
  // Adds a get to the next FETCH, if its target is long-lived memory that the peer's cards may
  // write. Then the peer gets our keys of it, once.
  bool ask(const GetRequest& request);
  // Sends the FETCH of the gets that were added.
  void send();
  void onFetched(const control::Fetched& fetched);
  // The owner answers a fetch with packets. Returns false if there is no such fetch.
  bool awaitPackets(uint64_t number);

  // ---- the owner
  void onFetch(const control::Fetch& fetch);
  // Returns whether the peer has held memory here for too long: a fetch that it neither completes
  // nor cancels.
  bool isHeldUp(Clock::time_point now);
  // Returns whether isHeldUp() has to be asked again.
  bool mayBeHeldUp() const { return heldUpSince_.has_value(); }

 private:
  bool serve(const control::Fetch::One& one, bool isOneOfFew,
             const std::shared_ptr<ServedFetches>& served);

  const size_t leastByCard_;
  const Clock::duration servedLimit_;
  const CardMover::Parts parts_;
  CardMover& mover_;
  RegionTable& regions_;
  const control::Tell tell_;
  control::Fetch next_;  // empty between two calls of the channel
  std::optional<Clock::time_point> heldUpSince_;
  uint64_t heldUpBy_ = 0;  // the oldest question about late writes at that time
};

}  // namespace mooncake
