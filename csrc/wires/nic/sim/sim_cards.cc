#include "wires/nic/sim/sim_cards.h"

namespace mooncake {

std::vector<std::unique_ptr<Nic>> SimCards::make(size_t count, const SimNic::Options& options) {
  std::vector<std::unique_ptr<Nic>> made;
  Lock lock(mutex_);
  for (size_t i = 0; i < count; ++i) {
    SimNic::Options one = options;
    one.index = static_cast<uint32_t>(i);
    one.seed = options.seed * 0x9e3779b97f4a7c15 + i;
    places_.push_back({.card = nullptr, .options = std::move(one), .isKilled = false});
    made.push_back(place(i));
  }
  return made;
}

std::unique_ptr<Nic> SimCards::place(size_t index) {
  SimNic::Options options = places_[index].options;
  options.onGone = [self = shared_from_this(), index, turn = options.turn] {
    Lock lock(self->mutex_);
    // The entry of a successor stays.
    if (self->places_[index].options.turn == turn) self->places_[index].card = nullptr;
  };
  auto card = std::make_unique<SimNic>(std::move(options));
  if (places_[index].isKilled) card->kill();
  places_[index].card = card.get();
  return card;
}

std::unique_ptr<Nic> SimCards::renew(size_t index) {
  Lock lock(mutex_);
  ++places_[index].options.turn;
  return place(index);
}

void SimCards::arrive(const SimNic::Host& from, ByteView message) {
  const auto index = SimNic::cardOf(message);
  Lock lock(mutex_);
  if (index && *index < places_.size() && places_[*index].card)
    places_[*index].card->arrive(from, message);
}

void SimCards::kill(size_t index) {
  Lock lock(mutex_);
  places_[index].isKilled = true;
  if (places_[index].card) places_[index].card->kill();
}

void SimCards::revive(size_t index) {
  Lock lock(mutex_);
  places_[index].isKilled = false;
  if (places_[index].card) places_[index].card->revive();
}

uint64_t SimCards::carried(size_t index) {
  Lock lock(mutex_);
  return places_[index].card ? places_[index].card->carried() : 0;
}

}  // namespace mooncake
