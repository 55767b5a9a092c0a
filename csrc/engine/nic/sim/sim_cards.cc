#include "engine/nic/sim/sim_cards.h"

namespace mooncake {

std::vector<std::unique_ptr<Nic>> SimCards::make(size_t count, const SimNic::Options& options) {
  std::vector<std::unique_ptr<Nic>> made;
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < count; ++i) {
    SimNic::Options one = options;
    one.index = static_cast<uint32_t>(i);
    one.seed = options.seed * 0x9e3779b97f4a7c15 + i;
    one.onGone = [self = shared_from_this(), i] {
      std::lock_guard lock(self->mutex_);
      self->cards_[i] = nullptr;
    };
    auto card = std::make_unique<SimNic>(std::move(one));
    cards_.push_back(card.get());
    made.push_back(std::move(card));
  }
  return made;
}

void SimCards::arrive(const SimNic::Host& from, ByteView message) {
  const auto index = SimNic::cardOf(message);
  std::lock_guard lock(mutex_);
  if (index && *index < cards_.size() && cards_[*index]) cards_[*index]->arrive(from, message);
}

}  // namespace mooncake
