#include "wires/nic/registrations.h"

#include <algorithm>
#include <system_error>
#include <thread>

#include "base/signals.h"

namespace mooncake {
namespace {

// Pieces begin at multiples of this, which fits every page size in use.
constexpr uint64_t kPieceUnit = 2 << 20;
// If a device refuses a piece of this size, the cause is not the size.
constexpr uint64_t kLeastHalved = 64 << 20;
// Below this size a thread costs more than it saves.
constexpr uint64_t kParallelFrom = 1 << 20;

uint64_t pieceBytes(uint64_t most, uint64_t all) {
  if (most == 0 || all <= most) return all;
  return most < kPieceUnit ? most : most / kPieceUnit * kPieceUnit;
}

}  // namespace

const NicRegistration::Piece& NicRegistration::pieceAt(size_t card, uint64_t offset) const {
  const auto& pieces = pieces_[card];
  // All pieces but the last have the same length.
  const size_t index = pieces.size() < 2 ? 0 : offset / pieces[1].offset;
  return pieces[std::min(index, pieces.size() - 1)];
}

Result<std::shared_ptr<const NicRegistration>> NicRegistrations::add(std::span<std::byte> memory,
                                                                     uint32_t access) {
  const Key key{memory.data(), memory.size(), access};
  {
    Lock lock(mutex_);
    if (const auto found = held_.find(key); found != held_.end()) {
      if (auto held = found->second.lock()) {
        ++shared_;
        return held;
      }
    }
  }
  auto registration = std::make_shared<NicRegistration>();
  registration->memory_ = memory;
  registration->access_ = access;
  registration->pieces_.resize(cards_.size());
  std::vector<Status> results(cards_.size());
  const auto one = [&](size_t card) {
    results[card] = registerWith(*cards_[card], *registration, registration->pieces_[card]);
  };
  std::vector<std::thread> threads;
  size_t onThreads = 0;
  if (memory.size() >= kParallelFrom) {
    BlockedSignals blocked;
    try {
      for (; onThreads + 1 < cards_.size(); ++onThreads) threads.emplace_back(one, onThreads);
    } catch (const std::system_error&) {  // no more threads: this one does the rest
    }
  }
  for (size_t card = onThreads; card < cards_.size(); ++card) one(card);
  for (std::thread& thread : threads) thread.join();
  for (const Status& result : results) MOONCAKE_TRY(result);
  ++made_;
  Lock lock(mutex_);
  std::erase_if(held_, [](const auto& entry) { return entry.second.expired(); });
  held_[key] = registration;
  return std::shared_ptr<const NicRegistration>(std::move(registration));
}

Status NicRegistrations::registerWith(Nic& card, NicRegistration& registration,
                                      std::vector<NicRegistration::Piece>& pieces) {
  const std::span<std::byte> memory = registration.memory_;
  for (uint64_t most = pieceBytes(card.limits().mostMemoryBytes, memory.size());;) {
    Status failed;
    pieces.clear();
    for (uint64_t offset = 0; offset < memory.size() && failed.ok(); offset += most) {
      const uint64_t bytes = std::min<uint64_t>(most, memory.size() - offset);
      auto made = card.registerMemory(memory.subspan(offset, bytes), registration.access_);
      if (made.ok()) {
        pieces.push_back({.offset = offset, .memory = std::move(*made)});
      } else {
        failed = made.status();
      }
    }
    if (failed.ok()) {
      piecesMade_ += pieces.size();
      return {};
    }
    pieces.clear();
    const bool isTooMuch =
        failed.code() == ErrorCode::kExhausted || failed.code() == ErrorCode::kSystem;
    if (!isTooMuch || most / 2 < kLeastHalved) {
      return {failed.code(), "network card " + card.name() + ": " + failed.error().message};
    }
    ++halvings_;
    most = pieceBytes(most / 2, memory.size());
  }
}

NicRegistrations::Counters NicRegistrations::counters() const {
  return {made_, shared_, piecesMade_, halvings_};
}

}  // namespace mooncake
