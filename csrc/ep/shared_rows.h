#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ep/host_table.h"
#include "ep/hosts.h"

namespace mooncake::ep {

// Layout of the send memory of a dispatch. Rows that several ranks of another host need cross to
// that host once: one of its ranks gets them, and its other ranks read them there. Every rank
// computes the same layout from facts that all ranks know, so no rank asks:
//
//   own rows | packed rows, for each other host | pushed rows | fetched rows
//
// The last two have a place for each source that comes to this rank. A place has room for the most
// tokens of a rank. The boundaries depend on the hosts of the buffer alone, never on the ranks of
// an attempt, and hold for every subset of the ranks. Otherwise a rank that has lost its neighbours
// would pack its own rows over places to which sources push.
class SharedRows {
 public:
  // `ranks` take part in the attempt. `rowsBytes` is the size of the most tokens of a rank. Up to
  // `mostInlineRows` rows go to each rank separately.
  SharedRows(const Hosts& hosts, const std::vector<int>& ranks, size_t rowsBytes,
             size_t mostInlineRows);

  // Number of places, each of the most tokens of a rank, that a dispatch can use at most.
  static size_t mostPlaces(const Hosts& hosts);

  // The ranks of the attempt.
  const HostTable& table() const { return *table_; }
  const std::vector<std::vector<int>>& hosts() const { return table_->hosts(); }
  const std::vector<int>& hostOf(int rank) const { return table_->hostOf(rank); }
  // True if the ranks of `host` share this many rows of a rank of another host.
  bool isShared(const std::vector<int>& host, size_t rows) const {
    return areShared_ && host.size() > 1 && rows > mostInlineRows_;
  }
  struct Place {
    int by = 0;         // the rank that gets the rows
    size_t offset = 0;  // in its send memory
  };
  // End of the own and packed rows, in bytes: a rank packs no row behind it.
  size_t ownEnd() const { return ownEnd_; }
  // True if one place for each other host is room enough in every attempt. Otherwise rows are
  // packed for each rank separately, as long as there is room.
  bool isPackingBounded() const { return areShared_; }
  // The rank of `host` that fetches the rows of `source`, a rank of another host, and their place.
  Place fetched(int source, const std::vector<int>& host) const;
  // Returns the place to which the source puts them before a rank of that host asks. The source
  // does not know yet whether all other ranks have given up the attempt before, so it has the same
  // place in every attempt. Otherwise a late put of one source overwrites the rows of another. A
  // later operation may use the place for anything: see csrc/ep/given_rows.h. Returns none if there
  // is no room, or if that rank takes no part.
  std::optional<Place> pushed(int source, const std::vector<int>& host) const;

 private:
  static Place place(int source, int hostMember, const HostTable& table);

  const std::shared_ptr<const HostTable> all_;  // also with the ranks that take no part
  const std::shared_ptr<const HostTable> table_;
  size_t rowsBytes_;
  size_t mostInlineRows_;
  size_t fetchedAt_ = 0;  // index of the first place for fetched rows
  size_t ownEnd_ = 0;
  bool areShared_ = false;
  bool arePushed_ = false;
};

}  // namespace mooncake::ep
