#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "ep_plan.h"
#include "virtual_group.h"

namespace mooncake::kernels {

// A program of a virtual group: in each round a dispatch, the experts' answers, and a combine.
class EpProgram {
 public:
  EpProgram(simt::World& world, VirtualGroup& group, const EpPlan& plan);

  // Compares the results of living ranks with those of the contributors that the hosts agreed on. Of
  // evicted ones, those without an error.
  void check();
  // Tokens of living ranks that lack a contribution, and combines that lack a rank of the dispatch.
  unsigned missing() const { return missing_; }
  unsigned lostBetween() const { return lostBetween_; }
  // Operations of living ranks that were skipped in them.
  unsigned skipped() const { return skipped_; }
  const RowPool& pool() const { return pool_; }
  // Microseconds that a rank waited for another, in all rounds.
  int64_t waited(int rank, int peer) const {
    return of_[size_t(rank)].waits[size_t(peer)] - kWaitsBefore;
  }

 private:
  static constexpr int64_t kWaitsBefore = 1000;

  // Tensors of a rank in one round.
  struct Tensors {
    std::vector<int32_t> narrow[2];  // choices of the dispatch and of the combine
    std::vector<uint16_t> x, answers, combined;
    std::vector<Choice> choices;
    std::vector<unsigned char> rows, missing;
    std::vector<uint32_t> scales;
    std::vector<int32_t> counts, keptCounts, sources;
    std::vector<int64_t> ranges, keptRanges;
    Dispatched dispatched;
    EpMask mask, combineMask;
  };
  // Memory of a rank for all rounds.
  struct Rank {
    std::vector<Expert> experts;
    std::vector<int32_t> mine, added;
    std::vector<int64_t> waits;
    std::deque<Tensors> rounds;
  };

  Tensors& tensors(const EpRound& round, int rank) {
    return of_[size_t(rank)].rounds[round.number - 1];
  }
  void make(simt::World& world, const EpRound& round, int rank);
  void callDelay(const EpRound& round, int rank, unsigned operation);
  void callDispatch(const EpRound& round, int rank);
  void callExperts(const EpRound& round, int rank);
  void callCombine(const EpRound& round, int rank);
  ExpertCall callOf(int rank, uint32_t hash, size_t rowBytes) const;
  Mask maskOf(EpMask& mask) {
    return {&mask.buffer, mask.ranks.empty() ? nullptr : mask.ranks.data()};
  }
  uint64_t dispatchNumber(const EpRound& round) const;
  // The ranks that take part in the dispatch, for the rank's result.
  uint64_t ofDispatch(const EpRound& round, int rank) const;
  unsigned char* answersOf(const EpRound& round, int rank);
  void checkDispatch(const EpRound& round, int rank, std::vector<int32_t>& added);
  void checkSkipped(const EpMask& before, const EpMask& after, int rank);
  void checkRows(const EpRound& round, int rank, size_t local, const std::vector<Route>& routes);
  void checkCombine(const EpRound& round, int rank);
  void checkMask(const EpMask& before, const EpMask& after, uint64_t participants) const;

  VirtualGroup& group_;
  const EpPlan& plan_;
  const EpShape& shape_;
  const RowPool pool_;
  std::vector<Rank> of_;
  unsigned missing_ = 0, lostBetween_ = 0, skipped_ = 0;
};

}  // namespace mooncake::kernels
