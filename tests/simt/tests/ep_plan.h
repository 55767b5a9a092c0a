#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "ep_reference.h"

namespace mooncake::kernels {

// Bytes of a row in published memory, of a dispatch and of a combine.
size_t sentBytes(RowKind kind, size_t hidden);
size_t answerBytes(bool usesLogfmt, size_t hidden);

// The draw of one seed: the inputs of all ranks in each round.
struct EpPlan {
  EpPlan(uint64_t seed, int ranks);

  unsigned draw(unsigned below) { return unsigned(random() % below); }
  bool drawOneIn(unsigned count) { return draw(count) == 0; }
  // The published memory that the operations need, and that of a rank in the inbox of a remote one.
  size_t bankBytes(bool ofInbox = false) const;

  std::mt19937_64 random;
  EpShape shape;
  unsigned blocks, threads;
  size_t shift;           // channels by which tensors miss their alignment
  bool combines = true;   // false: there are dispatches only
  bool counts, measures;  // calls with added counts, and with waits
  // A rank's stream is busy before a dispatch (of a round's two operations, 0) or its combine (1).
  struct Late {
    int rank;
    uint32_t round;
    unsigned operation;
    uint64_t ns;
  };
  void drawLates();
  uint64_t lateNs(int rank, uint32_t round, unsigned operation) const;
  std::vector<Late> lates = {};
  std::vector<EpRound> rounds;

 private:
  EpInputs drawInputs(unsigned mostTopk);
  EpMask drawMask();
  void drawChoices(EpInputs& inputs);
};

}  // namespace mooncake::kernels
