// The calls of c10d that concern the group itself, and batches of calls.
#include <algorithm>

#include "backend/arena_tensors.h"
#include "backend/arguments.h"
#include "backend/batch_work.h"
#include "backend/mooncake_backend.h"

namespace mooncake {
namespace {

template <typename Options>
void nameGroup(Options& options, const BackendOptions& group) {
  if constexpr (requires { options.group_name; }) {
    options.group_name = group.groupName;
    options.global_ranks_in_group.assign(group.globalRanks.begin(), group.globalRanks.end());
  }
}

}  // namespace

void MooncakeBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  const auto run = [this, waitAllRanks, timeout = effective(opts.timeout)] {
    return mooncake::monitoredBarrier(*group_, waitAllRanks, timeout);
  };
  submit(c10d::OpType::BARRIER, {}, {}, /*async=*/false, run)->wait(kNoTimeout);
}

void MooncakeBackend::startCoalescing() {
  refuseInForkedChild();
  coalescing_.begin();
}

MooncakeBackend::WorkPtr MooncakeBackend::endCoalescing() {
  refuseInForkedChild();
  const auto block = coalescing_.current();
  if (!block) refuse("endCoalescing() without startCoalescing()");
  (void)coalescing_.end();
  Coalescing::Batch& batch = *block;
  if (batch.error) std::rethrow_exception(batch.error);
  // Copies first: if one of them fails, nothing is posted.
  std::vector<std::shared_ptr<MessageMemory>> memories;
  for (const auto& kept : batch.messages) memories.push_back(memoryOf(kept.tensor));
  std::vector<c10::intrusive_ptr<MessageWork>> posted;
  try {
    // Receives first: data that arrives meanwhile then goes straight to its place.
    for (const bool isSend : {false, true}) {
      for (size_t i = 0; i < batch.messages.size(); ++i) {
        const auto& kept = batch.messages[i];
        if ((kept.type == c10d::OpType::SEND) != isSend) continue;
        posted.push_back(
            start(kept.type, std::move(memories[i]), kept.peer, kept.tag, kept.staging));
        batch.works[kept.place] = posted.back();
      }
    }
    return c10::make_intrusive<BatchWork>(rank_, options_.capacity, std::move(batch.works));
  } catch (const std::exception& error) {
    for (const auto& work : posted)
      work->cancel({ErrorCode::kAborted, std::string("its batch was not posted: ") + error.what()});
    throw;
  }
}

std::vector<int> MooncakeBackend::survivors() const {
  std::vector<int> ranks;
  for (int r = 0; group_ && r < size_; ++r) {
    if (group_->agent().isActive(r)) ranks.push_back(r);
  }
  return ranks;
}

void MooncakeBackend::checkStanding() const {
  if (job_) throwIfError(job_->membership()->standing());
}

void MooncakeBackend::runAbortHooks() {
  std::map<int64_t, std::function<void()>> hooks;
  {
    std::lock_guard lock(abortHooksMutex_);
    hooks = abortHooks_;
  }
  for (const auto& [id, hook] : hooks) hook();
}

#ifdef C10D_BACKEND_HAS_HOOKS
void MooncakeBackend::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  std::lock_guard lock(abortHooksMutex_);
  abortHooks_[id] = std::move(hook);
}

void MooncakeBackend::unregisterAbortHook(int64_t id) {
  std::lock_guard lock(abortHooksMutex_);
  abortHooks_.erase(id);
}
#endif

#ifdef MOONCAKE_HAS_COMPLETION_HOOKS
void MooncakeBackend::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  hooks_->add(id, [hook = std::move(hook)](uint64_t key) { hook({.completionKey = key}); });
}

void MooncakeBackend::unregisterCompletionHook(int64_t id) { hooks_->remove(id); }
#endif

// The function that tells the completion hooks of a message's end. Null without hooks, so that such
// a message costs nothing.
PointToPoint::OnDone MooncakeBackend::tellingOf(uint64_t key) const {
  if (!hooks_->any()) return nullptr;
  return [hooks = hooks_, key] { hooks->tell(key); };
}

at::Tensor MooncakeBackend::allocateTensor(long size, at::TensorOptions options) {
  refuseInForkedChild();
  throwIfError(group_->usable());
  return tensorInArena(*job_->engine(), size, options);
}

c10d::ErrorType MooncakeBackend::getError() {
  const Status status = group_ ? group_->usable() : Status(ErrorCode::kAborted, "");
  switch (status.code()) {
    case ErrorCode::kOk:
      return c10d::ErrorType::SUCCESS;
    case ErrorCode::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case ErrorCode::kEvicted:
    case ErrorCode::kMinority:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

c10::intrusive_ptr<c10d::Backend::Options> MooncakeBackend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>(options_.name, options_.timeout);
  nameGroup(*options, options_);
  return options;
}

BackendOptions MooncakeBackend::optionsOfSplit(const std::vector<int>& ranks,
                                               const Options& opts) const {
  refuseInForkedChild();
  throwIfError(group_->usable());
  for (const int rank : ranks) {
    if (rank < 0 || rank >= size_)
      refuse("split: rank " + std::to_string(rank) + " is not in a group of " +
             std::to_string(size_));
  }
  BackendOptions split = options_;
  split.groupName = groupNameIn(opts);
  split.timeout = opts.timeout;
  split.activeRanks = at::Tensor();
  split.capacity = 0;
  split.globalRanks.clear();
  for (const int rank : ranks) split.globalRanks.push_back(jobRank(rank));
  return split;
}

BackendOptions MooncakeBackend::optionsOfMerge(const Options& opts) const {
  BackendOptions merged = optionsOfSplit({}, opts);
  merged.mergeMembers = [this] { return mergeMembers(); };
  return merged;
}

// This rank comes first.
std::vector<MergeMember> MooncakeBackend::mergeMembers() const {
  std::vector<MergeMember> members{{.id = job_->engine()->id()}};
  for (int r = 0; r < size_; ++r) {
    const auto& peer = job_->membership()->peer(jobRank(r));
    if (!peer) continue;
    MergeMember& member = members.emplace_back(MergeMember{.id = peer->id});
    if (!group_->isGone(r)) continue;
    member.lost =
        group_->nameRank(r) + " of group '" + options_.groupName + "' (" + group_->whyGone(r) + ")";
  }
  return members;
}

}  // namespace mooncake
