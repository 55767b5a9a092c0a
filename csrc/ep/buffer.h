#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "ep/calls.h"

namespace mooncake::ep {

// A call that was made: its end.
class Task {
 public:
  explicit Task(std::function<Status()> run) : run_(std::move(run)) {}
  bool isDone() const { return isDone_.load(std::memory_order_acquire); }
  const Status& status() const { return status_; }  // once it is done

 private:
  friend class Buffer;
  std::function<Status()> run_;
  Status status_;  // written before isDone_
  std::atomic<bool> isDone_{false};
};

// Memory and a group of its own for the dispatches and combines of one process. Calls run one after
// the other, in their order, the same on all ranks: on the caller's thread, or on a thread of the
// buffer, at once, so that whoever fetches the result late keeps nobody waiting. One thread calls.
class Buffer {
 public:
  // Collective over the group.
  static Result<std::shared_ptr<Buffer>> create(std::unique_ptr<Group> group, size_t bytes,
                                                Deadline deadline);
  ~Buffer();

  Group& group() const { return *group_; }
  size_t bytes() const { return bytes_; }
  std::byte* data() const { return memory_->block.data; }

  // The same on all ranks, from the next dispatch on.
  void setExperts(std::shared_ptr<const ExpertMap> experts);
  // Of this many: as set, or else spread evenly.
  Result<std::shared_ptr<const ExpertMap>> experts(int count);
  // kInvalidArgument: the memory is too small for the shape.
  Status checkRoom(const Shape& shape, const ExpertMap& experts) const;
  // kInvalidArgument: more than the ranks can tell each other at once.
  Status checkTable(size_t tokens, size_t topk, int numExperts) const;
  // Where the next dispatch puts its rows.
  std::byte* nextRecv();
  // Where the next operation's rows for the others stand, and which one that is. Nobody reads there
  // any more, or writes: see csrc/ep/given_rows.h.
  struct NextSend {
    std::byte* data;
    uint64_t number;
  };
  Result<NextSend> nextSend(Deadline deadline);

  // Whom this rank takes for active.
  void mask(int rank, bool isMasked);
  void unmaskAll();
  RankSet callerMask() const { return mask_; }
  // Those that are in the agreed view.
  RankSet view() const;

  std::shared_ptr<Task> submit(std::function<Status(Memory&)> run, bool inBackground);
  // Until it is done: every call has a deadline of its own.
  void await(const Task& task, const std::function<void()>& nowAndThen);

  // Nothing runs afterwards, and the group is left. Once, and not on the buffer's own thread.
  void close(Deadline deadline);
  bool isOwnThread() const { return thread_.get_id() == std::this_thread::get_id(); }

 private:
  Buffer(std::unique_ptr<Group> group, size_t bytes) : group_(std::move(group)), bytes_(bytes) {}
  void runThread();
  void finish(Task& task, Status status);

  const std::unique_ptr<Group> group_;
  const size_t bytes_;
  std::unique_ptr<Memory> memory_;
  MemoryRegion landing_;  // the send memory, where ranks that do not map us put rows
  std::shared_ptr<const ExpertMap> experts_;
  bool isSet_ = false;
  RankSet mask_;
  uint64_t dispatches_ = 0;

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Task>> tasks_;
  bool isRunning_ = false;
  bool isClosed_ = false;
  std::thread thread_;
};

}  // namespace mooncake::ep
