#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "ep/calls.h"

namespace mooncake::ep {

// A submitted call: tells when and how it ended.
class Task {
 public:
  explicit Task(std::function<Status()> run) : run_(std::move(run)) {}
  bool isDone() const { return isDone_.load(std::memory_order_acquire); }
  const Status& status() const { return status_; }  // once it is done
  bool hasFailed() const { return isDone() && !status_.ok(); }

 private:
  friend class Buffer;
  std::function<Status()> run_;
  Status status_;  // written before isDone_
  std::atomic<bool> isDone_{false};
};

// Memory and a group of its own for the dispatches and combines of one process. Calls run one after
// the other, in the same order on all ranks. They run on the caller's thread, or at once on the
// buffer's thread: then a caller that fetches its result late holds up no rank. One thread calls.
class Buffer {
 public:
  // Collective over the group: a rank without memory is an error of all ranks. `hasResults`: see
  // BufferLayout.
  static Result<std::shared_ptr<Buffer>> create(std::unique_ptr<Group> group, size_t bytes,
                                                Deadline deadline, bool hasResults = true);
  ~Buffer();

  Group& group() const { return *group_; }
  const Hosts& hosts() const { return memory_->hosts; }
  size_t bytes() const { return bytes_; }
  std::byte* data() const { return memory_->block.data; }
  // The most tokens of a rank for which a dispatch of the normal mode, and the combine of its rows,
  // have room. `rowBytes`: of the dispatch. `rowsPerToken`: the most rows that a rank receives, for
  // each token that each rank may have: the number of ranks if tokens may go anywhere. 0: not even
  // one token.
  size_t mostTokens(size_t rowBytes, size_t hidden, size_t extras, double rowsPerToken) const;
  // Room for the rows that this rank gives to one combine of the normal mode.
  bool hasRoomForSums(size_t rows, size_t hidden, size_t extras) const {
    return rows * normalCombineRowBytes(hidden, extras) <= memory_->layout.sendBytes();
  }

  // Sets the owners of experts from the next dispatch on. All ranks set the same.
  void setExperts(std::shared_ptr<const ExpertMap> experts);
  // The owners of `count` experts: as set, or else spread evenly. kInvalidArgument: another number
  // of experts was set.
  Result<std::shared_ptr<const ExpertMap>> experts(int count);
  // kInvalidArgument: the memory is too small for the shape.
  Status checkRoom(const Shape& shape, const ExpertMap& experts) const;
  // kInvalidArgument: the routing table does not fit into a slot.
  Status checkTable(size_t tokens, size_t topk, int numExperts) const;
  // Memory into which the next dispatch puts its received rows: not the memory of the newest
  // result. Only this rank writes there, so ranks need not choose the same.
  std::byte* nextRecv();
  // The rows of this dispatch are a result, in that memory, unless the dispatch fails.
  void keepResult(std::byte* recv, std::shared_ptr<Task> dispatch);
  // The send memory of the next operation, and the number of that operation. Waits until no rank
  // reads or writes there: see csrc/ep/given_rows.h. kTimeout: earlier calls have not ended.
  struct NextSend {
    std::byte* data;
    uint64_t number;
  };
  Result<NextSend> nextSend(Deadline deadline);

  // The mask holds the ranks that this rank counts as active; `isMasked` takes a rank out of it.
  void mask(int rank, bool isMasked);
  void unmaskAll();
  GroupRanks callerMask() const { return mask_; }
  // The ranks in the agreed view.
  GroupRanks view() const;

  std::shared_ptr<Task> submit(std::function<Status(Memory&)> run, bool inBackground);
  // Waits until the task is done, and calls `nowAndThen`, if not null, ten times a second. Every
  // call has a deadline of its own.
  void await(const Task& task, const std::function<void()>& nowAndThen);

  // Waits for running calls, ends late ones at the deadline, and leaves the group. Called once,
  // and not on the buffer's own thread.
  void close(Deadline deadline);
  bool isOwnThread() const { return thread_.get_id() == std::this_thread::get_id(); }

 private:
  Buffer(std::unique_ptr<Group> group, size_t bytes) : group_(std::move(group)), bytes_(bytes) {}
  Result<Hosts::Memory> land(const Group::Shared& block, const BufferLayout& layout);
  void runThread() EXCLUDES(mutex_);
  void carryOut(Task& task) EXCLUDES(mutex_);

  const std::unique_ptr<Group> group_;
  const size_t bytes_;
  std::unique_ptr<Memory> memory_;
  MemoryRegion landing_;  // region of the send memory
  std::shared_ptr<const ExpertMap> experts_;
  bool isSet_ = false;
  GroupRanks mask_;
  struct KeptResult {
    std::byte* recv;
    std::shared_ptr<Task> dispatch;
  };
  std::deque<KeptResult> results_;  // the newest two, in the order of their calls

  Mutex mutex_;
  Condition changed_;
  std::deque<std::shared_ptr<Task>> tasks_ GUARDED_BY(mutex_);
  bool isRunning_ GUARDED_BY(mutex_) = false;
  bool isClosed_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace mooncake::ep
