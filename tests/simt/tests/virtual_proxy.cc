#include "virtual_proxy.h"

#include <algorithm>
#include <cstring>
#include <gtest/gtest.h>
#include <optional>
#include <utility>

#include "kernels/device.h"
#include "tests/simt/sanitizers.h"

namespace mooncake::kernels {
namespace {
constexpr uint32_t kWords = uint32_t(kMaxRemoteBlocks);
constexpr size_t kMostUnderWay = 6;
}  // namespace

VirtualProxy::VirtualProxy(simt::World& world, int rank, int ranks, uint64_t seed)
    : world_(world),
      rank_(rank),
      random_(seed * 0x9e3779b97f4a7c15u + uint64_t(rank) * 2 + 1),
      slots_(seed % 3 ? 4u : 32u),
      endsRings_(seed % 4 != 1),
      isSlow_(seed % 5 < 2),
      commands_(size_t(ranks) * slots_),
      counts_(size_t(ranks)),
      tickets_(size_t(ranks)),
      signals_(size_t(ranks) * kWords) {
  for (int i = 0; i < 8; ++i) draw(2);
  for (size_t peer = 0; peer < size_t(ranks); ++peer) {
    rings_.push_back(
        {.commands = {std::span(commands_).subspan(peer * slots_, slots_), counts_[peer]},
         .underWay = {},
         .flying = {},
         .signalled = std::vector<uint64_t>(kWords)});
  }
}

unsigned VirtualProxy::draw(unsigned below) {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return unsigned(random_ % below);
}

ProxyView VirtualProxy::view() {
  return {commands_.data(),        counts_.data(), tickets_.data(), signals_.data(),
          uint32_t(rings_.size()), slots_,         kWords,          kTimeoutNs};
}

void VirtualProxy::setRegions(std::span<unsigned char> own, std::span<unsigned char> inbox,
                              std::vector<size_t> mails) {
  regions_[kOwnRegion] = own;
  regions_[kInboxRegion] = inbox;
  mails_ = std::move(mails);
}

bool VirtualProxy::isMail(size_t offset) const {
  return std::ranges::any_of(
      mails_, [&](size_t begin) { return offset >= begin && offset < begin + sizeof(Mails); });
}

void VirtualProxy::pass() { loadRelaxedSystem(&passed_); }

void VirtualProxy::run(const std::vector<VirtualProxy*>& all, const std::function<bool()>& isOver) {
  while (!isOver()) {
    endDropped();
    const auto first = int(draw(unsigned(all.size())));
    bool hasWorked = false;
    for (int i = 0; i < int(all.size()) && !hasWorked; ++i) {
      const int peer = (first + i) % int(all.size());
      if (peer != rank_) hasWorked = step(peer, *all[size_t(peer)]);
    }
    // Seldom the wire does nothing for a while.
    if (!hasWorked || draw(200) == 0) {
      relax();
    } else {
      pass();
    }
  }
}

// A killed rank's proxy stops at any access. While it ignores, it does not: its lists stay whole.
bool VirtualProxy::step(int peer, VirtualProxy& other) {
  using simt::sanitizers::Ignored;
  Ring& ring = rings_[size_t(peer)];
  if (world_.isKilled(peer)) {
    if (land(other.rings_[size_t(rank_)])) return true;
    if (ring.hasEnded || !endsRings_) return false;
    if (draw(4) == 0) end(ring, ProxyEnd::kPeerLost);
    return true;
  }
  const bool hasLanded = land(ring);
  if (ring.hasEnded) return hasLanded;
  const bool mayTake = ring.underWay.size() < kMostUnderWay;
  if (mayTake && (ring.underWay.empty() || draw(3) == 0) && take(peer, other)) return true;
  if (ring.underWay.empty()) return hasLanded;
  UnderWay& chosen = ring.underWay[draw(unsigned(ring.underWay.size()))];
  const bool mayBreak = chosen.left.empty() && (chosen.hasArrived() || !chosen.isRepeated);
  if (mayBreak && draw(8) == 0) {  // the connection has broken
    const Ignored ignored;
    chosen.isRepeated = true;
    cut(chosen);
  }
  send(ring, other, chosen);
  signal(peer, other);
  uint32_t completed = 0;
  {
    const Ignored ignored;
    while (!ring.underWay.empty() && ring.underWay.front().isSignalled &&
           ring.underWay.front().hasArrived() && draw(3)) {
      ring.underWay.pop_front();
      ++completed;
    }
  }
  if (completed) {
    ring.commands.complete(completed);
    simt::afterChange();
  }
  return true;
}

bool VirtualProxy::take(int peer, VirtualProxy& other) {
  Ring& ring = rings_[size_t(peer)];
  ProxyCommand command;
  if (ring.taken >= ring.delayAfter && now() < ring.delayUntilNs) return false;
  if (!ring.commands.take(command)) return false;
  ++ring.taken;
  ring.commands.publishTaken();
  simt::afterChange();
  const auto isInside = [&](VirtualProxy& owner, uint32_t region, uint64_t offset) {
    if (region > kInboxRegion) return false;
    const size_t size = owner.regions_[region].size();
    return offset <= size && command.bytes <= size - offset;
  };
  const bool isSound = isInside(*this, command.sourceRegion, command.sourceOffset) &&
                       isInside(other, command.targetRegion, command.targetOffset) &&
                       command.bytes && command.signal < kWords;
  if (!isSound) {
    ADD_FAILURE() << "rank " << rank_ << " pushes a wrong command to rank " << peer;
    end(ring, ProxyEnd::kWrongCommand);
    return true;
  }
  const simt::sanitizers::Ignored ignored;
  (other.isMail(command.targetOffset) ? ring.bytes.mails : ring.bytes.data) += command.bytes;
  cut(ring.underWay.emplace_back(command));
  return true;
}

// Into pieces that arrive in any order.
void VirtualProxy::cut(UnderWay& one) {
  const size_t bytes = one.command.bytes;
  const unsigned most = bytes > 64 ? unsigned(bytes) / 2 : 13;
  for (size_t begin = 0; begin < bytes;) {
    const size_t end = std::min(bytes, begin + 1 + draw(most));
    one.left.push_back({begin, end});
    begin = end;
  }
}

void VirtualProxy::send(Ring& ring, VirtualProxy& other, UnderWay& one) {
  std::optional<simt::sanitizers::Ignored> ignored(std::in_place);
  if (one.left.empty()) return;
  std::swap(one.left[draw(unsigned(one.left.size()))], one.left.back());
  const Piece piece = one.left.back();
  one.left.pop_back();
  const ProxyCommand& command = one.command;
  const unsigned char* const from =
      regions_[command.sourceRegion].data() + command.sourceOffset + piece.begin;
  leaving_.resize(piece.end - piece.begin);
  // A kernel may use the places of a repeated command.
  if (!one.isRepeated) ignored.reset();
  std::memcpy(leaving_.data(), from, leaving_.size());
  ignored.emplace();
  const size_t at = command.targetOffset + piece.begin;
  const uint64_t due = ring.looks + (draw(8) ? draw(2) : draw(isSlow_ ? 100 : 8));
  ring.flying.push_back({leaving_, other.regions_[command.targetRegion].data() + at,
                         other.isMail(at), one.isRepeated, due, one.flying});
  ++*one.flying;
}

bool VirtualProxy::land(Ring& ring) {
  std::optional<simt::sanitizers::Ignored> ignored(std::in_place);
  if (ring.flying.empty()) return false;
  ++ring.looks;
  std::swap(ring.flying[draw(unsigned(ring.flying.size()))], ring.flying.back());
  if (ring.flying.back().due > ring.looks) return true;
  landing_ = std::move(ring.flying.back());
  ring.flying.pop_back();
  if (!landing_.isRepeated) ignored.reset();
  const std::vector<unsigned char>& bytes = landing_.bytes;
  if (landing_.isMail) {  // kernels read it meanwhile
    for (size_t i = 0; i < bytes.size(); ++i)
      __atomic_store_n(landing_.to + i, bytes[i], __ATOMIC_RELAXED);
  } else {
    std::memcpy(landing_.to, bytes.data(), bytes.size());
  }
  ignored.emplace();
  --*landing_.count;
  return true;
}

// Counts the commands that have arrived, in order of the ring for each word.
void VirtualProxy::signal(int peer, VirtualProxy& other) {
  Ring& ring = rings_[size_t(peer)];
  bool isBlocked[kWords] = {};
  for (UnderWay& one : ring.underWay) {
    const uint32_t word = one.command.signal;
    if (one.isSignalled || isBlocked[word]) continue;
    if (!one.hasArrived() || draw(2)) {
      isBlocked[word] = true;
      continue;
    }
    one.isSignalled = true;
    storeReleaseSystem(&other.signals_[size_t(rank_) * kWords + word], ++ring.signalled[word]);
  }
}

bool VirtualProxy::end(uint64_t ranks) {
  if (dropped_ != ranks) storeReleaseSystem(&dropped_, ranks);
  return loadAcquireSystem(&ended_) == ranks;
}

void VirtualProxy::endDropped() {
  const uint64_t dropped = loadAcquireSystem(&dropped_);
  if (dropped == ended_) return;
  for (size_t peer = 0; peer < rings_.size(); ++peer)
    if (dropped >> peer & 1 && !rings_[peer].hasEnded) end(rings_[peer], ProxyEnd::kPeerLost);
  storeReleaseSystem(&ended_, dropped);
}

void VirtualProxy::end(Ring& ring, ProxyEnd why) {
  ring.hasEnded = true;
  {
    const simt::sanitizers::Ignored ignored;
    ring.underWay.clear();
  }
  ring.commands.end(why);
  simt::afterChange();
}

}  // namespace mooncake::kernels
