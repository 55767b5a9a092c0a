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

size_t roundedUpRatio(size_t a, size_t b) { return (a + b - 1) / b; }

// Most sources that push to one rank. All ranks of a host count, also those that are lost: a source
// keeps its place for the life of the buffer.
size_t mostPushed(const std::vector<std::vector<int>>& all) {
  const size_t ranks = countRanks(all);
  size_t most = 0;
  for (const auto& host : all)
    most = std::max(most, roundedUpRatio(ranks - host.size(), host.size()));
  return most;
}

// Most sources whose rows one rank fetches for its host, in any attempt. The worst case is a host
// that has shrunk to two ranks while all other hosts are whole: a lone rank fetches for itself.
size_t mostFetched(const std::vector<std::vector<int>>& all) {
  const size_t ranks = countRanks(all);
  size_t most = 0;
  for (const auto& host : all) {
    if (host.size() > 1) most = std::max(most, roundedUpRatio(ranks - host.size(), 2));
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
  const size_t own = all_.size(), pushed = mostPushed(all_), fetched = mostFetched(all_);
  arePushed_ = fits(own + pushed + fetched);
  areShared_ = fits(own + fetched);
  fetchedAt_ = own + (arePushed_ ? pushed : 0);
  ownEnd_ = areShared_ ? own * rowsBytes_ : hosts.leastSendBytes();
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
  if (!arePushed_) return std::nullopt;
  const auto [by, index] = place(source, hostWith(all_, host.front()), all_);
  if (!std::ranges::binary_search(host, by)) return std::nullopt;
  return Place{by, (all_.size() + index) * rowsBytes_};
}

}  // namespace mooncake::ep
