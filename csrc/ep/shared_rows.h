#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ep/hosts.h"
#include "ep/routing.h"

namespace mooncake::ep {

// Which tokens name an expert of one of these ranks, ascending.
std::vector<uint32_t> tokensFor(std::span<const int32_t> chosen, size_t topk,
                                const ExpertMap& experts, std::span<const int> ranks);

// Rows of a dispatch that cross to another host once for all of its ranks: who fetches them, and
// to where in its send memory. Follows from what all ranks know, so nobody asks:
//
//   own rows | packed rows, for each other host | fetched rows, for each source of this rank's
//
// Each part has room for the most tokens of a rank.
class SharedRows {
 public:
  // `ranks` take part in the attempt, `rowsBytes` is of the most tokens of a rank, and up to
  // `mostInlineRows` go to each rank by themselves.
  SharedRows(const Hosts& hosts, const std::vector<int>& ranks, size_t rowsBytes,
             size_t mostInlineRows);

  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  const std::vector<int>& hostOf(int rank) const;
  // So many rows of a rank of another host.
  bool isShared(const std::vector<int>& host, size_t rows) const {
    return isRoomy_ && host.size() > 1 && rows > mostInlineRows_;
  }
  struct Fetch {
    int by = 0;
    size_t offset = 0;  // in its send memory
  };
  // `source` is of another host.
  Fetch fetch(int source, const std::vector<int>& host) const;

 private:
  std::vector<std::vector<int>> hosts_;
  size_t numRanks_ = 0;
  size_t rowsBytes_;
  size_t mostInlineRows_;
  bool isRoomy_ = true;
};

}  // namespace mooncake::ep
