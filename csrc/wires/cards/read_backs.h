#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "wires/cards/card_transfer.h"

namespace mooncake {

// Pieces of writes to memory of kReadBack that cards have reported. A piece has ended once the card
// has read from that memory: a read does not pass the writes before it on their way to the device.
// At most one read is under way on each path, and it stands for all pieces that were reported before
// it began. Under the channel's lock.
class ReadBacks {
 public:
  static constexpr uint64_t kMostBytes = 8;  // of a read

  explicit ReadBacks(size_t paths) : paths_(paths) {}

  // Adds a piece that its card has reported.
  void add(const CardPiece& piece) { paths_[piece.path].reported.push_back(piece); }
  // Begins the next read, if there is one. Returns one of its pieces, whose end is to be read.
  std::optional<CardPiece> next() {
    for (Path& path : paths_) {
      if (!path.covered.empty() || path.reported.empty()) continue;
      path.covered.swap(path.reported);
      return path.covered.back();
    }
    return std::nullopt;
  }
  // The read of this path has ended. Returns its pieces.
  std::vector<CardPiece> end(size_t path) { return std::exchange(paths_[path].covered, {}); }
  // Returns the pieces that no read covers yet, and forgets them.
  std::vector<CardPiece> takeReported() {
    std::vector<CardPiece> taken;
    for (Path& path : paths_) {
      taken.insert(taken.end(), path.reported.begin(), path.reported.end());
      path.reported.clear();
    }
    return taken;
  }
  // Drops pieces that no read covers yet and for which `isDropped(piece)` holds.
  template <typename IsDropped>
  void dropReported(const IsDropped& isDropped) {
    for (Path& path : paths_) std::erase_if(path.reported, isDropped);
  }

 private:
  struct Path {
    std::vector<CardPiece> reported;  // wait for a read
    std::vector<CardPiece> covered;   // by the read under way; empty: there is none
  };
  std::vector<Path> paths_;
};

}  // namespace mooncake
