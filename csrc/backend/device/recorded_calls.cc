#include "backend/device/recorded_calls.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "backend/arguments.h"
#include "backend/device/replay_staging.h"
#include "backend/device/stream_staging.h"
#include "base/log.h"
#include "base/thread.h"
#include "device/word_recorder.h"

namespace mooncake {

Result<std::unique_ptr<RecordedCalls>> RecordedCalls::make(Group& group,
                                                           std::shared_ptr<GroupStreams> streams,
                                                           Settings settings) {
  if (!streams->words()) return Error{ErrorCode::kUnsupported, "its streams have no words"};
  std::unique_ptr<RecordedCalls> made(
      new RecordedCalls(group, std::move(streams), std::move(settings)));
  auto* const recorder = dynamic_cast<WordRecorder*>(made->stream_.accelerator());
  if (!recorder) return Error{ErrorCode::kUnsupported, "graphs of its device take no words"};
  MOONCAKE_TRY(recorder->checkRecordedWords(made->stream().device_index()));
  auto thread = startThread("mooncake-graphs", [calls = made.get()] { calls->run(); });
  if (!thread.ok()) return thread.error();
  made->thread_ = std::move(*thread);
  return made;
}

RecordedCalls::RecordedCalls(Group& group, std::shared_ptr<GroupStreams> streams, Settings settings)
    : group_(group),
      streams_(std::move(streams)),
      settings_(std::move(settings)),
      stream_(streams_->collectives().device()),
      memory_(*stream_.accelerator(), settings_.memoryLimit),
      order_(*stream_.accelerator(), OwnStream::nativeOf(streams_->collectives())),
      copied_(orThrow(stream_.accelerator()->createEvent(stream().device_index()))) {}

RecordedCalls::~RecordedCalls() {
  if (thread_.joinable()) (void)stop(Deadline::at(Clock::time_point::max()));
}

RecordedCalls::Place RecordedCalls::begin(bool isNewGraph) {
  const DeviceStream native = stream_.native();
  if (isNewGraph) {
    Lock order(orderMutex_);
    Lock lock(mutex_);
    isBegun_ = false;
    GraphWords* const words = orThrow(GraphWords::make(*stream_.accelerator()));
    throwIfError(order_.beforeGraph(native));
    throwIfError(words->recordRing(native, GraphWords::kBeginning));
    throwIfError(words->recordWait(native, GraphWords::kBeginning));
    graphs_.push_back({words, {}});
    isBegun_ = true;
  }
  Lock lock(mutex_);
  if (!isBegun_) {
    throwError({ErrorCode::kSystem,
                "the first operation of the group in this capture could not be recorded. Begin the "
                "capture again"});
  }
  Graph& graph = graphs_.back();
  graph.operations.emplace_back();
  return {graph.words, uint32_t(graph.operations.size())};
}

void RecordedCalls::end() {
  Lock order(orderMutex_);
  throwIfError(order_.afterGraphs(stream_.native()));
}

c10::Stream RecordedCalls::beginCopies() {
  constexpr std::chrono::seconds kPatience{1};
  const DeviceStream moving = orThrow(stream_.queues()->findMoving(Deadline::after(kPatience)));
  Lock lock(copiesMutex_);
  isCopying_ = true;
  isMarked_ = false;
  return OwnStream::named(stream().device(), moving);
}

void RecordedCalls::markCopies(const c10::Stream& stream) {
  Lock lock(copiesMutex_);
  throwIfError(copied_->record(OwnStream::nativeOf(stream)));
  isMarked_ = true;
}

bool RecordedCalls::areCopied() {
  Lock lock(copiesMutex_);
  if (isCopying_) isCopying_ = !isMarked_ || !orThrow(copied_->hasHappened());
  return !isCopying_;
}

bool RecordedCalls::hasLateCopies() const {
  Lock lock(copiesMutex_);
  return isCopying_;
}

void RecordedCalls::keep(std::shared_ptr<GraphStaging> staging, Replay call) {
  const Place place = staging->place();
  Lock lock(mutex_);
  const auto graph = std::ranges::find(graphs_, place.words, &Graph::words);
  graph->operations[place.number - 1] = {std::move(staging), std::move(call)};
}

uint32_t RecordedCalls::announce() {
  const uint32_t number =
      StreamStaging::nextNumber(*streams_->words(), streams_->collectives(), settings_.limit);
  Lock order(orderMutex_);
  throwIfError(order_.beforeCall());
  throwIfError(streams_->words()->tell(number));
  return number;
}

void RecordedCalls::follow(uint32_t number, std::function<void()> call) {
  {
    Lock lock(mutex_);
    if (waiting_.empty()) lastStep_ = Clock::now();
    waiting_.push_back({number, std::move(call)});
    changed_.notify_all();
  }
  skip();
}

void RecordedCalls::skip() {
  Lock order(orderMutex_);
  // Later replays would not wait for this call.
  const Status marked = order_.afterCall();
  if (!marked.ok()) group_.fail(marked.error());
}

bool RecordedCalls::findRung(Place& place) {
  for (const Graph& graph : graphs_) {
    if (const auto rung = graph.words->takeRung()) {
      place = {graph.words, *rung};
      return true;
    }
  }
  return false;
}

std::vector<std::function<void()>> RecordedCalls::takeReached() {
  std::vector<std::function<void()>> calls;
  const bool isUsable = group_.usable().ok();
  while (!waiting_.empty() && (!isUsable || streams_->words()->isTold(waiting_.front().number))) {
    calls.push_back(std::move(waiting_.front().call));
    waiting_.pop_front();
  }
  return calls;
}

void RecordedCalls::failIfLate() {
  if (waiting_.empty() || Clock::now() - lastStep_ < settings_.limit) return;
  if (!settings_.isIdle()) {
    lastStep_ = Clock::now();
    return;
  }
  group_.fail({ErrorCode::kTimeout,
               "an operation on " + group_.nameRank(group_.rank()) + " has not begun after " +
                   std::to_string(settings_.limit.count()) +
                   " ms: replays of graphs before it have not come to their operations on " +
                   stream().device().str() +
                   ". Give the group a longer timeout, or find the work that hangs"});
}

// The next operation of a replay comes soon after the last one, if one comes. The longer nothing has
// come, the longer the pause: a group without replays costs little.
void RecordedCalls::pause() {
  constexpr Clock::duration kBusy = std::chrono::microseconds(100);
  constexpr Clock::duration kShortest = std::chrono::microseconds(5);
  constexpr Clock::duration kLongest = std::chrono::milliseconds(2);
  const Clock::duration idle = Clock::now() - lastStep_;
  if (idle < kBusy) {
    const UnlockedScope unlocked(mutex_);
    std::this_thread::yield();
    return;
  }
  changed_.wait_for(mutex_, std::clamp(idle / 32, kShortest, kLongest),
                    [&]() REQUIRES(mutex_) { return isStopped_; });
}

void RecordedCalls::run() {
  Lock lock(mutex_);
  while (!isStopped_) {
    // In this order: a call that the device has come to before a replay is made before it.
    Place place;
    const bool isRung = findRung(place);
    const auto calls = takeReached();
    if (!isRung && calls.empty()) {
      failIfLate();
      pause();
      continue;
    }
    Operation operation;
    if (isRung && place.number != GraphWords::kBeginning) {
      const auto graph = std::ranges::find(graphs_, place.words, &Graph::words);
      operation = graph->operations[place.number - 1];
    }
    isMaking_ = true;
    lock.unlock();
    for (const auto& call : calls) call();
    if (isRung) serve(place, operation);
    operation = {};
    lock.lock();
    isMaking_ = false;
    lastStep_ = Clock::now();
  }
  lock.unlock();
  endAll();
  lock.lock();
  isOver_ = true;
  changed_.notify_all();
}

// The thread's last act. The group has failed, so no call waits for other ranks.
void RecordedCalls::endAll() {
  Lock lock(mutex_);
  const auto calls = std::exchange(waiting_, {});
  const auto graphs = graphs_;
  lock.unlock();
  for (const Waiting& waiting : calls) waiting.call();
  for (const Graph& graph : graphs) graph.words->releaseForGood();
}

void RecordedCalls::serve(const Place& place, const Operation& operation) {
  if (!operation.call) return place.words->release(place.number);
  const auto replay = std::make_shared<ReplayStaging>(operation.staging, settings_.limit);
  // A group that has failed may be without its backend.
  if (!group_.usable().ok()) return replay->abandon();
  try {
    operation.call(replay);
  } catch (const std::exception& error) {
    // The other ranks run the operation.
    group_.fail({ErrorCode::kSystem,
                 std::string("a replayed operation could not be begun: ") + error.what()});
    replay->abandon();
  }
}

void RecordedCalls::drain(Deadline deadline) {
  while (group_.usable().ok() && !deadline.passed()) {
    {
      Lock order(orderMutex_);
      Lock lock(mutex_);
      const auto isOver = order_.isOver();
      if (!isOver.ok() || (*isOver && waiting_.empty() && !isMaking_)) return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void RecordedCalls::settle(Deadline deadline) {
  Lock lock(mutex_);
  while ((!waiting_.empty() || isMaking_) && !isStopped_ && !deadline.passed())
    changed_.wait_for(mutex_, std::chrono::milliseconds(1));
}

bool RecordedCalls::stop(Deadline deadline) {
  Lock lock(mutex_);
  isStopped_ = true;
  changed_.notify_all();
  const auto isOver = [&]() REQUIRES(mutex_) { return isOver_; };
  if (!changed_.wait_until(mutex_, deadline.when(), isOver)) return false;
  lock.unlock();
  if (thread_.joinable()) thread_.join();
  return true;
}

}  // namespace mooncake
