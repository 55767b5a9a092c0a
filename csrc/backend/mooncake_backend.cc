#include "backend/mooncake_backend.h"

#include <algorithm>

#include "backend/arguments.h"
#include "backend/device/recorded_calls.h"
#include "backend/errors.h"
#include "backend/message_work.h"
#include "backend/tensors.h"
#include "base/log.h"
#include "collectives/mailbox.h"
#include "group/group_state.h"

namespace mooncake {
namespace {

// torch's new_group([0, 0]) would wait for a rank that does not exist.
void checkRanks(std::vector<int> ranks) {
  std::ranges::sort(ranks);
  const auto twice = std::ranges::adjacent_find(ranks);
  if (twice != ranks.end())
    refuse("rank " + std::to_string(*twice) + " stands twice in the list of the group's ranks");
}

}  // namespace

MooncakeBackend::MooncakeBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                 BackendOptions options, const MooncakeBackend* world)
    : Backend(rank, size), options_(std::move(options)), inOurWorld_(world != nullptr) {
  checkRanks(options_.globalRanks);
  const Deadline init = deadline(c10d::kUnsetTimeout);
  if (options_.capacity == 0) options_.capacity = size;
  activeRanks_ = std::make_shared<ActiveRanks>(options_.activeRanks, size);
  if (world) {
    // A forked child makes no groups: it has no threads of the engine.
    world->refuseInForkedChild();
    job_ = world->job_;
    if (!job_) throwError({ErrorCode::kAborted, kDestroyed});
    options_.groupEnv = world->options_.groupEnv;
    group_ = job_->makeGroup(groupOptions(), init);
  } else {
    job_ = std::make_shared<Job>(rank, size, options_);
    group_ = job_->begin(store, groupOptions(), init);
    options_.mergeMembers = nullptr;
    options_.launcherKey.clear();  // groups that come from this one have other ranks
  }
  completions_ = job_->completions();
  messages_ = std::make_shared<MessageDriver>(*group_, completions_,
                                              options_.lostMessagesReturn && !options_.raises);
  queue_ = std::make_shared<CollectiveQueue>(*group_, options_.raises, completions_, hooks_);
  job_->add(this, [this](Farewell::How how) { leaveGroup(how); });
  activeRanks_->push();
}

GroupOptions MooncakeBackend::groupOptions() const {
  return {.name = options_.groupName,
          .rank = rank_,
          .size = size_,
          .globalRanks = options_.globalRanks,
          .env = options_.groupEnv,
          .mailboxBytes = kMailboxBytes,
          .raises = options_.raises,
          .onView = [ranks = activeRanks_](const GroupView& view) { ranks->show(view); }};
}

std::unique_ptr<Group> MooncakeBackend::makeGroup(
    const std::string& purpose, size_t slotBytes, size_t mailboxBytes, bool raises,
    Deadline deadline, std::function<void(const GroupView&)> onView) const {
  refuseInForkedChild();
  if (!job_) throwError({ErrorCode::kAborted, kDestroyed});
  // createWithin() takes the global ranks for ranks of the job. In a job of its own, a group has
  // other ranks.
  GroupOptions options{.name = options_.groupName + "/" + purpose,
                       .rank = rank_,
                       .size = size_,
                       .globalRanks = inOurWorld_ ? options_.globalRanks : std::vector<int>(),
                       .env = options_.groupEnv,
                       .slotBytes = slotBytes,
                       .mailboxBytes = mailboxBytes,
                       .raises = raises,
                       .onView = std::move(onView)};
  return job_->makeGroup(std::move(options), deadline);
}

void MooncakeBackend::use(std::unique_ptr<RecordedCalls> calls) {
  ownRecordedCalls_ = std::move(calls);
  recordedCalls_ = ownRecordedCalls_.get();
}

void MooncakeBackend::follow(const c10::intrusive_ptr<CollectiveWork>& work, Staging* staging,
                             CollectiveQueue::Run run) {
  RecordedCalls& calls = *recordedCalls_;
  uint32_t number = 0;
  try {
    number = calls.announce();
  } catch (const std::exception& error) {
    // See Staging::onFailure().
    group_->fail({ErrorCode::kSystem,
                  std::string("a call could not be put in order with graphs: ") + error.what()});
    throw;
  }
  try {
    if (staging) staging->mark();
  } catch (...) {
    calls.skip();
    throw;
  }
  calls.follow(number, [queue = queue_, work, run = std::move(run)]() mutable {
    queue->submit(work, /*async=*/false, std::move(run));
  });
}

