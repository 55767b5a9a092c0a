#include "device/queue_probe.h"

#include <algorithm>
#include <new>
#include <string>
#include <thread>

namespace mooncake {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// How long a stream that is not held up may take to write a word. A wrong guess on a busy machine
// costs a second question, not a wrong answer.
constexpr microseconds kFirstPatience{250}, kMostPatience{256'000};
constexpr milliseconds kAfterRelease{20};
// How long a stream that nothing holds up may take. After that, work of the program is before it.
constexpr milliseconds kMoves{50};

}  // namespace

Result<std::unique_ptr<QueueProbe>> QueueProbe::make(Accelerator& accelerator) {
  const auto memory = accelerator.allocatePinned(sizeof(Words));
  if (!memory.ok()) return memory.error();
  return std::unique_ptr<QueueProbe>(new QueueProbe(accelerator, *memory));
}

QueueProbe::QueueProbe(Accelerator& accelerator, std::span<std::byte> memory)
    : accelerator_(accelerator), words_(*new (memory.data()) Words) {}

bool QueueProbe::isAt(const StreamWord& word) const {
  return int32_t(word.load(std::memory_order_acquire) - number_) >= 0;
}

bool QueueProbe::await(const std::function<bool()>& isReady, Deadline deadline) {
  while (!isReady()) {
    if (deadline.passed()) return false;
    std::this_thread::yield();
  }
  return true;
}

std::vector<size_t> QueueProbe::missing(size_t streams) const {
  std::vector<size_t> found;
  for (size_t i = 0; i < streams; ++i) {
    if (!isAt(words_.marks[i])) found.push_back(i);
  }
  return found;
}

Status QueueProbe::enqueueMarks(DeviceStream waiting, std::span<const DeviceStream> streams) {
  for (size_t i = 0; i < streams.size(); ++i)
    MOONCAKE_TRY(accelerator_.writeWord(streams[i], &words_.marks[i], number_));
  return accelerator_.writeWord(waiting, &words_.own, number_);
}

// A queue issues in the order of the calls. So the mark of a stream in the queue of `waiting` comes
// after the gate has opened, and before or with `own`.
Result<std::vector<size_t>> QueueProbe::ask(DeviceStream waiting,
                                            std::span<const DeviceStream> streams,
                                            Clock::duration patience) {
  ++number_;
  MOONCAKE_TRY(accelerator_.awaitWord(waiting, &words_.gate, number_));
  const Status enqueued = enqueueMarks(waiting, streams);
  std::vector<size_t> late;
  if (enqueued.ok() &&
      !await([&] { return missing(streams.size()).empty(); }, Deadline::after(patience)))
    late = missing(streams.size());
  words_.gate.store(number_, std::memory_order_release);
  MOONCAKE_TRY(enqueued);
  if (!await([&] { return isAt(words_.own); }, Deadline::after(kMoves))) {
    return {ErrorCode::kTimeout, "a stream of device " + std::to_string(waiting.device) +
                                     " has not moved for " + std::to_string(kMoves.count()) +
                                     " ms"};
  }
  const auto hasCome = [&](size_t i) { return isAt(words_.marks[i]); };
  (void)await([&] { return std::ranges::all_of(late, hasCome); }, Deadline::after(kAfterRelease));
  std::erase_if(late, [&](size_t i) { return !hasCome(i); });  // another wait holds these up
  return late;
}

Result<std::optional<size_t>> QueueProbe::heldUpBy(DeviceStream waiting,
                                                   std::span<const DeviceStream> streams) {
  std::optional<size_t> before;  // the answer of the question before this one
  for (auto patience = kFirstPatience; patience <= kMostPatience; patience *= 4) {
    const auto heldUp = ask(waiting, streams, patience);
    if (!heldUp.ok()) return heldUp.error();
    if (heldUp->empty()) return std::optional<size_t>();
    // A stream that was slow is not held up the second time.
    const bool isClear = heldUp->size() == 1;
    if (isClear && before == heldUp->front()) return before;
    before = isClear ? std::optional(heldUp->front()) : std::nullopt;
  }
  return {ErrorCode::kTimeout,
          "device " + std::to_string(waiting.device) + " is too busy to tell its queues"};
}

Result<size_t> QueueProbe::findMoving(std::span<const DeviceStream> streams, Deadline deadline) {
  ++number_;
  for (size_t i = 0; i < streams.size(); ++i)
    MOONCAKE_TRY(accelerator_.writeWord(streams[i], &words_.marks[i], number_));
  std::optional<size_t> found;
  const auto look = [&] {
    for (size_t i = 0; i < streams.size() && !found; ++i) {
      if (isAt(words_.marks[i])) found = i;
    }
    return found.has_value();
  };
  if (await(look, deadline)) return *found;
  return {ErrorCode::kTimeout, "every queue of the device is held up by a stream that waits"};
}

}  // namespace mooncake
