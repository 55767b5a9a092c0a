// The transfers of an engine: on the caller's thread, or on threads of the engine.
#include <algorithm>
#include <chrono>

#include "base/mutex.h"
#include "base/thread.h"
#include "transfer/call_guard.h"
#include "transfer/transfer_engine.h"

namespace mooncake::transfer {
namespace {

constexpr size_t kMostWorkers = 4;
// After its deadline a batch ends as soon as its driver has checked it.
constexpr auto kGrace = std::chrono::seconds(10);

}  // namespace

// Adds all requests, or none if one of them is invalid.
Code TransferEngine::add(Batch& batch, std::span<const TransferRequest> requests) {
  const size_t before = batch.submitted.load(std::memory_order_relaxed);
  if (requests.size() > batch.capacity - before) {
    return fail(kTooMany, "a batch for " + std::to_string(batch.capacity) +
                              " transfers has no room for " + std::to_string(before) + " and " +
                              std::to_string(requests.size()));
  }
  uint64_t bytes = 0;
  std::vector<std::shared_ptr<const RegisteredBuffer>> buffers(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    const TransferRequest& request = requests[i];
    if (!request.segment || request.remote + request.bytes < request.remote)
      return fail(kInvalid, "a transfer without a segment, or with a range that wraps around");
    if (request.bytes != 0) buffers[i] = memory_->find(request.local, request.bytes);
    if (request.bytes != 0 && !buffers[i]) {
      return fail(kNotRegistered, "a transfer of " + std::to_string(request.bytes) +
                                      " bytes to or from memory that is not registered here");
    }
    if (buffers[i] && request.opcode == Opcode::kRead && !buffers[i]->isWritable)
      return fail(kInvalid, "a read into memory that is read-only in this process");
    bytes += request.bytes;
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    Task& task = batch.tasks[before + i];
    task.request = requests[i];
    task.memory = std::move(buffers[i]);
  }
  batch.extend(deadlineOf(bytes));
  batch.submitted.store(before + requests.size(), std::memory_order_release);
  return kGood;
}

Code TransferEngine::transfer(std::span<const TransferRequest> requests) {
  const Call call(*this);
  if (!call) return kContext;
  if (requests.empty()) return kGood;
  Batch batch(0, requests.size());
  if (const Code code = add(batch, requests); code != kGood) return code;
  TaskQueue queue;
  Driver driver(*driverContext_, queue);
  {
    Lock lock(mutex_);
    drivers_.insert(&driver.bell());
  }
  queue.push(&batch);
  driver.run();
  {
    Lock lock(mutex_);
    drivers_.erase(&driver.bell());
  }
  return batch.failed == 0 ? kGood : kInvalid;
}

std::shared_ptr<Batch> TransferEngine::allocateBatch(size_t capacity) {
  const Call call(*this);
  if (!call) return nullptr;
  auto batch = batches_.add(capacity);
  if (!batch) {
    (void)fail(kTooMany, "no batch of " + std::to_string(capacity) +
                             " transfers: one engine holds " +
                             std::to_string(BatchTable::kMostTasks) + " at a time");
  }
  return batch;
}

Code TransferEngine::submit(const std::shared_ptr<Batch>& batch,
                            std::span<const TransferRequest> requests,
                            std::optional<Notification> notification) {
  const Call call(*this);
  if (!call) return kContext;
  if (requests.empty()) return kGood;
  if (const Status started = startWorkers(); !started.ok())
    return fail(kMemory, started.error().message);
  if (const Code code = add(*batch, requests); code != kGood) return code;
  queue_.push(batch.get());
  slots_->wake();
  if (notification) {
    const auto notifyAfter = [this, batch, name = requests.front().segment->name(),
                              what = std::move(*notification)] {
      if (await(*batch) == kGood) (void)notify(name, what);
    };
    // If no thread can be started, the caller waits for the transfers.
    if (!followUps_.post(notifyAfter).ok()) notifyAfter();
  }
  return kGood;
}

std::shared_ptr<Batch> TransferEngine::beginBatch(std::span<const TransferRequest> requests) {
  auto batch = allocateBatch(std::max<size_t>(1, requests.size()));
  if (!batch || submit(batch, requests) == kGood) return batch;
  (void)release(batch->id);
  return nullptr;
}

Status TransferEngine::transferOnStream(void* stream, std::vector<TransferRequest> requests) {
  const Call call(*this);
  if (!call) return {ErrorCode::kAborted, "the engine is closed"};
  MemoryOwner device;
  for (const TransferRequest& request : requests) {
    if (request.bytes == 0) continue;
    const auto buffer = memory_->find(request.local, request.bytes);
    if (!buffer) {
      return {ErrorCode::kInvalidArgument,
              "a transfer on a stream from or to memory that is not "
              "registered with this engine: register it first"};
    }
    if (!device) device = buffer->owner;
  }
  if (device) return onStreams_.enqueue(device, stream, std::move(requests));
  return {
      ErrorCode::kInvalidArgument,
      "a transfer on a stream whose buffers are memory of the host: the stream's device is that "
      "of a buffer. Synchronize the stream and call transfer_sync_..."};
}

// Fails only if no worker at all can be started.
Status TransferEngine::startWorkers() {
  Lock lock(mutex_);
  if (!workers_.empty() || isClosed_) return {};
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  for (size_t i = 0; i < std::min(cores, kMostWorkers); ++i) {
    auto worker = startThread("mooncake-xfer", [this] { work(); });
    if (!worker.ok()) return workers_.empty() ? worker.error() : Status();
    workers_.push_back(std::move(*worker));
  }
  return {};
}

void TransferEngine::work() {
  Driver driver(*driverContext_, queue_);
  {
    Lock lock(mutex_);
    drivers_.insert(&driver.bell());
  }
  while (queue_.await()) driver.run();
  driver.run();  // cancels the remaining tasks
  Lock lock(mutex_);
  drivers_.erase(&driver.bell());
}

Code TransferEngine::await(const Batch& batch) {
  const Call call(*this);
  if (!call) return kContext;
  const Interrupt never;
  const Waiter waiter{ended_, never, 0, Deadline::at(batch.deadline().when() + kGrace),
                      SpinPolicy::forMessages()};
  if (waiter.until([&] { return batch.isOver(); }) != WaitResult::kReady)
    return fail(kBatchBusy, "a batch is not over after its deadline");
  return batch.failed == 0 ? kGood : kInvalid;
}

Code TransferEngine::release(uint64_t id) {
  const Code code = batches_.release(id);
  if (code == kInvalid) return fail(code, "there is no batch " + std::to_string(id));
  if (code != kGood) return fail(code, "batch " + std::to_string(id) + " is not over");
  return kGood;
}

}  // namespace mooncake::transfer