at::Tensor MooncakeBackend::activeRanks() const {
  activeRanks_->push();
  return activeRanks_->tensor();
}

MooncakeBackend::~MooncakeBackend() { close(); }

void MooncakeBackend::refuseInForkedChild() const {
  if (forkGeneration_ == forkGeneration()) return;
  throwError({ErrorCode::kAborted, "group '" + options_.groupName +
                                       "' belongs to the process that this one was forked "
                                       "from (rank " +
                                       std::to_string(rank_) +
                                       "), and works there only. Make a group here, "
                                       "or do without one"});
}

bool MooncakeBackend::acknowledgeLoss() {
  refuseInForkedChild();
  throwIfError(group_->usable());
  if (RecordedCalls* const calls = recordedCalls_) calls->settle(deadline(c10d::kUnsetTimeout));
  return queue_->acknowledgeLoss(deadline(c10d::kUnsetTimeout));
}

uint64_t MooncakeBackend::getSequenceNumberForGroup() { return queue_ ? queue_->called() : 0; }

int MooncakeBackend::jobRank(int rank) const {
  const bool isOfAJob = inOurWorld_ && !options_.globalRanks.empty();
  return isOfAJob ? options_.globalRanks[rank] : rank;
}

uint64_t MooncakeBackend::epoch() const { return job_ ? job_->membership()->view().epoch : 0; }

std::vector<RankEvidence> MooncakeBackend::evidence() const {
  if (!group_) return {};
  return evidenceIn(*group_, [this](int rank) { return jobRank(rank); });
}

std::string MooncakeBackend::state() const {
  refuseInForkedChild();
  return describeState(*group_);
}

std::string MooncakeBackend::transportTo(int rank) const {
  if (rank < 0 || rank >= size_)
    refuse("rank " + std::to_string(rank) + " is not in a group of " + std::to_string(size_));
  return group_->window().transportName(rank);
}

std::chrono::milliseconds MooncakeBackend::effective(std::chrono::milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? options_.timeout : timeout;
}

Deadline MooncakeBackend::deadline(std::chrono::milliseconds timeout) const {
  return Deadline::after(effective(timeout));
}

int MooncakeBackend::root(int64_t root, int64_t rootTensor, const char* operation) const {
  if (root < 0 || root >= size_)
    refuse(std::string(operation) + ": root " + std::to_string(root) + " is not in a group of " +
           std::to_string(size_));
  if (rootTensor != 0)
    refuse(std::string(operation) + ": root tensor " + std::to_string(rootTensor) +
           ": each rank has one tensor, number 0");
  return static_cast<int>(root);
}

const at::Tensor& MooncakeBackend::only(const std::vector<at::Tensor>& tensors,
                                        const char* operation) const {
  if (tensors.size() != 1) {
    refuse(std::string(operation) + " takes one tensor per rank, not " +
           std::to_string(tensors.size()));
  }
  return tensors[0];
}

MooncakeBackend::WorkPtr MooncakeBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                    const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].layout() == at::kSparse)
    return allreduceSparse(tensors[0], opts);
  const at::Tensor& tensor = only(tensors, "all_reduce");
  checkOutput(tensor, "the tensor of all_reduce");
  return submit(c10d::OpType::ALLREDUCE, tensors, tensors, opts.asyncOp,
                [this, reduction = reductionOf(tensor, opts.reduceOp, "all_reduce"),
                 flat = premultiplied(tensor, opts.reduceOp, "all_reduce"),
                 timeout = effective(opts.timeout)](InputFeed* feed) {
                  Status status = mooncake::allreduce(*group_, flat.bytes(), reduction,
                                                      Deadline::after(timeout), feed);
                  if (status.ok()) flat.copyBack();
                  return status;
                });
}

MooncakeBackend::WorkPtr MooncakeBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                    const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  checkUsed(tensor, opts.rootRank != rank_, "the tensor of broadcast");
  return submit(c10d::OpType::BROADCAST, tensors, tensors, opts.asyncOp,
                [this, flat = Flat(tensor), dtype = typeOf(tensor, "broadcast"),
                 from = root(opts.rootRank, opts.rootTensor, "broadcast"),
                 timeout = effective(opts.timeout)](InputFeed* feed) {
                  Status status = mooncake::broadcast(*group_, flat.bytes(), dtype, from,
                                                      Deadline::after(timeout), feed);
                  if (status.ok() && from != rank_) flat.copyBack();
                  return status;
                });
}

