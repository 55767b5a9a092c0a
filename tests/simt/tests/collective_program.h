#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "virtual_group.h"

namespace mooncake::kernels {

// The draw of one seed. Tensors are large enough for several blocks, seldom a multiple of 16 bytes,
// and may begin at an odd element.
struct Case {
  Case(uint64_t seed, int ranks) : ranks(ranks), random(seed * 77 + 13) {
    blocks = 1 + draw(3);
    threads = 32u << draw(2);
    count = draw(5) == 0 ? draw(3) : 1 + draw(400);
    shift = draw(3) == 0 ? 1 : 0;
    gap = draw(2) == 0 ? 3 : 0;
    if (draw(2) == 0) {
      piece = 4 << draw(6);
      count = count % (6 * piece);
    }
    rounds = 2 + draw(4);
  }
  unsigned draw(unsigned below) {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return unsigned(random % below);
  }

  int ranks;
  uint64_t random;
  unsigned blocks, threads;
  size_t count, shift;
  size_t gap;        // elements between the tensors of a list; 0: they are one tensor
  size_t piece = 0;  // elements of a tensor that are exchanged at once; 0: all
  uint32_t rounds;

  bool hasPieces() const { return piece && count > piece; }
};

enum class Verb {
  kAllReduce,
  kAllReduceInPlace,
  kTwoShot,  // all_reduce
  kTwoShotInPlace,
  kReduceScatter,
  kReduce,
  kAllGather,
  kGather,
  kAllToAll,
  kBroadcast,
  kScatter,
};
constexpr Verb kVerbs[] = {Verb::kAllReduce,      Verb::kAllReduceInPlace, Verb::kTwoShot,
                           Verb::kTwoShotInPlace, Verb::kReduceScatter,    Verb::kReduce,
                           Verb::kAllGather,      Verb::kGather,           Verb::kAllToAll,
                           Verb::kBroadcast,      Verb::kScatter};

constexpr bool isTwoShot(Verb verb) {
  return verb == Verb::kTwoShot || verb == Verb::kTwoShotInPlace;
}

// The input has a part for each rank.
constexpr bool hasParts(Verb verb) {
  return verb == Verb::kReduceScatter || verb == Verb::kAllToAll || verb == Verb::kScatter;
}
// Only the root reads the inputs.
constexpr bool hasReader(Verb verb) { return verb == Verb::kReduce || verb == Verb::kGather; }

// A program of a virtual group: in each round another verb, on all ranks.
class Program {
 public:
  Program(simt::World& world, VirtualGroup& group, const Case& with, std::optional<Verb> only = {});

  // Compares the results of living ranks with those of the contributors that the hosts agreed on. Of
  // evicted ones, those without an error.
  void check();
  // Calls of living ranks that have lost their root.
  unsigned withoutRoot() const { return withoutRoot_; }
  // Tensors of `count` elements that a rank gives and gets in the first round.
  size_t inputs(int rank) const { return tensors_[0][size_t(rank)].inputs; }
  size_t outputs(int rank) const { return tensors_[0][size_t(rank)].outputs; }

 private:
  // Tensors of one call of a rank.
  struct Tensors {
    std::vector<int32_t> input, output, scratch;
    size_t inputs = 0, outputs = 0;  // tensors of the lists
  };

  void call(uint32_t round, int rank);
  Exchange exchangeOf(Verb verb, uint32_t round, Tensors& mine) const;
  void checkRound(uint32_t round, int rank, uint64_t from);
  int32_t expected(uint32_t round, int rank, size_t place, size_t i, uint64_t from) const;
  int rootOf(uint32_t round) const { return int(round) % case_.ranks; }
  // Where tensor `i` of a list begins.
  size_t place(size_t i) const { return case_.shift + i * (case_.count + case_.gap); }

  VirtualGroup& group_;
  const Case case_;
  std::vector<Verb> verbs_;
  std::vector<std::vector<Tensors>> tensors_;
  unsigned withoutRoot_ = 0;
};

}  // namespace mooncake::kernels
