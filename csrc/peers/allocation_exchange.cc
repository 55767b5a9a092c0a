#include "peers/allocation_exchange.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <poll.h>
#include <span>
#include <sys/socket.h>
#include <utility>

#include "base/bytes.h"
#include "base/crypto.h"
#include "base/unix_socket.h"
#include "peers/gather_blocks.h"

namespace mooncake {
namespace {

constexpr int64_t kLookMs = 50;  // between two looks whether a member is lost

struct StatusBlock {
  std::array<char, 400> text{};  // empty: ok
};

struct Offer {
  std::array<char, 64> name{};    // of the socket where the descriptor is handed over
  std::array<char, 32> secret{};  // a member shows that it has read the offer
  PeerAllocation allocation;
};

uint64_t bitOf(int rank) { return uint64_t(1) << rank; }

// One member's side of the exchange. Every member connects to all other members of its host,
// and serves them.
class Exchange {
 public:
  // Bits of ranks: `present` are not lost, and `local` are on this host.
  Exchange(Group& group, const Fd& mine, std::vector<Offer> offers, uint64_t present,
           uint64_t local)
      : group_(group),
        mine_(mine),
        offers_(std::move(offers)),
        present_(present),
        others_(local & ~bitOf(group.rank())),
        found_(offers_.size()) {}

  Status run(const Fd& listener, Deadline deadline);
  std::vector<SharedAllocation> take();

 private:
  struct Guest {
    Fd socket;
    Bytes shown;
  };

  Status connect(Deadline deadline);
  Status accept(const Fd& listener);
  Status serve(Guest& guest);
  Status receive(size_t rank);
  bool isOver() const {
    const int found = int(std::ranges::count_if(found_, [](const Fd& fd) { return bool(fd); }));
    return served_ == std::popcount(others_) && found == std::popcount(others_);
  }

  Group& group_;
  const Fd& mine_;
  const std::vector<Offer> offers_;
  const uint64_t present_;
  const uint64_t others_;  // bits of the other ranks of this host
  std::vector<Fd> found_;
  std::vector<Fd> connections_;  // to other members, by rank
  std::vector<Guest> guests_;
  int served_ = 0;
};

Status Exchange::connect(Deadline deadline) {
  for (size_t rank = 0; rank < offers_.size(); ++rank) {
    connections_.emplace_back();
    if (!(others_ >> rank & 1)) continue;
    auto socket = connectAbstract(offers_[rank].name.data(), deadline);
    if (!socket.ok())
      return {socket.error().code, group_.nameRank(int(rank)) + ": " + socket.error().message};
    const auto& secret = offers_[rank].secret;
    if (::send(socket->get(), secret.data(), secret.size(), MSG_NOSIGNAL) != ssize_t(secret.size()))
      return systemError("send to a unix socket", errno);
    connections_.back() = std::move(*socket);
  }
  return {};
}

Status Exchange::accept(const Fd& listener) {
  Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket) {
    guests_.push_back({std::move(socket), {}});
  } else if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
    return systemError("accept of a unix socket", errno);
  }
  return {};
}

// A guest that does not know the secret is no member. It gets nothing, and costs a connection.
Status Exchange::serve(Guest& guest) {
  const auto& secret = offers_[size_t(group_.rank())].secret;
  Fd ignored;
  const auto got =
      receiveWithFd(guest.socket.get(), secret.size() - guest.shown.size(), guest.shown, ignored);
  if (got.ok() && guest.shown.size() < secret.size()) return {};
  const auto expected = std::as_bytes(std::span(secret));
  if (got.ok() && Crypto::equal(guest.shown, expected)) {
    MOONCAKE_TRY(sendWithFd(guest.socket.get(), expected.first(1), mine_.get()));
    ++served_;
  }
  guest.socket.reset();
  return {};
}

Status Exchange::receive(size_t rank) {
  Bytes message;
  const auto got = receiveWithFd(connections_[rank].get(), 1, message, found_[rank]);
  if (!got.ok()) return {got.error().code, group_.nameRank(int(rank)) + ": " + got.error().message};
  if (*got && !found_[rank])
    return {ErrorCode::kSystem, group_.nameRank(int(rank)) + " has sent no descriptor"};
  return {};
}

std::vector<SharedAllocation> Exchange::take() {
  std::vector<SharedAllocation> taken;
  for (size_t rank = 0; rank < offers_.size(); ++rank) {
    const bool isHere = others_ >> rank & 1 || int(rank) == group_.rank();
    taken.emplace_back();
    if (isHere) taken.back() = {offers_[rank].allocation, std::move(found_[rank])};
  }
  return taken;
}

