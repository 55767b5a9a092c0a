#include <array>
#include <cstdio>
#include <set>
#include <vector>

#include "check.h"
#include "clock.h"
#include "device.h"
#include "driver.h"
#include "kernels.h"
#include "parts.h"

namespace probe {
namespace {

constexpr size_t kStreams = 40;
constexpr double kHeldUpMs = 20;      // a stream whose mark is missing by then is held up
constexpr double kReleasedMs = 1000;  // for marks once the waiting stream goes on
constexpr size_t kCopyBytes = 4096;

using HeldUp = std::set<size_t>;  // indices of streams

struct Question {
  const char* name;
  bool waitsByKernel;
  bool marksByCopy;
};

// Lets one stream wait, and looks which other streams still run work.
class Queues {
 public:
  explicit Queues(const Question& question) : question_(question) {
    CHECKED(driver.cuMemAlloc(&memory_, kCopyBytes));
    for (CUstream& stream : streams_) stream = makeStream();
  }

  HeldUp heldUpBy(size_t waiting) {
    ++round_;
    wait(streams_[waiting]);
    for (size_t i = 0; i < kStreams; ++i)
      if (i != waiting) mark(i);
    HeldUp found = missing(waiting, kHeldUpMs);
    store(gate_, round_);
    if (!missing(waiting, kReleasedMs).empty())
      std::printf("[queues]     a stream did not go on after the wait\n");
    CHECKED(driver.cuCtxSynchronize());
    return found;
  }

 private:
  void wait(CUstream stream) {
    if (!question_.waitsByKernel) return awaitWord(stream, gate_, round_);
    const SpinArguments arguments{.word = gate_, .value = round_};
    launch(spin_, 32, stream, &arguments);
  }
  void mark(size_t stream) {
    if (question_.marksByCopy)
      CHECKED(driver.cuMemcpyAsync(addressOf(host_), memory_, kCopyBytes, streams_[stream]));
    writeWord(streams_[stream], marks_ + stream, round_);
  }
  HeldUp missing(size_t waiting, double milliseconds) {
    HeldUp found;
    const auto begin = Clock::now();
    for (size_t i = 0; i < kStreams; ++i) {
      const double left = milliseconds - millisecondsSince(begin);
      if (i != waiting && !reaches(marks_ + i, round_, left)) found.insert(i);
    }
    return found;
  }

  const Question& question_;
  const CUfunction spin_ = kernel("spin");
  uint32_t* const gate_ = pinnedWords(1);
  uint32_t* const marks_ = pinnedWords(kStreams);
  uint32_t* const host_ = pinnedWords(kCopyBytes / sizeof(uint32_t));
  CUdeviceptr memory_ = 0;
  std::array<CUstream, kStreams> streams_{};
  uint32_t round_ = 0;
};

// Whether each stream is held up by exactly the streams that it holds up, and these by each other.
bool areClasses(const std::vector<HeldUp>& heldUp) {
  for (size_t i = 0; i < kStreams; ++i) {
    for (size_t j : heldUp[i]) {
      HeldUp ours = heldUp[i], theirs = heldUp[j];
      ours.insert(i);
      theirs.insert(j);
      if (ours != theirs) return false;
    }
  }
  return true;
}

void ask(const Question& question) {
  Queues queues(question);
  std::vector<HeldUp> first, second;
  for (size_t i = 0; i < kStreams; ++i) first.push_back(queues.heldUpBy(i));
  for (size_t i = 0; i < kStreams; ++i) second.push_back(queues.heldUpBy(i));
  std::set<HeldUp> classes;
  size_t most = 0;
  for (size_t i = 0; i < kStreams; ++i) {
    HeldUp own = first[i];
    own.insert(i);
    most = own.size() > most ? own.size() : most;
    classes.insert(own);
  }
  std::printf(
      "[queues]   %-34s %zu queues of at most %zu of %zu streams; sharing is mutual %s, the "
      "same again %s\n",
      question.name, classes.size(), most, kStreams, areClasses(first) ? "yes" : "NO",
      first == second ? "yes" : "NO");
  std::printf("[queues]     stream 0 holds up:");
  for (size_t stream : first[0]) std::printf(" %zu", stream);
  std::printf("\n");
}

}  // namespace

void queues() {
  openDevice();
  const Question questions[] = {
      {.name = "a word waits; marks are words", .waitsByKernel = false, .marksByCopy = false},
      {.name = "a word waits; copies, words", .waitsByKernel = false, .marksByCopy = true},
      {.name = "a kernel spins; marks are words", .waitsByKernel = true, .marksByCopy = false},
  };
  for (const Question& question : questions) ask(question);
}

}  // namespace probe
