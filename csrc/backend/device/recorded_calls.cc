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
      copies_(streams_->collectives().device()),
      memory_(*stream_.accelerator(), settings_.memoryLimit),
      order_(*stream_.accelerator(), OwnStream::nativeOf(streams_->collectives())) {}

RecordedCalls::~RecordedCalls() {
  if (thread_.joinable()) (void)stop(Deadline::at(Clock::time_point::max()));
}

RecordedCalls::Place RecordedCalls::begin(bool isNewGraph) {
  const DeviceStream native = stream_.native();
  if (isNewGraph) {
    GraphWords* const words = orThrow(GraphWords::make(*stream_.accelerator()));
    {
      std::lock_guard lock(mutex_);
      graphs_.push_back({words, {}});
    }
    std::lock_guard order(orderMutex_);
    throwIfError(order_.beforeGraph(native));
    throwIfError(words->recordRing(native, GraphWords::kBeginning));
    throwIfError(words->recordWait(native, GraphWords::kBeginning));
  }
  std::lock_guard lock(mutex_);
  Graph& graph = graphs_.back();
  graph.operations.emplace_back();
  return {graph.words, uint32_t(graph.operations.size())};
}

void RecordedCalls::end() {
  std::lock_guard order(orderMutex_);
  throwIfError(order_.afterGraphs(stream_.native()));
}

void RecordedCalls::keep(std::shared_ptr<GraphStaging> staging, Replay call) {
  const Place place = staging->place();
  std::lock_guard lock(mutex_);
  const auto graph = std::ranges::find(graphs_, place.words, &Graph::words);
  graph->operations[place.number - 1] = {std::move(staging), std::move(call)};
}

uint32_t RecordedCalls::announce() {
  const uint32_t number =
      StreamStaging::nextNumber(*streams_->words(), streams_->collectives(), settings_.limit);
  std::lock_guard order(orderMutex_);
  throwIfError(order_.beforeCall());
  throwIfError(streams_->words()->tell(number));
  return number;
}

void RecordedCalls::follow(uint32_t number, std::function<void()> call) {
  {
    std::lock_guard lock(mutex_);
    if (waiting_.empty()) lastStep_ = Clock::now();
    waiting_.push_back({number, std::move(call)});
    changed_.notify_all();
  }
  skip();
}

void RecordedCalls::skip() {
  std::lock_guard order(orderMutex_);
  // The error is that of the device, which later calls meet, too.
  (void)order_.afterCall();
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
void RecordedCalls::pause(std::unique_lock<std::mutex>& lock) {
  constexpr Clock::duration kBusy = std::chrono::microseconds(100);
  constexpr Clock::duration kShortest = std::chrono::microseconds(5);
  constexpr Clock::duration kLongest = std::chrono::milliseconds(2);
  const Clock::duration idle = Clock::now() - lastStep_;
  if (idle < kBusy) {
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
    return;
  }
  changed_.wait_for(lock, std::clamp(idle / 32, kShortest, kLongest), [&] { return isStopped_; });
}

void RecordedCalls::run() {
  std::unique_lock lock(mutex_);
  while (!isStopped_) {
    // In this order: a call that the device has come to before a replay is made before it.
    Place place;
    const bool isRung = findRung(place);
    const auto calls = takeReached();
    if (!isRung && calls.empty()) {
      failIfLate();
      pause(lock);
      continue;
    }
    Operation operation;
    if (isRung && place.number != GraphWords::kBeginning) {
      const auto graph = std::ranges::find(graphs_, place.words, &Graph::words);
      operation = graph->operations[place.number - 1];
    }
    lock.unlock();
    for (const auto& call : calls) call();
    if (isRung) serve(place, operation);
    operation = {};
    lock.lock();
    lastStep_ = Clock::now();
  }
  isOver_ = true;
  changed_.notify_all();
}

void RecordedCalls::serve(const Place& place, const Operation& operation) {
  if (!operation.call) return place.words->release(place.number);
  try {
    operation.call(std::make_shared<ReplayStaging>(operation.staging, settings_.limit));
  } catch (const std::exception& error) {  // of a call that is refused
    log(LogLevel::kWarning, "group '" + group_.name() + "'",
        "a replayed operation does not run: ", error.what());
  }
}

void RecordedCalls::drain(Deadline deadline) {
  while (group_.usable().ok() && !deadline.passed()) {
    {
      std::scoped_lock lock(orderMutex_, mutex_);
      const auto isOver = order_.isOver();
      if (!isOver.ok() || (*isOver && waiting_.empty())) return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

bool RecordedCalls::stop(Deadline deadline) {
  std::unique_lock lock(mutex_);
  isStopped_ = true;
  changed_.notify_all();
  if (!changed_.wait_until(lock, deadline.when(), [&] { return isOver_; })) return false;
  const auto calls = std::exchange(waiting_, {});
  lock.unlock();
  if (thread_.joinable()) thread_.join();
  for (const Waiting& waiting : calls) waiting.call();
  for (const Graph& graph : graphs_) graph.words->releaseForGood();
  return true;
}

}  // namespace mooncake