MooncakeBackend::WorkPtr MooncakeBackend::reduce(std::vector<at::Tensor>& tensors,
                                                 const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only(tensors, "reduce");
  checkUsed(tensor, opts.rootRank == rank_, "the tensor of reduce");
  return submit(c10d::OpType::REDUCE, tensors, tensors, opts.asyncOp,
                [this, reduction = reductionOf(tensor, opts.reduceOp, "reduce"),
                 flat = premultiplied(tensor, opts.reduceOp, "reduce"),
                 to = root(opts.rootRank, opts.rootTensor, "reduce"),
                 timeout = effective(opts.timeout)](InputFeed* feed) {
                  Status status = mooncake::reduce(*group_, flat.bytes(), reduction, to,
                                                   Deadline::after(timeout), feed);
                  if (status.ok() && to == rank_) flat.copyBack();
                  return status;
                });
}

MooncakeBackend::WorkPtr MooncakeBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                    std::vector<at::Tensor>& inputs,
                                                    const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = only(inputs, "all_gather");
  throwIfError(checkTensor(input, "the input of all_gather"));
  if (outputs.size() != 1 || outputs[0].size() != size_t(size_)) {
    refuse("all_gather needs one output tensor for each of the " + std::to_string(size_) +
           " ranks, not " + std::to_string(outputs.empty() ? 0 : outputs[0].size()));
  }
  checkEachRank(outputs[0], input, rank_, size_, "all_gather", "output");
  checkApart(outputs[0], "an output of all_gather");
  std::vector<Flat> out = flatten(outputs[0]);
  if (!areAlike(outputs[0])) {
    Flat in(input);
    in.standApart();  // outputs of other sizes may overlap it anywhere
    return submit(c10d::OpType::ALLGATHER, inputs, outputs[0], opts.asyncOp,
                  [this, in = std::move(in), out = std::move(out),
                   dtype = typeOf(input, "all_gather"), timeout = effective(opts.timeout)] {
                    const std::vector<ConstSpan> toEach(size_t(size_), in.bytes());
                    Status status = mooncake::alltoall(*group_, toEach, spansOf(out), dtype,
                                                       Deadline::after(timeout));
                    copyBack(status, out);
                    return status;
                  });
  }
  Flat in = inputsBeside(inputs, placesOf(out), rank_)[0];
  return submit(
      c10d::OpType::ALLGATHER, inputs, outputs[0], opts.asyncOp,
      [this, in = std::move(in), out = std::move(out), dtype = typeOf(input, "all_gather"),
       timeout = effective(opts.timeout)](InputFeed* feed) {
        Status status = mooncake::allgather(*group_, in.bytes(), spansOf(out), dtype,
                                            Deadline::after(timeout), feed);
        copyBack(status, out);
        return status;
      });
}

MooncakeBackend::WorkPtr MooncakeBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                          const c10d::AllgatherOptions& opts) {
  checkOutput(output, "the output of all_gather_into_tensor");
  throwIfError(checkTensor(input, "the input of all_gather_into_tensor"));
  checkSameType(output, input, "all_gather_into_tensor");
  if (output.numel() != input.numel() * size_) {
    refuse("all_gather_into_tensor: the output " + sizesOf(output) + " must hold " +
           std::to_string(size_) + " times the input " + sizesOf(input));
  }
  const Flat out(output);
  Flat in = inputsBeside({input}, partsOf(out.place(), size_), rank_)[0];
  return submit(c10d::OpType::_ALLGATHER_BASE, input, {output}, opts.asyncOp,
                [this, in = std::move(in), out, dtype = typeOf(input, "all_gather_into_tensor"),
                 timeout = effective(opts.timeout)](InputFeed* feed) {
                  Status status =
                      mooncake::allgather(*group_, in.bytes(), partsOf(out.bytes(), size_), dtype,
                                          Deadline::after(timeout), feed);
                  if (status.ok()) out.copyBack();
                  return status;
                });
}

