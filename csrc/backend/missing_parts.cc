#include "backend/missing_parts.h"

#include <atomic>

#include <torch/csrc/autograd/graph_task.h>

#include "base/log.h"
#include "base/rank_list.h"

namespace mooncake {
namespace {

std::atomic<bool> isRead = false;

std::vector<int> membersOf(const Group& group) {
  std::vector<int> members;
  for (int r = 0; r < group.size(); ++r) {
    if (group.agent().isActive(r)) members.push_back(r);
  }
  return members;
}

}  // namespace

MissingParts::MissingParts(const GroupLine& line, bool isWatched)
    : line_(line),
      isWatched_(isWatched),
      members_(membersOf(*line.current())),
      left_(members_.size()) {}

MissingParts::Use MissingParts::useOf(const Collective& call) {
  switch (call.kind->type) {
    case c10d::OpType::ALLREDUCE:
      return *call.op == c10d::ReduceOp::SUM && torch::autograd::get_current_graph_task_id() != -1
                 ? Use::kSumInBackward
                 : Use::kOther;
    case c10d::OpType::_ALLGATHER_BASE:
      return Use::kGather;
    default:
      return Use::kOther;
  }
}

void MissingParts::movedTo(const Group& series) {
  Lock lock(mutex_);
  members_ = membersOf(series);
  left_ = members_.size();
}

void MissingParts::noteRead() { isRead.store(true, std::memory_order_relaxed); }

bool MissingParts::mayWarn() const {
  return !isWatched_ && !isRead.load(std::memory_order_relaxed);
}

void MissingParts::ended(Use use, const char* verb, const Group& series) {
  if (use == Use::kOther || !mayWarn()) return;
  note(use, std::string(verb) + " #" + std::to_string(series.lastNumber), series, *series.lastView);
}

void MissingParts::launched(const Collective& call) {
  const Use use = useOf(call);
  if (use == Use::kOther || !mayWarn()) return;
  const auto series = line_.current();
  note(use, call.kind->name, *series, {.active = membersOf(*series)});
}

void MissingParts::note(Use use, const std::string& verb, const Group& series,
                        const GroupView& contributors) {
  std::vector<int> members;
  {
    Lock lock(mutex_);
    if (contributors.active.size() >= left_) return;
    left_ = contributors.active.size();
    members = members_;
  }
  RankTexts reasons;
  for (const int r : members) {
    if (!contributors.contains(r)) reasons.add(r, series.whyGone(r));
  }
  const std::string missing =
      reasons.join(", ", [&](const std::vector<int>& ranks, const std::string& why) {
        return series.nameRanks(ranks) + " (" + why + ")";
      });
  const std::string name = verb + " of group '" + series.name() + "'";
  if (use == Use::kGather) {
    log(LogLevel::kWarning, series.engine().logName(), name, " has zeros in place of the part of ",
        missing,
        ". FSDP computes with these zeros, without an error. Shard the model anew over the ranks "
        "that are left, in a group with on_failure=\"raise\", as docs/checkpoints.md shows");
    return;
  }
  log(LogLevel::kWarning, series.engine().logName(), name,
      ", which a backward called, is a sum without the part of ", missing,
      ". DistributedDataParallel still divides it by ", series.size(),
      ", so its gradients are too small. Register a hook that divides by the number of ranks in "
      "the sum: model.register_comm_hook(None, mooncake_backend.mean_over_contributors)");
}

}  // namespace mooncake
