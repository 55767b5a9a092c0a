#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"
#include "collectives/input_feed.h"
#include "group/call.h"
#include "group/group.h"

namespace mooncake {

// The way of a call after a rank was lost between two of its pieces, so that it has one set of
// contributors.
enum class OnLoss {
  kGoOn,               // the data come from the root alone, and each piece needs the root
  kRunAgain,           // all pieces run again
  kRestoreAndRunAgain  // the same, after the pieces have changed the input
};

// Runs an operation on input that comes meanwhile, in pieces of `pieceBytes` of the `partBytes` of
// each part. `run` runs each piece as an operation of its own, with the given call. Every survivor
// comes to the same conclusions, because all agree on the contributors of each piece. kMoved: the
// last piece has ended the group's series, and the pieces have to run again in the successor.
using RunPiece = std::function<Status(const Call& call, size_t begin, size_t bytes)>;
Status runFed(Group& group, Call call, InputFeed& feed, size_t partBytes, size_t pieceBytes,
              OnLoss onLoss, const RunPiece& run);

// The same place in each of several buffers; shorter ones end earlier. None if there are no buffers.
template <typename Byte>
std::vector<std::span<Byte>> pieceOf(std::span<const std::span<Byte>> all, size_t begin,
                                     size_t bytes) {
  std::vector<std::span<Byte>> piece;
  for (const std::span<Byte> one : all) {
    const std::span<Byte> rest = one.subspan(std::min(begin, one.size()));
    piece.push_back(rest.first(std::min(bytes, rest.size())));
  }
  return piece;
}

}  // namespace mooncake
