#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend/active_ranks.h"
#include "backend/backend_options.h"
#include "backend/call_order.h"
#include "backend/coalescing.h"
#include "backend/collective_queue.h"
#include "backend/completion_hooks.h"
#include "backend/completions.h"
#include "backend/job.h"
#include "backend/message_driver.h"
#include "backend/missing_parts.h"
#include "base/fork.h"
#include "base/mutex.h"
#include "group/group_line.h"

namespace mooncake {

// A group that this process has joined, with everything that begins and ends with it. Leaving says
// when it ends. Nothing but isOpen() may be asked for a part of a group that is not open any more.
class LiveGroup {
 public:
  static constexpr const char* kDestroyed = "the process group was destroyed";
  // A thread that runs an operation of a group that has failed ends it at its next look, or copy.
  static constexpr std::chrono::seconds kToGetOut{10};

  // Collective over the group. Blocks until all members are there, at most for options.timeout.
  // With `world` the group shares the engine of that group, which must contain all members. Throws.
  LiveGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
            BackendOptions options, std::shared_ptr<ActiveRanks> activeRanks,
            const LiveGroup* world);
  LiveGroup(const LiveGroup&) = delete;
  LiveGroup& operator=(const LiveGroup&) = delete;

  int rank() const { return rank_; }
  // Number of ranks that the program sees: it follows growth, and the planned removal of the last
  // ranks.
  int size() const { return line_ ? line_->extent() : size_; }
  // Number of ranks for which the group has room.
  int room() const { return room_; }
  const BackendOptions& options() const { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) { options_.timeout = timeout; }
  // Returns the group's timeout for kUnsetTimeout.
  std::chrono::milliseconds effective(std::chrono::milliseconds timeout) const {
    return timeout == c10d::kUnsetTimeout ? options_.timeout : timeout;
  }
  Deadline deadline(std::chrono::milliseconds timeout = c10d::kUnsetTimeout) const {
    return Deadline::after(effective(timeout));
  }
  // Programs see lost ranks as active for a while.
  bool keepsLost() const { return options_.lostRanks != BackendOptions::LostRanks::kAreOut; }
  // Before another group is made of this one: goes on to the next series, if the present one has ended,
  // so that all members make it of the same one. Throws if this rank is out, and may come back.
  void settleMembers() const;
  // With kStayUntilSynced: no rank that is lost by now is shown as active any more.
  void showLosses();
  bool isWithinWorld() const { return isWithinWorld_; }  // made within the job of another group
  // Rank of the job. Roster::kNobody: none has come yet.
  int jobRank(int rank) const;
  // A forked child has none of the threads: it leaves everything as it is.
  bool isForkedChild() const { return forkGeneration_ != forkGeneration(); }
  void refuseInForkedChild() const;
  // Whether the parts are there.
  bool isOpen() const { return job_ != nullptr; }

  // Makes a group of the same ranks in the same job, for operations of another module. Collective
  // over the group. Throws.
  // `onView`: see GroupOptions.
  // `ranks`: the first ones of this group; 0: all that programs see.
  std::unique_ptr<Group> makeGroup(const std::string& purpose, size_t slotBytes, size_t pushBytes,
                                   bool raises, Deadline deadline,
                                   std::function<void(const GroupView&)> onView = {},
                                   int ranks = 0) const;

  Job& job() const { return *job_; }
  // The series in which calls run now.
  std::shared_ptr<Group> group() const { return line_->current(); }
  GroupLine& line() const { return *line_; }
  MissingParts& missingParts() const { return *missingParts_; }
  const std::shared_ptr<Completions>& completions() const { return completions_; }  // the job's
  const std::shared_ptr<CompletionHooks>& hooks() const { return hooks_; }
  const std::shared_ptr<ActiveRanks>& activeRanks() const { return activeRanks_; }
  std::shared_ptr<MessageDriver> messages() const EXCLUDES(messagesMutex_);
  const std::shared_ptr<CollectiveQueue>& queue() const { return queue_; }
  CallOrder& order() { return order_; }
  Coalescing& batches() { return batches_; }

  // Ends the threads, once the group has failed. Returns false if a thread stays in an operation.
  bool stop();
  // After stop(): gives everything back, or keeps it until the process ends.
  void drop();
  void leak();

 private:
  GroupOptions groupOptions() const;
  std::vector<int> firstJobRanks() const;
  void startLine(std::unique_ptr<Group> first);
  std::shared_ptr<MessageDriver> makeMessages(Group& group) const;
  void moveTo(Group& to, const std::vector<bool>& stays);

  const int rank_, size_;
  int room_;
  BackendOptions options_;
  const bool isWithinWorld_;
  const uint32_t forkGeneration_ = forkGeneration();
  const std::shared_ptr<ActiveRanks> activeRanks_;
  Coalescing batches_;
  std::shared_ptr<Job> job_;
  std::shared_ptr<Completions> completions_;
  const std::shared_ptr<CompletionHooks> hooks_ = std::make_shared<CompletionHooks>();
  std::shared_ptr<SeriesEvents> events_;
  std::string lineName_;
  std::unique_ptr<GroupLine> line_;
  std::unique_ptr<MissingParts> missingParts_;
  mutable Mutex messagesMutex_;
  // A newcomer gets another one when it has joined, and a rank when it is taken out.
  std::shared_ptr<MessageDriver> messages_ GUARDED_BY(messagesMutex_);
  std::shared_ptr<CollectiveQueue> queue_;
  CallOrder order_;
};

}  // namespace mooncake
