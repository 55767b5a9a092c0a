#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "engine/nic/sim/sim_nic.h"

namespace mooncake {

// The simulated cards of one engine: what is carried to it finds its card here.
class SimCards : public std::enable_shared_from_this<SimCards> {
 public:
  std::vector<std::unique_ptr<Nic>> make(size_t count, const SimNic::Options& options);
  // From the cards of that host. What is for a card that is gone is lost.
  void arrive(const SimNic::Host& from, ByteView message);
  // For tests; only as long as the card is there.
  SimNic& card(size_t index) { return *cards_[index]; }

 private:
  std::mutex mutex_;  // guards what follows; a card does not go while it is held
  std::vector<SimNic*> cards_;
};

}  // namespace mooncake
