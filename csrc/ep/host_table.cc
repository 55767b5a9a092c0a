#include "ep/host_table.h"

#include <algorithm>

namespace mooncake::ep {

HostTable::HostTable(std::vector<std::vector<int>> hosts) : hosts_(std::move(hosts)) {
  int end = 0;
  for (const auto& host : hosts_) end = std::max(end, host.empty() ? 0 : host.back() + 1);
  indices_.assign(size_t(end), kNoHost);
  for (size_t h = 0; h < hosts_.size(); ++h) {
    for (const int r : hosts_[h]) indices_[size_t(r)] = int(h);
  }
  below_.reserve(indices_.size() + 1);
  below_.push_back(0);
  for (const int host : indices_) below_.push_back(below_.back() + (host != kNoHost));
}

size_t HostTable::countBelow(int rank, size_t host) const {
  const auto& ranks = hosts_[host];
  const auto own = size_t(std::ranges::lower_bound(ranks, rank) - ranks.begin());
  return below_[std::min(size_t(rank), indices_.size())] - own;
}

}  // namespace mooncake::ep
