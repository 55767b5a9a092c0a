#include "ep/shared_rows.h"

#include <algorithm>

namespace mooncake::ep {

std::vector<uint32_t> tokensFor(std::span<const int32_t> chosen, size_t topk,
                                const ExpertMap& experts, std::span<const int> ranks) {
  std::vector<uint32_t> tokens;
  for (size_t i = 0; i < chosen.size(); ++i) {
    const auto token = uint32_t(i / topk);
    if (chosen[i] == kNoExpert || (!tokens.empty() && tokens.back() == token)) continue;
    if (std::ranges::find(ranks, experts.owner(chosen[i])) != ranks.end()) tokens.push_back(token);
  }
  return tokens;
}

namespace {

const std::vector<int>& hostWith(const std::vector<std::vector<int>>& hosts, int rank) {
  return *std::ranges::find_if(
      hosts, [&](const auto& host) { return std::ranges::binary_search(host, rank); });
}

size_t countRanks(const std::vector<std::vector<int>>& hosts) {
  size_t count = 0;
  for (const auto& host : hosts) count += host.size();
  return count;
}

// Of sources that come to one rank of a host, at most.
size_t mostPlaces(const std::vector<std::vector<int>>& hosts, size_t leastRanks) {
  const size_t ranks = countRanks(hosts);
  size_t most = 0;
  for (const auto& host : hosts) {
    if (host.size() >= leastRanks)
      most = std::max(most, (ranks - host.size() + host.size() - 1) / host.size());
  }
  return most;
}

}  // namespace

SharedRows::SharedRows(const Hosts& hosts, const std::vector<int>& ranks, size_t rowsBytes,
                       size_t mostInlineRows)
    : hosts_(hosts.split(ranks)),
      all_(hosts.splitAll()),
      rowsBytes_(rowsBytes),
      mostInlineRows_(mostInlineRows) {
  const auto fits = [&](size_t places) { return places * rowsBytes_ <= hosts.leastSendBytes(); };
  const size_t pushedTo = all_.size() + mostPlaces(all_, 1);
  hasRoomForPushes_ = fits(pushedTo + mostPlaces(all_, 2));
  fetchedAt_ = hasRoomForPushes_ ? pushedTo : hosts_.size();
  isRoomy_ = fits(fetchedAt_ + mostPlaces(hosts_, 2));
}

const std::vector<int>& SharedRows::hostOf(int rank) const { return hostWith(hosts_, rank); }

// The sources of other hosts go round the ranks of this one.
SharedRows::Place SharedRows::place(int source, const std::vector<int>& host,
                                    const HostList& hosts) {
  size_t index = 0;
  for (const auto& other : hosts) {
    if (other.front() == host.front()) continue;
    index += size_t(std::ranges::count_if(other, [&](int r) { return r < source; }));
  }
  return {host[index % host.size()], index / host.size()};
}

SharedRows::Place SharedRows::fetched(int source, const std::vector<int>& host) const {
  const auto [by, index] = place(source, host, hosts_);
  return {by, (fetchedAt_ + index) * rowsBytes_};
}

std::optional<SharedRows::Place> SharedRows::pushed(int source,
                                                    const std::vector<int>& host) const {
  if (!hasRoomForPushes_) return std::nullopt;
  const auto [by, index] = place(source, hostWith(all_, host.front()), all_);
  if (!std::ranges::binary_search(host, by)) return std::nullopt;
  return Place{by, (all_.size() + index) * rowsBytes_};
}

}  // namespace mooncake::ep