Status Exchange::run(const Fd& listener, Deadline deadline) {
  MOONCAKE_TRY(connect(deadline));
  while (!isOver()) {
    if (deadline.passed())
      return {ErrorCode::kTimeout, "not all members have exchanged their memory in time"};
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (rank != group_.rank() && present_ >> rank & 1 && group_.isGone(rank))
        return {ErrorCode::kPeerLost, group_.nameRank(rank) + " is lost"};
    }
    std::vector<pollfd> watched{{listener.get(), POLLIN, 0}};
    for (const Guest& guest : guests_) watched.push_back({guest.socket.get(), POLLIN, 0});
    for (size_t rank = 0; rank < connections_.size(); ++rank)
      watched.push_back({found_[rank] ? -1 : connections_[rank].get(), POLLIN, 0});
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.left()).count();
    if (::poll(watched.data(), watched.size(), int(std::min<int64_t>(left, kLookMs))) < 0 &&
        errno != EINTR)
      return systemError("poll", errno);
    const pollfd* next = watched.data() + 1;
    for (Guest& guest : guests_)
      if ((next++)->revents) MOONCAKE_TRY(serve(guest));
    for (size_t rank = 0; rank < connections_.size(); ++rank)
      if ((next++)->revents) MOONCAKE_TRY(receive(rank));
    std::erase_if(guests_, [](const Guest& guest) { return !guest.socket; });
    if (watched[0].revents) MOONCAKE_TRY(accept(listener));
  }
  return {};
}

// Returns bits of the members at whose sockets a connection can be made, and of this one.
Result<uint64_t> reach(const Group& group, const std::vector<Offer>& offers, uint64_t present,
                       Deadline deadline) {
  uint64_t reached = bitOf(group.rank());
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank == group.rank() || !(present >> rank & 1)) continue;
    const auto socket = connectAbstract(offers[size_t(rank)].name.data(), deadline);
    if (socket.ok()) reached |= bitOf(rank);
    if (!socket.ok() && socket.error().code != ErrorCode::kUnsupported)
      return Error{socket.error().code, group.nameRank(rank) + ": " + socket.error().message};
  }
  return reached;
}

}  // namespace

std::vector<uint64_t> groupByHost(std::span<const uint64_t> reached) {
  const uint64_t all = ~uint64_t(0) >> (64 - reached.size());
  std::vector<uint64_t> hosts;
  for (size_t rank = 0; rank < reached.size(); ++rank) {
    const uint64_t ours = reached[rank] & all;
    if (reached[rank] == 0) {
      hosts.push_back(0);
      continue;
    }
    bool isHost = ours >> rank & 1;
    for (size_t other = 0; other < reached.size(); ++other)
      isHost &= !(ours >> other & 1) || (reached[other] & all) == ours;
    hosts.push_back(isHost ? ours : bitOf(int(rank)));
  }
  return hosts;
}

Status requireOneHost(const Group& group, std::span<const uint64_t> hosts) {
  const auto isThere = [](uint64_t host) { return host != 0; };
  const auto first = int(std::ranges::find_if(hosts, isThere) - hosts.begin());
  for (int rank = first + 1; rank < group.size(); ++rank) {
    if (!isThere(hosts[size_t(rank)]) || hosts[size_t(first)] >> rank & 1) continue;
    return {ErrorCode::kUnsupported, group.nameRank(rank) + " is on another host than " +
                                         group.nameRank(first) +
                                         ", or in another network namespace"};
  }
  return {};
}

Status agreeOnAll(Group& group, const Status& mine, Deadline deadline) {
  StatusBlock block;
  if (!mine.ok()) {
    const std::string text = mine.error().message.empty() ? "unknown" : mine.error().message;
    text.copy(block.text.data(), block.text.size() - 1);
  }
  const auto blocks = gatherBlocks(group, block, deadline);
  if (!blocks.ok()) return blocks.error();
  for (size_t rank = 0; rank < blocks->size(); ++rank) {
    const StatusBlock& theirs = (*blocks)[rank];
    if (!theirs.text[0]) continue;
    return {ErrorCode::kUnsupported,
            group.nameRank(int(rank)) + ": " +
                std::string(theirs.text.data(), ::strnlen(theirs.text.data(), theirs.text.size()))};
  }
  return {};
}

Result<HostAllocations> exchangeAllocations(Group& group, const SharedAllocation& mine,
                                            Deadline deadline) {
  Offer offer{.allocation = mine.allocation};
  ("mooncake-peer-" + Crypto::randomHex(16)).copy(offer.name.data(), offer.name.size() - 1);
  Crypto::randomHex(offer.secret.size() / 2).copy(offer.secret.data(), offer.secret.size());
  auto listener = listenAbstract(offer.name.data());
  MOONCAKE_TRY(agreeOnAll(group, listener.ok() ? Status() : Status(listener.error()), deadline));
  auto offers = gatherBlocks(group, offer, deadline);
  if (!offers.ok()) return offers.error();
  for (Offer& theirs : *offers) theirs.name.back() = 0;
  const uint64_t present = bitsOf(group.lastView->active);
  const auto reached = reach(group, *offers, present, deadline);
  MOONCAKE_TRY(agreeOnAll(group, reached.status(), deadline));
  const auto all = gatherBlocks(group, *reached, deadline);
  if (!all.ok()) return all.error();
  HostAllocations made{.hosts = groupByHost(*all)};
  std::optional<Exchange> exchange(std::in_place, group, mine.descriptor, std::move(*offers),
                                   present, made.hosts[size_t(group.rank())]);
  const Status exchanged = exchange->run(*listener, deadline);
  made.allocations = exchange->take();
  // Other members notice by their connections that this one has given up.
  exchange.reset();
  listener->reset();
  MOONCAKE_TRY(agreeOnAll(group, exchanged, deadline));
  return made;
}

}  // namespace mooncake
