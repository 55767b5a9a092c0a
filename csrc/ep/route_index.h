#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ep/host_table.h"
#include "ep/routing.h"

namespace mooncake::ep {

// The place in `hosts` of each expert's owner; HostTable::kNoHost where the owner is not listed.
std::vector<int> hostsOfExperts(const ExpertMap& experts, const HostTable& hosts);

// The routing tables of all ranks, as one rank needs them in one attempt at a dispatch. Each table
// is read once: time is linear in its entries, for any number of ranks and hosts.
class RouteIndex {
 public:
  // An entry of a table that names an expert of this rank. Rows may be packed: then only the tokens
  // for a host, or for a rank, have a row.
  struct Choice {
    uint32_t token;
    uint32_t expert;  // local
    uint32_t inHost;  // index of the row among the rows packed for this rank's host
    uint32_t inRank;  // index of the row among the rows packed for this rank
  };

  // `hosts` holds the ranks of the attempt and must outlive this object. Null: rows are not packed
  // for any host, so `inHost` is unset and tokensFor() must not be called.
  RouteIndex(const ExpertMap& experts, const HostTable* hosts, int rank);

  // Reads the table of the rank `from`: experts by [token][topk].
  void read(int from, std::span<const int32_t> chosen, size_t topk);
  // Number of tokens that name an expert of the host, in the table that was read last.
  uint32_t tokensFor(size_t host) const { return cells_[host].tokens; }
  // The choices of a table that was read, in its order. Valid until the next read().
  std::span<const Choice> choicesOf(int from) const;

 private:
  struct Owner {
    uint32_t cell;  // cell of its host; the last cell: no host
    int32_t local;  // index among the experts of this rank; negative: another rank's
  };
  struct Cell {
    uint32_t lastToken;  // counted from 1
    uint32_t tokens;
  };
  struct Range {
    size_t begin = 0;
    size_t end = 0;
  };

  template <bool kCountsHosts>
  void readTable(std::span<const int32_t> chosen, size_t topk);

  std::vector<Owner> owners_;  // by expert + 1; the first one: no expert
  std::vector<Cell> cells_;    // by host, and one for no host
  size_t ourCell_ = 0;
  std::vector<Choice> choices_;
  std::vector<Range> ranges_;  // in choices_, by rank
};

}  // namespace mooncake::ep