MooncakeBackend::WorkPtr MooncakeBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  checkOutput(output, "the output of reduce_scatter_tensor");
  throwIfError(checkTensor(input, "the input of reduce_scatter_tensor"));
  checkSameType(output, input, "reduce_scatter_tensor");
  if (input.numel() != output.numel() * size_) {
    refuse("reduce_scatter_tensor: the input " + sizesOf(input) + " must hold " +
           std::to_string(size_) + " times the output " + sizesOf(output));
  }
  const Reduction reduction = reductionOf(input, opts.reduceOp, "reduce_scatter_tensor");
  const Flat in = premultiplied(input, opts.reduceOp, "reduce_scatter_tensor");
  return submit(c10d::OpType::_REDUCE_SCATTER_BASE, input, {output}, opts.asyncOp,
                [this, reduction, in, out = outputBeside(output, std::span(&in, 1)),
                 timeout = effective(opts.timeout)](InputFeed* feed) {
                  Status status = mooncake::reduceScatter(
                      *group_, in.bytes(), out.bytes(), reduction, Deadline::after(timeout), feed);
                  if (status.ok()) out.copyBack();
                  return status;
                });
}

MooncakeBackend::WorkPtr MooncakeBackend::alltoall(std::vector<at::Tensor>& outputs,
                                                   std::vector<at::Tensor>& inputs,
                                                   const c10d::AllToAllOptions& opts) {
  if (inputs.size() != size_t(size_) || outputs.size() != size_t(size_)) {
    refuse("all_to_all needs one input and one output for each of the " + std::to_string(size_) +
           " ranks, not " + std::to_string(inputs.size()) + " and " +
           std::to_string(outputs.size()));
  }
  for (int r = 0; r < size_; ++r) {
    throwIfError(checkTensor(inputs[r], "an input of all_to_all"));
    throwIfError(checkTensor(outputs[r], "an output of all_to_all"));
    checkSameType(inputs[r], inputs[0], "all_to_all");
    checkSameType(outputs[r], inputs[0], "all_to_all");
  }
  checkApart(outputs, "an output of all_to_all");
  std::vector<Flat> in = flatten(inputs), out;
  for (const at::Tensor& output : outputs) out.push_back(outputBeside(output, in));
  return submit(
      c10d::OpType::ALLTOALL, inputs, outputs, opts.asyncOp,
      [this, in = std::move(in), out = std::move(out), dtype = typeOf(inputs[0], "all_to_all"),
       timeout = effective(opts.timeout)](InputFeed* feed) {
        const std::vector<Span> from = spansOf(in);
        Status status =
            mooncake::alltoall(*group_, std::vector<ConstSpan>(from.begin(), from.end()),
                               spansOf(out), dtype, Deadline::after(timeout), feed);
        copyBack(status, out);
        return status;
      });
}

MooncakeBackend::WorkPtr MooncakeBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                        std::vector<int64_t>& outputSplits,
                                                        std::vector<int64_t>& inputSplits,
                                                        const c10d::AllToAllOptions& opts) {
  checkOutput(output, "the output of all_to_all_single");
  throwIfError(checkTensor(input, "the input of all_to_all_single"));
  checkSameType(output, input, "all_to_all_single");
  auto sends = elementsPerRank(input, inputSplits, size_, "input");
  auto receives = elementsPerRank(output, outputSplits, size_, "output");
  const Flat in(input);
  return submit(c10d::OpType::ALLTOALL_BASE, input, {output}, opts.asyncOp,
                [this, in, out = outputBeside(output, std::span(&in, 1)), sends = std::move(sends),
                 receives = std::move(receives), dtype = typeOf(input, "all_to_all_single"),
                 timeout = effective(opts.timeout)](InputFeed* feed) {
                  const std::vector<Span> from = cut(in.bytes(), sends, dtypeSize(dtype));
                  Status status =
                      mooncake::alltoall(*group_, std::vector<ConstSpan>(from.begin(), from.end()),
                                         cut(out.bytes(), receives, dtypeSize(dtype)), dtype,
                                         Deadline::after(timeout), feed);
                  if (status.ok()) out.copyBack();
                  return status;
                });
}

MooncakeBackend::WorkPtr MooncakeBackend::barrier(const c10d::BarrierOptions& opts) {
  return submit(c10d::OpType::BARRIER, {}, {}, opts.asyncOp,
                [this, timeout = effective(opts.timeout)] {
                  return mooncake::barrier(*group_, Deadline::after(timeout));
                });
}

