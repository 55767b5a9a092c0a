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
  // Another one in the place of that. What was killed stays so.
  std::unique_ptr<Nic> renew(size_t index);
  // From the cards of that host. What is for a card that is gone is lost.
  void arrive(const SimNic::Host& from, ByteView message);

  // For tests: whichever card has this place is dead from now on, or not any more.
  void kill(size_t index);
  void revive(size_t index);
  // That have left that card, since it was opened.
  uint64_t carried(size_t index);

 private:
  struct Place {
    SimNic* card = nullptr;
    SimNic::Options options;
    bool isKilled = false;
  };
  std::unique_ptr<Nic> place(size_t index);

  std::mutex mutex_;  // guards what follows; a card does not go while it is held
  std::vector<Place> places_;
};

}  // namespace mooncake
