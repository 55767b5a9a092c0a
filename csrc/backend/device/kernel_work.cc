#include "backend/device/kernel_work.h"

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include <c10/core/StreamGuard.h>

#include "backend/errors.h"
#include "backend/signals.h"

namespace mooncake {

KernelWork::KernelWork(int rank, c10d::OpType type, int capacity,
                       std::shared_ptr<PeerCollectives> peers, Operation operation,
                       std::shared_ptr<GroupStreams> streams, std::vector<at::Tensor> outputs)
    : Work(rank, type),
      capacity_(capacity),
      peers_(std::move(peers)),
      operation_(std::move(operation)),
      streams_(std::move(streams)),
      outputs_(std::move(outputs)),
      end_(peers_->guard(), operation_.number, streams_->collectives()) {}

KernelWork::~KernelWork() {
  if (operation_.hasSplits) peers_->misfits().forget(operation_.number);
}

bool KernelWork::isCompleted() { return end_.isOver(); }

bool KernelWork::isSuccess() const { return end_.isDone() && !ownError(); }

bool KernelWork::isRootLost() const {
  return operation_.root >= 0 &&
         !(peers_->guard().contributors(operation_.number) >> operation_.root & 1);
}

std::exception_ptr KernelWork::ownError() const {
  if (isRootLost()) return toException(peers_->guard().rootLost(operation_.root));
  if (!operation_.hasSplits) return nullptr;
  const auto misfit = peers_->misfits().of(operation_.number);
  return misfit ? toException(*misfit) : nullptr;
}

std::exception_ptr KernelWork::exception() const {
  if (auto error = ownError()) {
    *isRaised_ = true;
    return error;
  }
  const Status status = KernelEnd::statusOf(peers_->guard(), operation_.number);
  return status.ok() ? nullptr : toException(status.error());
}

std::exception_ptr KernelWork::takeEarlier() const {
  const UnseenErrors::Unseen& earlier = operation_.earlier;
  return earlier.error && !earlier.isRaised->exchange(true) ? earlier.error : nullptr;
}

bool KernelWork::wait(std::chrono::milliseconds timeout) {
  end_.block();
  // The error of this operation, if there is one, stays for the next call.
  if (const auto error = takeEarlier()) std::rethrow_exception(error);
  if (const auto error = exception()) std::rethrow_exception(error);
  if (!operation_.blocksHost) return true;
  end_.await(Deadline::after(timeout == kNoTimeout ? std::chrono::milliseconds::max() : timeout));
  if (const auto error = exception()) std::rethrow_exception(error);
  return true;
}

// False: the group has ended before. All its waits are bounded, so this one is.
bool KernelWork::awaitKernel() const {
  const WaitInterrupt interrupt;
  while (!peers_->guard().hasEnded(operation_.number)) {
    if (!peers_->guard().usable().ok()) return peers_->guard().hasEnded(operation_.number);
    std::this_thread::sleep_for(KernelEnd::kPause);
    Interruptible::look();
    interrupt.rethrow();
  }
  return true;
}

KernelWork::Verdict KernelWork::verdict() const {
  Verdict verdict;
  if (!awaitKernel()) return verdict;
  const PeerGuard& guard = peers_->guard();
  const uint64_t ranks = guard.contributors(operation_.number);
  const uint64_t before = guard.contributors(operation_.number - 1);
  for (int rank = 0; rank < peers_->size(); ++rank) {
    const uint64_t bit = uint64_t(1) << rank;
    (ranks & bit ? verdict.contributors : verdict.failedRanks).push_back(rank);
    if (before & ~ranks & bit) verdict.lostRanks.push_back(rank);
  }
  verdict.epoch = guard.epochOf(ranks);
  return verdict;
}

c10::intrusive_ptr<c10::ivalue::Future> KernelWork::getFuture() {
  const auto type = c10::ListType::create(c10::TensorType::get());
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      type, std::vector<c10::Device>{streams_->collectives().device()});
  auto error = takeEarlier();
  if (!error) error = exception();
  if (error) {
    future->setError(error);
    return future;
  }
  // The future records the position of the current stream.
  const c10::StreamGuard on(streams_->callbacks());
  end_.block();
  future->markCompleted(c10::IValue(outputs_));
  return future;
}

}  // namespace mooncake
