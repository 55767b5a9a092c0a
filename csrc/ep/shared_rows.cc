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

SharedRows::SharedRows(const Hosts& hosts, const std::vector<int>& ranks, size_t rowsBytes,
                       size_t mostInlineRows)
    : hosts_(hosts.split(ranks)),
      numRanks_(ranks.size()),
      rowsBytes_(rowsBytes),
      mostInlineRows_(mostInlineRows) {
  for (const auto& host : hosts_) {
    const size_t sources = numRanks_ - host.size();
    const size_t fetched = (sources + host.size() - 1) / host.size();
    isRoomy_ &= (hosts_.size() + fetched) * rowsBytes_ <= hosts.leastSendBytes();
  }
}

const std::vector<int>& SharedRows::hostOf(int rank) const {
  return *std::ranges::find_if(
      hosts_, [&](const auto& host) { return std::ranges::binary_search(host, rank); });
}

// The sources of other hosts go round the ranks of this one.
SharedRows::Fetch SharedRows::fetch(int source, const std::vector<int>& host) const {
  size_t index = 0;
  for (const auto& other : hosts_) {
    if (&other == &host || other.front() == host.front()) continue;
    index += size_t(std::ranges::count_if(other, [&](int r) { return r < source; }));
  }
  return {host[index % host.size()], (hosts_.size() + index / host.size()) * rowsBytes_};
}

}  // namespace mooncake::ep
