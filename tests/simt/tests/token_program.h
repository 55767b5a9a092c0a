#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "token_plan.h"
#include "virtual_group.h"

namespace mooncake::kernels {

// A program of a virtual group: the operations of a plan, each by one kernel.
class TokenProgram {
 public:
  TokenProgram(simt::World& world, VirtualGroup& group, const TokenPlan& plan);

  // Compares the results of living ranks with those of the contributors that the hosts agreed on.
  void check();
  // Of living ranks: tokens that lack a contribution, and places of rows that have not come again.
  unsigned missing() const { return missing_; }
  unsigned gone() const { return gone_; }

 private:
  // Tensors of a rank in one round.
  struct Tensors {
    std::vector<Choice> choices;
    std::vector<int32_t> counts;
    std::vector<std::vector<unsigned char>> from, to;  // by field
    std::vector<int32_t> sources, ends, table;
    Dispatched dispatched;
    std::vector<uint16_t> x, sums;
    std::vector<uint16_t> biases[kMostBiases];
    std::vector<float> weights, weightSums;
    std::vector<unsigned char> missing;
    TokenMask mask;
  };

  Tensors& tensors(size_t round, int rank) { return of_[size_t(rank)][round]; }
  static size_t handleOf(const TokenRound& round, int rank) {
    return round.otherHandle.first == rank ? round.otherHandle.second : round.handle;
  }
  void makeDispatch(simt::World& world, const TokenRound& round, int rank);
  void makeCombine(simt::World& world, const TokenRound& round, int rank);
  TokenCall callOf(const TokenRound& round, int rank, size_t rowBytes);
  void callDispatch(const TokenRound& round, int rank);
  void callCombine(const TokenRound& round, int rank);
  // Bytes by which a field's tensors miss their alignment.
  size_t shiftOf(size_t field) const { return plan_.shift * (field + 1); }
  uint64_t numberOf(const TokenRound& round) const { return group_.ended() + 1 + round.number; }
  uint64_t ofDispatch(const TokenRound& round,
                      int rank) const;  // the ranks that take part in the handle's
  uint64_t ofRound(const TokenRound& round, int rank) const;
  void checkMask(const TokenRound& round, int rank);
  void checkRows(const TokenRound& round, int rank);
  void checkFacts(const TokenRound& round, int rank);
  void checkCombine(const TokenRound& round, int rank);

  VirtualGroup& group_;
  const TokenPlan& plan_;
  const RowPool pool_;
  std::vector<std::deque<Tensors>> of_;  // by rank and round
  unsigned missing_ = 0, gone_ = 0;
};

}  // namespace mooncake::kernels
