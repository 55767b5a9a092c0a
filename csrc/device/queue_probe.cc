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
// The same where an answer is confirmed, which happens once for a stream.
constexpr microseconds kConfirms{8'000};
// How long a stream that nothing holds up may take. After that, work of the program is before it.
constexpr milliseconds kMoves{100};
// How long the first streams are preferred to later ones.
constexpr microseconds kPrefers{20};

}  // namespace

Result<std::unique_ptr<QueueProbe>> QueueProbe::make(Accelerator& accelerator) {
  const auto memory = accelerator.allocatePinned(sizeof(Words));
  if (!memory.ok()) return memory.error();
  return std::unique_ptr<QueueProbe>(new QueueProbe(accelerator, *memory));
}

QueueProbe::QueueProbe(Accelerator& accelerator, std::span<std::byte> memory)
    : accelerator_(accelerator), words_(*new (memory.data()) Words) {}

bool QueueProbe::isAt(const StreamWord& word, uint32_t number) {
  return int32_t(word.load(std::memory_order_acquire) - number) >= 0;
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
    if (isClear && before == heldUp->front()) {
      const auto isSure = confirms(streams[*before], waiting, std::max(patience, kConfirms));
      if (!isSure.ok()) return isSure.error();
      if (*isSure) return before;
    }
    before = isClear ? std::optional(heldUp->front()) : std::nullopt;
  }
  return {ErrorCode::kTimeout,
          "device " + std::to_string(waiting.device) + " is too busy to tell its queues"};
}

// The other way around: a stream that was slow twice by itself is hardly held up by this wait, too.
Result<bool> QueueProbe::confirms(DeviceStream waiting, DeviceStream heldUp,
                                  Clock::duration patience) {
  const auto late = ask(waiting, std::span(&heldUp, 1), patience);
  if (!late.ok()) return late.error();
  return !late->empty();
}

Result<const QueueProbe::Move*> QueueProbe::markMove(DeviceStream stream) {
  const auto [found, isNew] =
      moves_.try_emplace(stream.handle, Move{&words_.moves[moves_.size() % kMost], 0});
  Move& move = found->second;
  if (isNew || isAt(*move.word, move.number)) {
    MOONCAKE_TRY(accelerator_.writeWord(stream, move.word, move.number + 1));
    ++move.number;
  }
  return &move;
}

Result<size_t> QueueProbe::findMoving(std::span<const DeviceStream> streams, Deadline deadline) {
  std::vector<const Move*> moves;
  std::optional<size_t> found;
  const auto look = [&] {
    for (size_t i = 0; i < moves.size() && !found; ++i) {
      if (isAt(*moves[i]->word, moves[i]->number)) found = i;
    }
    return found.has_value();
  };
  for (const DeviceStream& stream : streams) {
    const auto move = markMove(stream);
    if (!move.ok()) return move.error();
    moves.push_back(*move);
    if (await(look, Deadline::after(kPrefers))) return *found;
  }
  if (await(look, deadline)) return *found;
  return {ErrorCode::kTimeout, "every queue of the device is held up by a stream that waits"};
}

}  // namespace mooncake
