#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "check.h"
#include "clock.h"
#include "device.h"
#include "driver.h"
#include "kernels.h"
#include "parts.h"

namespace probe {
namespace {

constexpr uint32_t kRounds = 201;
constexpr double kMostMs = 1000;

// Prints the medians of the time until the call returns, and until the word has the number of the
// round.
void measure(const char* name, const uint32_t* word, const std::function<void(uint32_t)>& call) {
  std::vector<double> returned, seen;
  for (uint32_t round = 1; round <= kRounds; ++round) {
    const auto begin = Clock::now();
    call(round);
    returned.push_back(millisecondsSince(begin) * 1e3);
    if (!reaches(word, round, kMostMs)) {
      std::printf("[latency] %-44s not seen within %.0f ms\n", name, kMostMs);
      return;
    }
    seen.push_back(millisecondsSince(begin) * 1e3);
  }
  const auto median = [](std::vector<double>& values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  };
  std::printf("[latency] %-44s %6.1f us; the call alone %6.1f us\n", name, median(seen),
              median(returned));
}

}  // namespace

void latency() {
  openDevice();
  CUstream stream = makeStream();
  CUdeviceptr memory = 0;
  CHECKED(driver.cuMemAlloc(&memory, 4096));
  uint32_t* const host = pinnedWords(1024);
  const CUfunction tell = kernel("tell");
  uint32_t* word = pinnedWords(1);
  measure("a stream writes a word", word, [&](uint32_t round) { writeWord(stream, word, round); });
  word = pinnedWords(1);
  uint32_t* const gate = pinnedWords(1);
  awaitWord(stream, gate, 1);
  writeWord(stream, word, 1);
  measure("the host releases a stream that writes one", word, [&](uint32_t round) {
    store(gate, round);
    // For the next round. It does not pass yet.
    awaitWord(stream, gate, round + 1);
    writeWord(stream, word, round + 1);
  });
  store(gate, kRounds + 1);
  CHECKED(driver.cuStreamSynchronize(stream));
  word = pinnedWords(1);
  measure("a kernel writes a word", word, [&](uint32_t round) {
    const TellArguments arguments{.word = word, .value = round};
    launch(tell, 32, stream, &arguments);
  });
  word = pinnedWords(1);
  measure("a copy of 4 KiB to the host, and a word", word, [&](uint32_t round) {
    CHECKED(driver.cuMemcpyAsync(addressOf(host), memory, 4096, stream));
    writeWord(stream, word, round);
  });
  word = pinnedWords(1);
  measure("a copy of 4 KiB to the device, and a word", word, [&](uint32_t round) {
    CHECKED(driver.cuMemcpyAsync(memory, addressOf(host), 4096, stream));
    writeWord(stream, word, round);
  });
}

}  // namespace probe
