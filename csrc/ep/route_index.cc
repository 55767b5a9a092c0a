#include "ep/route_index.h"

#include <algorithm>

namespace mooncake::ep {

std::vector<int> hostsOfExperts(const ExpertMap& experts, const HostTable& hosts) {
  std::vector<int> places;
  places.reserve(experts.owners().size());
  for (const int owner : experts.owners()) places.push_back(hosts.indexOf(owner));
  return places;
}

RouteIndex::RouteIndex(const ExpertMap& experts, const HostTable* hosts, int rank) {
  const size_t numHosts = hosts ? hosts->size() : 0;
  const auto nowhere = uint32_t(numHosts);
  const auto cellOf = [&](int owner) {
    const int host = hosts ? hosts->indexOf(owner) : HostTable::kNoHost;
    return host == HostTable::kNoHost ? nowhere : uint32_t(host);
  };
  owners_.reserve(experts.owners().size() + 1);
  owners_.push_back({nowhere, -1});
  for (int e = 0; e < experts.numExperts(); ++e) {
    const int owner = experts.owner(e);
    owners_.push_back({cellOf(owner), owner == rank ? experts.local(e) : -1});
  }
  if (hosts) cells_.resize(numHosts + 1);
  ourCell_ = cellOf(rank);
}

void RouteIndex::read(int from, std::span<const int32_t> chosen, size_t topk) {
  if (ranges_.size() <= size_t(from)) ranges_.resize(size_t(from) + 1);
  const size_t begin = choices_.size();
  if (cells_.empty()) {
    readTable<false>(chosen, topk);
  } else {
    std::ranges::fill(cells_, Cell{});
    readTable<true>(chosen, topk);
  }
  ranges_[size_t(from)] = {begin, choices_.size()};
}

// Most entries are for other ranks. So hosts are counted without a branch, and the branch that is
// left is predicted.
template <bool kCountsHosts>
void RouteIndex::readTable(std::span<const int32_t> chosen, size_t topk) {
  uint32_t ours = 0, lastOfOurs = 0;  // tokens for this rank, and the last one, counted from 1
  const Owner* const owners = owners_.data();
  Cell* const cells = cells_.data();
  for (size_t i = 0, t = 1; i < chosen.size(); i += topk, ++t) {
    const auto token = uint32_t(t);
    for (size_t j = 0; j < topk; ++j) {
      const auto [cell, local] = owners[size_t(chosen[i + j] + 1)];
      if constexpr (kCountsHosts) {
        Cell& host = cells[cell];
        host.tokens += host.lastToken != token;
        host.lastToken = token;
      }
      if (local < 0) continue;
      ours += lastOfOurs != token;
      lastOfOurs = token;
      const uint32_t inHost = kCountsHosts ? cells[ourCell_].tokens - 1 : 0;
      choices_.push_back({token - 1, uint32_t(local), inHost, ours - 1});
    }
  }
}

std::span<const RouteIndex::Choice> RouteIndex::choicesOf(int from) const {
  const auto [begin, end] = ranges_[size_t(from)];
  return std::span(choices_).subspan(begin, end - begin);
}

}  // namespace mooncake::ep
