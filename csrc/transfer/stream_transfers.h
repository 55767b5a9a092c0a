#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "device/memory_owner.h"
#include "transfer/batch.h"

namespace mooncake::transfer {

// Transfers in the order of a program's stream: they begin when the stream comes to them, and the
// stream goes on when they are over. The host does not wait. Stream and host tell each other by words
// in pinned memory, which the thread mooncake-order looks at. Any thread.
class StreamTransfers {
 public:
  struct Calls {
    // Begins the transfers. Null: they cannot begin, and the log says why.
    std::function<std::shared_ptr<Batch>(std::span<const TransferRequest>)> begin;
    std::function<void(const Batch&)> release;
  };
  explicit StreamTransfers(Calls calls) : calls_(std::move(calls)) {}
  ~StreamTransfers() { stop(); }

  // Enqueues them on a stream of the device. First returns the failure of an earlier call, once.
  // kUnsupported: streams of the device know no words, or this one is being recorded into a graph.
  Status enqueue(const MemoryOwner& device, void* stream, std::vector<TransferRequest> requests);
  // Lets all streams go on and ends the thread. Transfers that have not begun never do.
  void stop();

 private:
  // A pair of words. They only count upwards, so a stream that still waits for an earlier number
  // passes when the pair is used again.
  struct alignas(64) Words {
    StreamWord told{0};      // by the stream: it has come here
    StreamWord released{0};  // by the host: the transfers are over
  };
  // Pinned memory of one accelerator. It lives as long as this object.
  struct Block {
    Accelerator* accelerator = nullptr;
    std::span<std::byte> memory;
    std::vector<Words*> idle;
  };
  struct Order {
    Block* block = nullptr;
    Words* words = nullptr;
    uint32_t number = 0;
    DeviceStream stream;
    std::vector<TransferRequest> requests;
    bool isEnqueued = false;         // false: a call is in the driver, and only that call ends it
    std::shared_ptr<Batch> batch{};  // null: the stream has not come here
  };
  static constexpr size_t kPairs = 256;  // in one block

  Result<Block*> blockOf(Accelerator& accelerator) REQUIRES(mutex_);
  Status start() REQUIRES(mutex_);
  bool isInDriver(const Accelerator& accelerator, const DeviceStream& stream) const
      REQUIRES(mutex_);
  static Status enqueueWords(const Order& order, bool& isTold);
  void run() EXCLUDES(mutex_);
  bool advance(Order& order) REQUIRES(mutex_);
  static void release(const Order& order);
  void end(Order& order) REQUIRES(mutex_);

  const Calls calls_;
  Mutex mutex_;
  Condition changed_;
  Condition left_;  // a call has left the driver
  std::vector<std::unique_ptr<Block>> blocks_ GUARDED_BY(mutex_);
  std::list<Order> orders_ GUARDED_BY(mutex_);
  Status failure_ GUARDED_BY(mutex_);  // of an order that has ended
  bool isStopped_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace mooncake::transfer
