#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <c10/core/Stream.h>

#include "backend/device/group_streams.h"
#include "backend/device/own_stream.h"
#include "backend/replays.h"
#include "base/deadline.h"
#include "base/mutex.h"
#include "device/graph_memory.h"
#include "device/graph_words.h"
#include "group/group.h"
#include "peers/replay_order.h"

namespace mooncake {

class GraphStaging;
class Staging;

// The staged calls of a group that graphs of one device have. Their order is that in which the program
// calls and replays, from one thread at a time.
//
// On the device, an event marks the end of the last call or replay, and the next one waits for it. So
// one operation at a time rings. A thread of the group (`mooncake-graphs`) sees that and makes the
// call. Every other call of the group takes its place when the event's order has come to it.
class RecordedCalls final : public Replays {
 public:
  // kUnsupported says why calls on these streams cannot be recorded. The group outlives stop().
  // Throws the errors of streams.
  struct Settings {
    size_t memoryLimit = 0;  // of GraphMemory
    // If a call waits so long for its place while no operation runs, the group ends.
    std::chrono::milliseconds limit{};
    std::function<bool()> isIdle;  // whether no operation of the group runs
  };
  static Result<std::unique_ptr<RecordedCalls>> make(Group& group,
                                                     std::shared_ptr<GroupStreams> streams,
                                                     Settings settings);
  ~RecordedCalls() override;
  RecordedCalls(const RecordedCalls&) = delete;
  RecordedCalls& operator=(const RecordedCalls&) = delete;

  const c10::Stream& stream() const { return stream_.stream(); }  // that is recorded
  GraphMemory& memory() { return memory_; }
  // Around copies from the device to memory() while a replay waits. They are enqueued on the stream
  // that beginCopies() returns, which is in another queue than the replay. Also if one of them fails,
  // markCopies() must follow. Both throw; the first one if there is no such stream at present.
  c10::Stream beginCopies();
  void markCopies(const c10::Stream& stream);
  // Whether the copies have happened, which are forgotten then. Throws.
  bool areCopied();
  // Whether an operation has ended without areCopied(). Then its copies may come, or have come, on the
  // inputs of a later operation.
  bool hasLateCopies() const;

  // A place of an operation in a graph.
  struct Place {
    GraphWords* words = nullptr;
    uint32_t number = 0;
  };
  // Around the work of an operation on stream(), which has joined a capture. `isNewGraph`: no
  // operation of the group has been recorded into it. They throw.
  Place begin(bool isNewGraph);
  void end();
  // Replays of the place run the operation by `call`, each with a staging of its own.
  using Replay = std::function<void(std::shared_ptr<Staging>)>;
  void keep(std::shared_ptr<GraphStaging> staging, Replay call);

  uint32_t announce() override;
  void follow(uint32_t number, std::function<void()> call) override;
  void skip() override;
  void drain(Deadline deadline) override;
  void settle(Deadline deadline) override;
  bool stop(Deadline deadline) override;

 private:
  struct Operation {
    std::shared_ptr<GraphStaging> staging;  // null: its recording has failed
    Replay call;
  };
  struct Graph {
    GraphWords* words;
    std::vector<Operation> operations;
  };
  struct Waiting {
    uint32_t number;
    std::function<void()> call;
  };

  RecordedCalls(Group& group, std::shared_ptr<GroupStreams> streams, Settings settings);
  void run();
  // The first two find the work that there is.
  bool findRung(Place& place) REQUIRES(mutex_);
  std::vector<std::function<void()>> takeReached() REQUIRES(mutex_);
  void failIfLate() REQUIRES(mutex_);
  void pause() REQUIRES(mutex_);
  void serve(const Place& place, const Operation& operation) EXCLUDES(mutex_);
  void endAll() EXCLUDES(mutex_);

  Group& group_;
  const std::shared_ptr<GroupStreams> streams_;
  const Settings settings_;
  const OwnStream stream_;
  GraphMemory memory_;
  Mutex orderMutex_;  // also keeps numbers in the order of order_; taken before mutex_
  ReplayOrder order_ GUARDED_BY(orderMutex_);
  mutable Mutex copiesMutex_;
  const std::unique_ptr<DeviceEvent> copied_ PT_GUARDED_BY(copiesMutex_);
  bool isCopying_ GUARDED_BY(copiesMutex_) = false;
  bool isMarked_ GUARDED_BY(copiesMutex_) = false;  // copied_ is behind the copies
  Mutex mutex_;
  Condition changed_;
  std::vector<Graph> graphs_ GUARDED_BY(mutex_);
  std::deque<Waiting> waiting_ GUARDED_BY(mutex_);
  Clock::time_point lastStep_ GUARDED_BY(mutex_) = Clock::now();
  // The graph that is recorded waits for the host at its beginning.
  bool isBegun_ GUARDED_BY(mutex_) = false;
  // The thread makes calls that are not in waiting_ any more.
  bool isMaking_ GUARDED_BY(mutex_) = false;
  bool isStopped_ GUARDED_BY(mutex_) = false;
  bool isOver_ GUARDED_BY(mutex_) = false;  // the thread does nothing any more
  std::thread thread_;
};

}  // namespace mooncake
