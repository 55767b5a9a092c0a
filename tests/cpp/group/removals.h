#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "draw.h"

namespace mooncake::test {

// Ranks that are taken out of a group by plan, in a turn of a sweep.
struct Removal {
  uint64_t turn = 0;
  uint32_t callers = 0, leavers = 0;  // a bit per rank
  bool isBeside = false;     // callers that stay call it on another thread, while operations go on
  bool saysGoodbye = false;  // the leavers' processes end, else they come back
  std::chrono::milliseconds away{0};  // how long they stay away
};

inline std::vector<int> ranksIn(uint32_t bits) {
  std::vector<int> ranks;
  for (; bits != 0; bits &= bits - 1) ranks.push_back(std::countr_zero(bits));
  return ranks;
}

// Removals of some ranks of a group of `size`, by turn. Three ranks are never taken out: two of
// these may be lost.
inline std::vector<Removal> drawRemovals(Draw& draw, int size) {
  uint32_t some = 0;
  while (std::popcount(some) < size - 3) some |= 1u << draw.below(size);
  const auto all = (1u << size) - 1;
  const auto oneOf = [&](uint32_t bits) {
    const auto ranks = ranksIn(bits);
    return 1u << ranks[size_t(draw.below(int(ranks.size())))];
  };
  std::vector<Removal> removals;
  const int count = 1 + draw.below(3);
  for (int i = 0; i < count; ++i) {
    Removal one;
    one.turn = i > 0 && draw.chance(40) ? removals.back().turn : 4 + uint64_t(draw.below(70));
    one.leavers = draw.chance(30) ? some : oneOf(some);
    switch (draw.below(5)) {
      case 0:
        one.callers = all;
        break;
      case 1:
        one.callers = oneOf(some);
        break;
      case 2:
        one.callers = oneOf(all & ~some) | oneOf(all);
        break;
      case 3:
        one.callers = oneOf(all & ~some);
        break;
      case 4:
        one.callers = one.leavers;
        break;
    }
    one.isBeside = draw.chance(50);
    one.saysGoodbye = draw.chance(25);
    one.away = std::chrono::milliseconds(draw.chance(50) ? 0 : draw.below(100));
    removals.push_back(one);
  }
  std::ranges::stable_sort(removals, {}, &Removal::turn);
  return removals;
}

inline std::string describe(const Removal& one) {
  std::ostringstream text;
  text << " before turn " << one.turn << " ranks " << std::hex << one.callers << " take "
       << one.leavers << std::dec << " out" << (one.isBeside ? ", beside operations" : "") << ", "
       << (one.saysGoodbye ? "goodbye" : "back after " + std::to_string(one.away.count()) + " ms")
       << ';';
  return text.str();
}

}  // namespace mooncake::test
