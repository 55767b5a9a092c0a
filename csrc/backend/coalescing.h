#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/mutex.h"

namespace mooncake {

class MessageCopies;

// Blocks between startCoalescing() and endCoalescing(). Each thread has its own: the calls of
// another thread never land in it.
class Coalescing {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Calls of one block, used by the thread that began it.
  struct Batch {
    struct KeptMessage {
      c10d::OpType type;
      at::Tensor tensor;
      int peer;
      int tag;
      std::shared_ptr<MessageCopies> copies;  // null: the tensor is the program's own
      size_t place = 0;                       // of its work in `works`; keep() sets it
    };
    std::vector<KeptMessage> messages;
    std::vector<WorkPtr> works;            // in the order of the calls; null: a kept message
    std::exception_ptr error;              // the first
    std::shared_ptr<void> devices;         // of the calls with tensors of devices: see DeviceCalls
    std::atomic<bool> isAbandoned{false};  // a thread waited for one of its messages
  };

  // Keeps a message for the end of its batch, and returns a work that stands for it.
  static WorkPtr keep(const std::shared_ptr<Batch>& batch, int rank, Batch::KeptMessage message);

  // Runs a call that torch makes within a block. Keeps its error for the end of the block, which
  // raises it.
  template <typename Call>
  WorkPtr within(Call&& call) {
    const auto batch = current();
    if (!batch) return call();
    try {
      return call();
    } catch (...) {
      if (!batch->error) batch->error = std::current_exception();
      return nullptr;
    }
  }
  // Adds the work of a call to the calling thread's batch, if there is one, and returns it.
  WorkPtr add(WorkPtr work) {
    if (const auto batch = current()) batch->works.push_back(work);
    return work;
  }

  // Begins a block of the calling thread. An earlier one that did not end is dropped.
  void begin();
  // Returns the calling thread's batch; null outside of a block.
  std::shared_ptr<Batch> current();
  // Ends the block of the calling thread, and returns its batch; null outside of a block.
  std::shared_ptr<Batch> end();

 private:
  std::atomic<size_t> open_{0};  // number of blocks; 0: no lock is taken
  Mutex mutex_;
  // By the number of the thread.
  std::map<uint64_t, std::shared_ptr<Batch>> batches_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
