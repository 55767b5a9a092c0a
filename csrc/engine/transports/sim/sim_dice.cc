#include "engine/transports/sim/sim_dice.h"

#include <algorithm>
#include <utility>

namespace mooncake {

std::chrono::microseconds SimDice::delay() {
  const uint64_t how = below(10);
  if (how < 6) return {};
  return std::chrono::microseconds(below(how < 9 ? 200 : kMostDelay.count()));
}

std::vector<SimDice::Piece> SimDice::cut(uint64_t bytes) {
  std::vector<Piece> pieces;
  const bool isWhole = bytes <= kMostPiece && below(2) == 0;
  for (uint64_t position = 0; position < bytes || pieces.empty();) {
    const uint64_t most = std::min(bytes - position, kMostPiece);
    const uint64_t piece = isWhole || most == 0 ? most : 1 + below(most);
    pieces.push_back({.position = position, .bytes = piece});
    position += piece;
  }
  // Half of the transfers arrive at once: the others overtake each other around them.
  const bool isPrompt = below(2) == 0;
  for (size_t i = pieces.size(); i > 0; --i) {
    std::swap(pieces[i - 1], pieces[below(i)]);
    if (!isPrompt) pieces[i - 1].delay = delay();
  }
  return pieces;
}

}  // namespace mooncake
