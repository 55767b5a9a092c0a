#pragma once

#include <optional>
#include <vector>

#include "base/bytes.h"
#include "wires/cards/rails.h"

namespace mooncake {

// The cards of one peer, and their entries in the address tables of our cards. Path i leads from
// our card i to card i modulo n of the peer's n cards. Under the channel's lock.
class PeerCards {
 public:
  explicit PeerCards(Rails& rails) : rails_(rails) {}

  // Sets the addresses that the peer has announced, at least one.
  void open(std::vector<Bytes> addresses);
  // Gives all entries back. They are made again when they are needed.
  void release();

  size_t count() const { return addresses_.size(); }
  // Returns which of the peer's cards this path leads to. After open().
  size_t cardOf(size_t path) const { return path % addresses_.size(); }
  // Returns the entry of this path's card, which is made at its first use. None: our card is
  // closed, or does not take the address.
  std::optional<RailPeer> at(size_t path);
  // Our card of this path was opened anew, and has no entries.
  void forget(size_t path);
  // The peer's card has another address. Returns the paths that lead there.
  std::vector<size_t> move(size_t card, const Bytes& address);

 private:
  Rails& rails_;
  std::vector<Bytes> addresses_;                  // by card of the peer
  std::vector<std::optional<RailPeer>> entries_;  // by path
};

}  // namespace mooncake
