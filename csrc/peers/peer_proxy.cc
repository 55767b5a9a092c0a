#include "peers/peer_proxy.h"

#include <algorithm>
#include <array>
#include <bit>
#include <thread>
#include <utility>

#include "base/log.h"
#include "engine/contract/channel.h"
#include "kernels/remote.h"
#include "peers/allocation_exchange.h"
#include "peers/gather_blocks.h"
#include "proxy/regions.h"

namespace mooncake {
namespace {

struct Description {
  uint32_t bytes = 0;
  std::array<std::byte, 252> text{};
};

}  // namespace

Result<std::unique_ptr<PeerProxy>> PeerProxy::make(Group& group, Settings settings,
                                                   std::span<const std::byte> firstBytes,
                                                   Deadline deadline) {
  std::unique_ptr<PeerProxy> made(new PeerProxy(std::move(settings)));
  MOONCAKE_TRY(agreeOnAll(group, made->create(group), deadline));
  Description mine;
  const Bytes text = made->proxy_->describe();
  if (text.size() > mine.text.size())
    return Error{ErrorCode::kSystem, "the description of a proxy is too long"};
  std::ranges::copy(text, mine.text.begin());
  mine.bytes = uint32_t(text.size());
  const auto all = gatherBlocks(group, mine, deadline);
  if (!all.ok()) return all.error();
  std::vector<Bytes> descriptions;
  for (size_t rank = 0; rank < all->size(); ++rank) {
    const Description& theirs = (*all)[rank];
    descriptions.emplace_back();
    if (!(made->settings_.remote >> rank & 1)) continue;
    const size_t bytes = std::min<size_t>(theirs.bytes, theirs.text.size());
    descriptions.back().assign(theirs.text.begin(), theirs.text.begin() + std::ptrdiff_t(bytes));
  }
  Status ready = made->tryAll(group, descriptions, firstBytes, deadline);
  if (ready.ok()) ready = made->attach(group, descriptions);
  MOONCAKE_TRY(agreeOnAll(group, ready, deadline));
  return made;
}

Status PeerProxy::create(Group& group) {
  using namespace std::chrono;
  const auto timeout = ceil<milliseconds>(settings_.timeout);
  const auto engine = group.window().sharedEngine();
  const uint32_t threads = proxy::threadsFor(*engine, uint32_t(std::popcount(settings_.remote)));
  auto made = proxy::Proxy::create(
      engine, {{settings_.own, settings_.owner}, {settings_.inboxes, settings_.owner}},
      {.rank = uint32_t(group.rank()),
       .ranks = uint32_t(group.size()),
       .signalWords = kernels::kMaxRemoteBlocks,
       .threads = threads,
       .timeout = timeout,
       .kernelTimeout = timeout,
       .endLevel = LogLevel::kInfo,
       .accelerator = settings_.owner.accelerator,
       .tickets = settings_.tickets,
       .counts = settings_.counts});
  if (!made.ok()) return made.error();
  proxy_ = std::move(*made);
  memory_ = proxy_->memory();
  view_ = proxy_->view();
  return {};
}

Status PeerProxy::attach(Group& group, const std::vector<Bytes>& descriptions) {
  std::vector<std::shared_ptr<Peer>> peers;
  for (int rank = 0; rank < group.size(); ++rank) peers.push_back(group.window().peer(rank));
  return proxy_->attach(peers, descriptions);
}

// An accelerator may wait for kernels when a connection's first copies allocate their buffers. So
// both ends of each connection make a copy here.
Status PeerProxy::tryAll(Group& group, const std::vector<Bytes>& descriptions,
                         std::span<const std::byte> firstBytes, Deadline deadline) const {
  for (int rank = 0; rank < group.size(); ++rank) {
    if (!(settings_.remote >> rank & 1)) continue;
    const auto& peer = group.window().peer(rank);
    const auto named = [&](const Error& why) {
      return Status(why.code, "the way to " + group.nameRank(rank) + ": " + why.message);
    };
    auto theirs = proxy::Regions::decode(descriptions[size_t(rank)], group.nameRank(rank));
    if (!theirs.ok()) return theirs.error();
    const uint64_t at = settings_.inboxAt[size_t(rank)];
    if (theirs->regions.size() <= kernels::kInboxRegion ||
        theirs->regions[kernels::kInboxRegion].remote.bytes < at + settings_.inboxBytes) {
      return {ErrorCode::kMismatch, group.nameRank(rank) +
                                        " has a smaller inbox than this rank: set the same sizes "
                                        "on all ranks"};
    }
    Completion written(&group.window().bell());
    const Status begun =
        peer->channel->write({.region = theirs->regions[kernels::kInboxRegion].remote,
                              .offset = at,
                              .source = firstBytes,
                              .completion = &written,
                              .owner = settings_.owner});
    if (!begun.ok()) return named(begun.error());
    while (!written.finished() && !deadline.passed() && !group.isGone(rank))
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    const bool isOver = written.finished();
    peer->channel->cancel(&written);
    if (!isOver) return named({ErrorCode::kTimeout, "nothing has arrived there in time"});
    if (const ErrorCode code = written.error.load(); code != ErrorCode::kOk)
      return named({code, written.why.empty() ? errorCodeName(code) : written.why});
  }
  return {};
}

void PeerProxy::wake() { proxy_->wake(); }

std::string PeerProxy::endsOf(uint64_t ranks) const {
  std::string ends;
  for (int rank = 0; rank < kernels::kMaxRemoteRanks; ++rank) {
    if (!(ranks & settings_.remote & uint64_t(1) << rank)) continue;
    const Status status = proxy_->statusOf(uint32_t(rank));
    if (!status.ok()) ends += "; " + status.error().message;
  }
  return ends;
}

Status PeerProxy::end(uint64_t ranks, Deadline deadline) {
  for (uint32_t rank = 0; rank < uint32_t(kernels::kMaxRemoteRanks); ++rank)
    if (ranks & settings_.remote & uint64_t(1) << rank) MOONCAKE_TRY(proxy_->end(rank, deadline));
  return {};
}

void PeerProxy::flush(Deadline deadline) {
  const Status flushed = proxy_->flush(deadline);
  if (!flushed.ok()) log(LogLevel::kWarning, "peers", flushed.error().message);
}

void PeerProxy::close() { proxy_.reset(); }

}  // namespace mooncake