void MooncakeBackend::checkMessage(c10d::OpType type, const std::vector<at::Tensor>& tensors,
                                   int peer, int tag) const {
  const bool isSend = type == c10d::OpType::SEND;
  const char* name = isSend ? "send" : "recv";
  const at::Tensor& tensor = only(tensors, name);
  const char* what = isSend ? "the tensor of send" : "the tensor of recv";
  throwIfError(checkDense(tensor, what));
  if (!isSend) refuseOwnOverlap(tensor, what);
  if (peer != PointToPoint::kAnySource) {
    if (peer < 0 || peer >= size_)
      refuse(std::string(name) + ": rank " + std::to_string(peer) + " is not in a group of " +
             std::to_string(size_));
    if (peer == rank_)
      refuse(std::string(name) + ": rank " + std::to_string(peer) + " is this rank itself");
  }
  if (tag < 0) refuse(std::string(name) + ": the tag " + std::to_string(tag) + " is negative");
}

std::shared_ptr<MessageMemory> MooncakeBackend::memoryOf(const at::Tensor& tensor) const {
  return std::make_shared<MessageMemory>(tensor, completions_);
}

c10::intrusive_ptr<MessageWork> MooncakeBackend::start(
    c10d::OpType type, std::shared_ptr<MessageMemory> memory, int peer, int tag,
    const std::shared_ptr<MessageStaging>& staging) {
  const Deadline until = deadline(options_.messageTimeout.value_or(options_.timeout));
  const uint64_t key = hooks_->newKey();
  const Profile profile = profileOf(options_.name, type, memory->tensor());
  PointToPoint& messages = messages_->messages();
  PointToPoint::HasData hasData;
  MessageDevice device;
  if (staging) {
    hasData = [staging] { return staging->hasData(); };
    device = staging->device();
  }
  auto message = type == c10d::OpType::SEND
                     ? messages.send(memory->bytes(), peer, uint32_t(tag), until, tellingOf(key),
                                     memory, std::move(hasData), std::move(device))
                     : messages.receive(memory->place(), peer, uint32_t(tag), until, tellingOf(key),
                                        memory, std::move(device));
  auto work = c10::make_intrusive<MessageWork>(rank_, options_.capacity, type, messages_, message,
                                               memory, profile, key);
  if (staging) settleWhenFinished(work, staging);
  // If the caller drops the work, the data must still reach its tensor.
  if (type != c10d::OpType::SEND && memory->isCopy()) {
    if (work->finished()) {
      work->takeOverQuietly();
    } else {
      messages_->whenFinished(message, [work] { work->takeOverQuietly(); });
    }
  }
  if (work->finished() && !messages.owes()) return work;
  if (const Status watched = messages_->watch(); !watched.ok()) {
    work->cancel(watched.error());
    throwError(watched.error());
  }
  return work;
}

void MooncakeBackend::settleWhenFinished(const c10::intrusive_ptr<MessageWork>& work,
                                         const std::shared_ptr<MessageStaging>& staging) {
  staging->watch(work);
  messages_->settleWhenFinished(work->message(), [staging] {
    try {
      staging->settle();
    } catch (const std::exception&) {  // of torch. wait() copies again, and raises
      staging->release();
    }
  });
}

MooncakeBackend::WorkPtr MooncakeBackend::post(c10d::OpType type, std::vector<at::Tensor>& tensors,
                                               int peer, int tag) {
  refuseInForkedChild();
  // The call of a message on a device has no other staging.
  const auto staging = std::static_pointer_cast<MessageStaging>(Staging::takeCurrent());
  return withinBatch([&]() -> WorkPtr {
    checkMessage(type, tensors, peer, tag);
    if (!staging) throwIfError(checkTensor(tensors[0], "the tensor of a message"));
    if (const auto batch = coalescing_.current()) {
      return Coalescing::keep(
          batch, rank_,
          {.type = type, .tensor = tensors[0], .peer = peer, .tag = tag, .staging = staging});
    }
    return start(type, memoryOf(tensors[0]), peer, tag, staging);
  });
}

MooncakeBackend::WorkPtr MooncakeBackend::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  return post(c10d::OpType::SEND, tensors, to, tag);
}

MooncakeBackend::WorkPtr MooncakeBackend::recv(std::vector<at::Tensor>& tensors, int from,
                                               int tag) {
  return post(c10d::OpType::RECV, tensors, from, tag);
}

MooncakeBackend::WorkPtr MooncakeBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return post(c10d::OpType::RECVANYSOURCE, tensors, PointToPoint::kAnySource, tag);
}

}  // namespace mooncake
