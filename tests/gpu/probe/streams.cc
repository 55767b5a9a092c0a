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

constexpr int kMostWaiting = 40;
constexpr size_t kOthers = 33;    // more than a device has queues, so one of them is in each queue
constexpr double kHeldUpMs = 20;  // a stream that is not through by then is held up
constexpr size_t kCopyBytes = 64 << 10;

enum class Wait { kWord, kKernel };
enum class Other { kWord, kCopyAndWord, kKernel };

struct Case {
  const char* name;
  Wait wait;
  bool copies = false;  // around each wait
  Other other;          // the work of the streams that must not be held up
  int waitPriority = 0;
  int otherPriority = 0;
  bool isLegacyFirst = false;  // the first wait is on the legacy default stream
};

// Lets more and more streams wait, and looks each time which other streams still run work.
class Trial {
 public:
  // Makes all streams first, because the driver might wait for waiting streams to make another one.
  explicit Trial(const Case& chosen) : case_(chosen) {
    CHECKED(driver.cuMemAlloc(&memory_, 4 * kCopyBytes));
    for (int n = 0; n < kMostWaiting; ++n) {
      const bool isLegacy = case_.isLegacyFirst && n == 0;
      waiting_.push_back(isLegacy ? nullptr : makeStream(case_.waitPriority));
    }
    for (size_t i = 0; i < kOthers; ++i) others_.push_back(makeStream(case_.otherPriority));
  }
  ~Trial() {
    for (int n = 0; n < kMostWaiting; ++n) store(gates_ + n, 1);
    CHECKED(driver.cuCtxSynchronize());
    for (const auto& streams : {waiting_, others_})
      for (CUstream stream : streams)
        if (stream != nullptr) CHECKED(driver.cuStreamDestroy(stream));
    CHECKED(driver.cuMemFree(memory_));
    for (uint32_t* words : {gates_, marks_, host_}) CHECKED(driver.cuMemFreeHost(words));
  }
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  void run() {
    int first = 0;       // so many waiting streams hold up another one first
    size_t atFirst = 0;  // and then so many other streams
    int all = 0;         // so many waiting streams hold up all others
    for (int n = 1; n <= kMostWaiting && all == 0; ++n) {
      addWaiting(n - 1);
      markOthers(uint32_t(n));
      if (first == 0 && !heldUp_.empty()) {
        first = n;
        atFirst = heldUp_.size();
      }
      if (heldUp_.size() == kOthers) all = n;
    }
    if (first == 0) {
      std::printf("[streams]   %-38s none held up by %d\n", case_.name, kMostWaiting);
      return;
    }
    std::printf("[streams]   %-38s %zu of %zu HELD UP by %d; ", case_.name, atFirst, kOthers,
                first);
    if (all == 0) {
      std::printf("%zu by %d\n", heldUp_.size(), kMostWaiting);
    } else {
      std::printf("all by %d\n", all);
    }
  }

 private:
  void copy(CUdeviceptr to, CUdeviceptr from, CUstream stream) {
    CHECKED(driver.cuMemcpyAsync(to, from, kCopyBytes, stream));
  }

  void addWaiting(int n) {
    CUstream stream = waiting_[size_t(n)];
    if (case_.copies) copy(addressOf(host_), memory_, stream);
    if (case_.wait == Wait::kWord) {
      awaitWord(stream, gates_ + n, 1);
    } else {
      const SpinArguments arguments{.word = gates_ + n, .value = 1};
      launch(spin_, 32, stream, &arguments);
    }
    if (case_.copies) copy(memory_ + kCopyBytes, addressOf(host_), stream);
  }

  void mark(size_t i, uint32_t value) {
    CUstream stream = others_[i];
    if (case_.other == Other::kKernel) {
      const TellArguments arguments{.word = marks_ + i, .value = value};
      launch(tell_, 32, stream, &arguments);
      return;
    }
    if (case_.other == Other::kCopyAndWord)
      copy(addressOf(host_) + kCopyBytes, memory_ + 2 * kCopyBytes, stream);
    writeWord(stream, marks_ + i, value);
  }

  // A stream that is held up once stays so.
  void markOthers(uint32_t value) {
    for (size_t i = 0; i < kOthers; ++i)
      if (!heldUp_.contains(i)) mark(i, value);
    const auto begin = Clock::now();
    for (size_t i = 0; i < kOthers; ++i) {
      if (heldUp_.contains(i)) continue;
      if (!reaches(marks_ + i, value, kHeldUpMs - millisecondsSince(begin))) heldUp_.insert(i);
    }
  }

  const Case& case_;
  const CUfunction spin_ = kernel("spin");
  const CUfunction tell_ = kernel("tell");
  uint32_t* const gates_ = pinnedWords(kMostWaiting);
  uint32_t* const marks_ = pinnedWords(kOthers);
  uint32_t* const host_ = pinnedWords(2 * kCopyBytes / sizeof(uint32_t));
  CUdeviceptr memory_ = 0;
  std::vector<CUstream> waiting_, others_;
  std::set<size_t> heldUp_;
};

}  // namespace

void streams() {
  openDevice();
  int low = 0, high = 0;
  CHECKED(driver.cuCtxGetStreamPriorityRange(&low, &high));
  const Case cases[] = {
      {.name = "waits for words; a word", .wait = Wait::kWord, .other = Other::kWord},
      {.name = "waits for words, copies; copy, word",
       .wait = Wait::kWord,
       .copies = true,
       .other = Other::kCopyAndWord},
      {.name = "the same, the others have priority",
       .wait = Wait::kWord,
       .copies = true,
       .other = Other::kCopyAndWord,
       .otherPriority = high},
      {.name = "the same, the waits have priority",
       .wait = Wait::kWord,
       .copies = true,
       .other = Other::kCopyAndWord,
       .waitPriority = high},
      {.name = "the same, the first wait on stream 0",
       .wait = Wait::kWord,
       .copies = true,
       .other = Other::kCopyAndWord,
       .isLegacyFirst = true},
      {.name = "waits for words; a kernel", .wait = Wait::kWord, .other = Other::kKernel},
      {.name = "kernels that spin; copy, word",
       .wait = Wait::kKernel,
       .other = Other::kCopyAndWord},
      {.name = "kernels that spin; a kernel", .wait = Wait::kKernel, .other = Other::kKernel},
      {.name = "the same, the others have priority",
       .wait = Wait::kKernel,
       .other = Other::kKernel,
       .otherPriority = high},
  };
  for (const Case& one : cases) Trial(one).run();
}

}  // namespace probe
