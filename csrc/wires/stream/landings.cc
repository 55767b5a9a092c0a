#include "wires/stream/landings.h"

#include <utility>

namespace mooncake {

Result<std::byte*> Landings::buffer(const MemoryOwner& device) {
  if (!arriving_) {
    const auto lent = copies_.lend(device);
    if (!lent.ok()) return lent.error();
    arriving_ = *lent;
  }
  return arriving_ ? arriving_->buffer() : nullptr;
}

void Landings::drop() {
  if (arriving_) copies_.giveBack(*std::exchange(arriving_, nullptr));
}

Status Landings::land(Transfer transfer, std::byte* target, size_t bytes, RegionTable::Use use,
                      const Completion* completion) {
  DeviceCopies::Copy& copy = *std::exchange(arriving_, nullptr);
  const Status begun = copies_.fromBuffer(
      copy, target, bytes, {.use = std::move(use), .completion = completion, .transfer = 0});
  if (begun.ok()) {
    landings_.push({&copy, transfer, std::nullopt});
  } else {
    copies_.giveBack(copy);
  }
  return begun;
}

bool Landings::keep(Transfer transfer, const Ending& ending) {
  for (size_t i = landings_.size(); i-- > 0;) {
    if (landings_[i].transfer != transfer) continue;
    landings_[i].ending = ending;
    return true;
  }
  return false;
}

bool Landings::setEnding(Transfer transfer, wire::AnswerStatus status) {
  for (size_t i = landings_.size(); i-- > 0;) {
    if (landings_[i].transfer != transfer || !landings_[i].ending) continue;
    landings_[i].ending->status = status;
    return true;
  }
  return false;
}

std::optional<Landings::Landed> Landings::next() {
  if (landings_.empty()) return std::nullopt;
  copies_.look();
  Landing& first = landings_.front();
  const auto state = first.copy->state();
  if (state == DeviceCopies::Copy::State::kUnderWay) return std::nullopt;
  Landed landed{first.transfer, first.ending, std::nullopt};
  if (state == DeviceCopies::Copy::State::kFailed) landed.failure = first.copy->failure();
  copies_.giveBack(*first.copy);
  landings_.pop();
  return landed;
}

void Landings::clear() {
  drop();
  for (; !landings_.empty(); landings_.pop()) copies_.giveBack(*landings_.front().copy);
}

}  // namespace mooncake
