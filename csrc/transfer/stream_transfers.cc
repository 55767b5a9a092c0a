#include "transfer/stream_transfers.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <utility>

#include "base/thread.h"

namespace mooncake::transfer {
namespace {

// How often the thread looks at the words. It yields in between until nothing has changed for
// kMostYielding, because a stream may be there soon.
constexpr auto kMostYielding = std::chrono::microseconds(100);
constexpr auto kPause = std::chrono::microseconds(200);

}  // namespace

Status StreamTransfers::enqueue(const MemoryOwner& device, void* handle,
                                std::vector<TransferRequest> requests) {
  Accelerator& accelerator = *device.accelerator;
  const DeviceStream stream{.device = device.device, .handle = handle};
  if (!accelerator.hasStreamWords(device.device)) {
    return {ErrorCode::kUnsupported, "streams of device " + std::to_string(device.device) + " of " +
                                         accelerator.name() +
                                         " know no words, so no transfer can follow one. "
                                         "Synchronize the stream and call transfer_sync_..."};
  }
  const auto isCapturing = accelerator.isCapturing(stream);
  if (!isCapturing.ok()) return isCapturing.status();
  if (*isCapturing) {
    return {ErrorCode::kUnsupported,
            "the stream is being recorded into a graph, and a transfer cannot be recorded. Call it "
            "outside of the capture"};
  }
  Lock lock(mutex_);
  // The words of two calls on one stream do not mix, so their transfers keep an order.
  left_.wait(mutex_, [&]() REQUIRES(mutex_) { return !isInDriver(accelerator, stream); });
  if (isStopped_) return {ErrorCode::kAborted, "the engine is closed"};
  if (!failure_.ok()) return std::exchange(failure_, Status());
  MOONCAKE_TRY(start());
  const auto block = blockOf(accelerator);
  if (!block.ok()) return block.status();
  if ((*block)->idle.empty()) {
    return {ErrorCode::kExhausted,
            std::to_string(kPairs) + " transfers on streams are under way: synchronize a stream"};
  }
  Words* const words = (*block)->idle.back();
  (*block)->idle.pop_back();
  orders_.push_back({.block = *block,
                     .words = words,
                     .number = words->released.load(std::memory_order_relaxed) + 1,
                     .stream = stream,
                     .requests = std::move(requests)});
  const auto order = std::prev(orders_.end());
  // The driver blocks while a queue of the device is full, and the thread needs the lock to release
  // the stream that fills it.
  lock.unlock();
  bool isTold = false;
  const Status enqueued = enqueueWords(*order, isTold);
  lock.lock();
  order->isEnqueued = true;
  if (!enqueued.ok()) {
    // If the stream may still write the word, the pair is not used again.
    if (!isTold) (*block)->idle.push_back(words);
    orders_.erase(order);
  }
  left_.notify_all();
  changed_.notify_one();
  return enqueued;
}

bool StreamTransfers::isInDriver(const Accelerator& accelerator, const DeviceStream& stream) const {
  return std::ranges::any_of(orders_, [&](const Order& order) {
    return !order.isEnqueued && order.block->accelerator == &accelerator &&
           order.stream.device == stream.device && order.stream.handle == stream.handle;
  });
}

Status StreamTransfers::enqueueWords(const Order& order, bool& isTold) {
  Accelerator& accelerator = *order.block->accelerator;
  MOONCAKE_TRY(accelerator.writeWord(order.stream, &order.words->told, order.number));
  isTold = true;
  return accelerator.awaitWord(order.stream, &order.words->released, order.number);
}

Result<StreamTransfers::Block*> StreamTransfers::blockOf(Accelerator& accelerator) {
  for (const auto& block : blocks_) {
    if (block->accelerator == &accelerator) return block.get();
  }
  const auto memory = accelerator.allocatePinned(kPairs * sizeof(Words));
  if (!memory.ok()) return memory.error();
  auto made = std::make_unique<Block>();
  made->accelerator = &accelerator;
  made->memory = *memory;
  auto* const words = reinterpret_cast<Words*>(memory->data());
  for (size_t i = 0; i < kPairs; ++i) made->idle.push_back(new (words + i) Words);
  return blocks_.emplace_back(std::move(made)).get();
}

Status StreamTransfers::start() {
  if (thread_.joinable()) return {};
  auto thread = startThread("mooncake-order", [this] { run(); });
  if (!thread.ok()) return thread.status();
  thread_ = std::move(*thread);
  return {};
}

void StreamTransfers::run() {
  auto changed = Clock::now();
  Lock lock(mutex_);
  while (!isStopped_) {
    if (orders_.empty()) {
      changed_.wait(mutex_, [this]() REQUIRES(mutex_) { return isStopped_ || !orders_.empty(); });
      changed = Clock::now();
      continue;
    }
    bool isNew = false;
    for (Order& order : orders_) isNew |= advance(order);
    std::erase_if(orders_, [](const Order& order) { return order.words == nullptr; });
    const auto now = Clock::now();
    if (isNew) changed = now;
    if (now - changed < kMostYielding) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    } else {
      changed_.wait_for(mutex_, kPause);
    }
  }
}

// Returns whether the order has come further. An order that has ended has no words any more.
bool StreamTransfers::advance(Order& order) {
  if (!order.isEnqueued) return false;
  if (!order.batch) {
    const uint32_t told = order.words->told.load(std::memory_order_acquire);
    if (int32_t(told - order.number) < 0) return false;
    order.batch = calls_.begin(order.requests);
    if (order.batch) return true;
    if (failure_.ok()) {
      failure_ = {ErrorCode::kInvalidArgument,
                  "an earlier transfer on a stream could not begin: the log says why"};
    }
    end(order);
    return true;
  }
  if (!order.batch->isOver()) return false;
  if (order.batch->failed != 0 && failure_.ok()) {
    failure_ = {ErrorCode::kAborted,
                "an earlier transfer on a stream has failed, and its stream went on: the log says "
                "why"};
  }
  end(order);
  return true;
}

void StreamTransfers::release(const Order& order) {
  order.words->released.store(order.number, std::memory_order_release);
}

void StreamTransfers::end(Order& order) {
  if (order.batch) calls_.release(*order.batch);
  release(order);
  order.block->idle.push_back(std::exchange(order.words, nullptr));
}

void StreamTransfers::stop() {
  {
    Lock lock(mutex_);
    isStopped_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  Lock lock(mutex_);
  for (Order& order : orders_) release(order);
  left_.wait(mutex_, [this]() REQUIRES(mutex_) {
    return std::ranges::all_of(orders_, [](const Order& order) { return order.isEnqueued; });
  });
  for (Order& order : orders_) end(order);
  orders_.clear();
  // The memory outlives the work that streams hold now.
  for (const auto& block : blocks_) block->accelerator->freePinned(block->memory);
  blocks_.clear();
}

}  // namespace mooncake::transfer
