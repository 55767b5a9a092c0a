#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ep/hosts.h"
#include "ep/routing.h"

namespace mooncake::ep {

// Which tokens name an expert of one of these ranks, ascending.
std::vector<uint32_t> tokensFor(std::span<const int32_t> chosen, size_t topk,
                                const ExpertMap& experts, std::span<const int> ranks);

// Layout of the send memory of a dispatch. Rows that several ranks of another host need cross to
// that host once: one of its ranks gets them, and the others read them there. Every rank computes
// the same layout from facts that all ranks know, so no rank asks:
//
//   own rows | packed rows, for each other host | pushed rows | fetched rows
//
// The last two have a place for each source that comes to this rank. A place has room for the most
// tokens of a rank. The boundaries depend on the hosts of the buffer alone, never on the ranks of
// an attempt, and hold for every subset of the ranks. Otherwise a rank that has lost its neighbours
// would pack its own rows over places to which sources push.
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
    return areShared_ && host.size() > 1 && rows > mostInlineRows_;
  }
  struct Place {
    int by = 0;         // the rank that has them
    size_t offset = 0;  // in its send memory
  };
  // End of the own and packed rows, in bytes: a rank packs no row behind it.
  size_t ownEnd() const { return ownEnd_; }
  // Whether one place for each other host is room enough in every attempt. If not, rows are packed
  // for each rank by itself, as long as there is room.
  bool isPackingBounded() const { return areShared_; }
  // Who fetches them. `source` is of another host.
  Place fetched(int source, const std::vector<int>& host) const;
  // Where the source puts them before anybody asks: before it knows that the others have given up
  // the attempt before. So in every attempt the same place, or what another source put there for
  // that attempt, and is still on its way, would come upon its rows. Nothing else ever stands
  // there. None: there is no room, or that rank takes no part.
  std::optional<Place> pushed(int source, const std::vector<int>& host) const;

 private:
  using HostList = std::vector<std::vector<int>>;
  static Place place(int source, const std::vector<int>& host, const HostList& hosts);

  HostList hosts_;
  const HostList all_;  // with the ranks that take no part
  size_t rowsBytes_;
  size_t mostInlineRows_;
  size_t fetchedAt_ = 0;  // in places
  size_t ownEnd_ = 0;
  bool areShared_ = false;
  bool arePushed_ = false;
};

}  // namespace mooncake::ep
