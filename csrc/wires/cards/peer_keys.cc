#include "wires/cards/peer_keys.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace mooncake {
namespace {

// Number of regions that are remembered in either direction, before all are forgotten.
constexpr size_t kMostRegions = 65536;
// Pause before the peer is asked again for the keys of a region that had none.
constexpr auto kAskAgain = std::chrono::milliseconds(100);

}  // namespace

std::shared_ptr<control::Grant> PeerKeys::find(uint64_t region) {
  const auto now = Clock::now();
  if (granted_.size() >= kMostRegions) granted_.clear();
  Granted& granted = granted_[region];
  if (!granted.grant && now >= granted.askAt) {
    granted.askAt = now + kAskAgain;
    tell_(control::encodeNumber(control::Kind::kResolve, region));
  }
  return granted.grant;
}

bool PeerKeys::isAnswered(uint64_t region) {
  (void)find(region);
  return granted_[region].isAnswered;
}

void PeerKeys::onGrant(control::Grant grant) {
  auto found = granted_.find(grant.region);
  if (found == granted_.end()) {  // not asked for
    if (granted_.size() >= control::kMostOffers) return;
    found = granted_.emplace(grant.region, Granted()).first;
  }
  found->second.isAnswered = true;
  if (std::ranges::all_of(grant.cards, [](const auto& pieces) { return pieces.empty(); })) return;
  if (!std::exchange(hasToldUse_, true))
    log(LogLevel::kInfo, name_, "cards move bytes of a peer by themselves");
  found->second.grant = std::make_shared<control::Grant>(std::move(grant));
}

void PeerKeys::withdraw(uint64_t region) {
  const auto granted = granted_.extract(region);
  if (!granted || !granted.mapped().grant) return;
  for (auto& pieces : granted.mapped().grant->cards) pieces.clear();
}

void PeerKeys::offer(uint64_t region) {
  if (offered_.size() >= kMostRegions) offered_.clear();
  if (offered_.insert(region).second)
    tell_(memories_->grant(region, holder_.lock(), /*isAsked=*/true).encode());
}

void PeerKeys::offerAll() {
  if (!memories_) return;
  for (const uint64_t region : memories_->keys(control::kMostOffers)) offer(region);
}

void PeerKeys::answer(uint64_t region) {
  // Only a peer that was asked to write there gets keys with that right.
  const bool isAsked = offered_.contains(region);
  const auto grant = memories_ ? memories_->grant(region, holder_.lock(), isAsked)
                               : control::Grant{.region = region};
  tell_(grant.encode());
}

}  // namespace mooncake
