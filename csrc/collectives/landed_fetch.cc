#include "collectives/landed_fetch.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "group/fetches.h"

namespace mooncake {
namespace {

constexpr size_t kPiece = 512 << 10;
constexpr size_t kDepth = 8;  // pieces in flight: enough for four cards, and for a round trip

// Takes the ranks in turn, so that no rank waits for all pieces of another.
std::vector<Wanted> piecesOf(std::span<const Wanted> wanted) {
  std::vector<Wanted> pieces;
  for (size_t start = 0, left = 1; left > 0; start += kPiece) {
    left = 0;
    for (const auto& [rank, region, offset, target] : wanted) {
      if (start >= target.size()) continue;
      const auto part = target.subspan(start, std::min(kPiece, target.size() - start));
      pieces.push_back({rank, region, offset + start, part});
      left += target.size() - start - part.size();
    }
  }
  return pieces;
}

}  // namespace

Status fetchLanded(Operation& op, std::span<const Wanted> wanted,
                   const std::function<void()>& whileFetching) {
  Fetches direct(op);
  std::vector<Wanted> byCards;
  for (const Wanted& one : wanted) {
    if (op.group().window().hasCards(one.rank)) {
      byCards.push_back(one);
    } else {
      MOONCAKE_TRY(direct.start(one.rank, one.region, one.offset, one.target));
    }
  }
  const std::vector<Wanted> pieces = piecesOf(byCards);
  const size_t depth = std::min(kDepth, pieces.size());
  auto scratch = op.group().scratch(depth * kPiece);
  if (!scratch.ok()) return scratch.error();
  std::deque<Fetches> underWay;
  const auto landing = [&](size_t index) {
    return std::span(*scratch + index % depth * kPiece, pieces[index].target.size());
  };
  const auto start = [&](size_t index) -> Status {
    const auto& [rank, region, offset, target] = pieces[index];
    return underWay.emplace_back(op).start(rank, region, offset, landing(index));
  };
  for (size_t index = 0; index < depth; ++index) MOONCAKE_TRY(start(index));
  whileFetching();
  for (size_t index = 0; index < pieces.size(); ++index) {
    MOONCAKE_TRY(op.goOn());
    MOONCAKE_TRY(underWay.front().await());
    underWay.pop_front();
    std::memcpy(pieces[index].target.data(), landing(index).data(), landing(index).size());
    if (index + depth < pieces.size()) MOONCAKE_TRY(start(index + depth));
  }
  return direct.await();
}

}  // namespace mooncake
