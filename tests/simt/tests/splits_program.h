#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/all_to_all.cuh"
#include "virtual_group.h"

namespace mooncake::kernels {

// The draw of one seed. Segments have any number of bytes, and most inputs take several exchanges.
struct SplitCase {
  SplitCase(uint64_t seed, int ranks, bool hasMisfits);
  unsigned draw(unsigned below) {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return unsigned(random % below);
  }

  struct Round {
    bool isShared;                                    // all receivers get the same segment
    std::vector<std::vector<size_t>> sent, expected;  // [from][to]
  };
  const Round& round(uint32_t number) const { return rounds[number - 1]; }

  int ranks;
  uint64_t random;
  unsigned blocks, threads;
  size_t bankBytes;
  size_t shift, gap;  // bytes before the first segment of a tensor, and between two
  std::vector<Round> rounds;
};

// A program of a virtual group: in each round an all_to_all with other splits, on all ranks.
class SplitProgram {
 public:
  SplitProgram(simt::World& world, VirtualGroup& group, const SplitCase& with);

  // Compares the results of living ranks with those of the contributors that the hosts agreed on.
  void check();
  unsigned misfits() const { return misfits_; }  // calls of living ranks that had no result

 private:
  struct Tensors {
    std::vector<unsigned char> input, output;
    AllToAllArguments arguments{};
  };

  void call(uint32_t number, int rank);
  bool doFit(const SplitCase::Round& round, uint64_t from) const;
  void checkRound(uint32_t number, int rank);
  void checkMisfit(uint32_t number, int rank, uint64_t from);

  VirtualGroup& group_;
  const SplitCase case_;
  std::vector<std::vector<Tensors>> tensors_;
  std::vector<uint32_t> told_;  // misfits that the check has found, by rank
  unsigned misfits_ = 0;
};

}  // namespace mooncake::kernels
