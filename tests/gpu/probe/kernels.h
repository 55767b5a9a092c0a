#pragma once

#include <cstddef>
#include <cstdint>

// The parameters of the kernels in kernels.cu.
namespace probe {

// spin: waits until the word has at least the value.
struct SpinArguments {
  const uint32_t* word;
  uint32_t value;
};

// tell: writes the value to the word.
struct TellArguments {
  uint32_t* word;
  uint32_t value;
};

// barriers: runs barriers of all ranks until `stop` is not 0. `progress[0]` has the number of
// barriers so far, `progress[1]` the longest one in microseconds. The last two are of the host.
struct BarrierArguments {
  static constexpr int kMostRanks = 16;
  uint32_t* pages[kMostRanks];  // of each rank; word i of a page is written by rank i alone
  int rank;
  int ranks;
  const uint32_t* stop;
  uint32_t* progress;
};

// read: reads words that count up from 0 until `stop` is not 0, and counts the wrong ones in
// `wrong`. `passes` counts how often it has read all of them.
struct ReadArguments {
  const uint32_t* data;
  size_t count;
  const uint32_t* stop;
  uint32_t* wrong;
  uint32_t* passes;
};

}  // namespace probe
