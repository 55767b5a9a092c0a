#pragma once

#include <memory>
#include <vector>

#include "base/mutex.h"
#include "wires/nic/sim/sim_nic.h"

namespace mooncake {

// The simulated cards of one engine: passes each message that is carried to the engine to its card.
class SimCards : public std::enable_shared_from_this<SimCards> {
 public:
  std::vector<std::unique_ptr<Nic>> make(size_t count, const SimNic::Options& options);
  // Creates another card at this index. If the index was killed, the new card is dead, too.
  std::unique_ptr<Nic> renew(size_t index);
  // Takes a message from a card of that host. A message for a card that is gone is lost.
  void arrive(const SimNic::Host& from, ByteView message);

  // For tests: kills or revives the card at this index, including later ones.
  void kill(size_t index);
  void revive(size_t index);
  // Returns the number of messages that have left this card since it was opened.
  uint64_t carried(size_t index);

 private:
  struct Place {
    SimNic* card = nullptr;
    SimNic::Options options;
    bool isKilled = false;
  };
  std::unique_ptr<Nic> place(size_t index) REQUIRES(mutex_);

  Mutex mutex_;  // no card is destroyed while it is held
  std::vector<Place> places_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
