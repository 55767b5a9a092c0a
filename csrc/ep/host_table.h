#pragma once

#include <cstddef>
#include <vector>

namespace mooncake::ep {

// Ranks of a group by host. Finds the host of a rank, and counts ranks, without a search.
class HostTable {
 public:
  HostTable() = default;
  // `hosts` holds the ranks of each host, ascending. Each rank is on one host at most.
  explicit HostTable(std::vector<std::vector<int>> hosts);

  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  size_t size() const { return hosts_.size(); }
  // The index in hosts() of the rank's host; kNoHost if no host has the rank.
  int indexOf(int rank) const {
    return size_t(rank) < indices_.size() ? indices_[size_t(rank)] : kNoHost;
  }
  // The host of a rank that is on one.
  const std::vector<int>& hostOf(int rank) const { return hosts_[size_t(indexOf(rank))]; }
  // Number of ranks below `rank` on hosts other than `host`.
  size_t countBelow(int rank, size_t host) const;

  static constexpr int kNoHost = -1;

 private:
  std::vector<std::vector<int>> hosts_;
  std::vector<int> indices_;   // by rank
  std::vector<size_t> below_;  // by rank: number of ranks below it, on all hosts; one entry more
};

}  // namespace mooncake::ep
