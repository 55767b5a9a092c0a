#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "transfer/codes.h"
#include "transfer/registered_memory.h"
#include "transfer/segment.h"

namespace mooncake::transfer {

enum class Opcode : uint8_t { kRead, kWrite };

// One transfer to carry out. `local` is an address of this process, `remote` one of the peer's.
struct TransferRequest {
  Opcode opcode = Opcode::kRead;
  uint64_t local = 0;
  std::shared_ptr<Segment> segment;
  uint64_t remote = 0;
  uint64_t bytes = 0;
};

// The numbers are as in transfer_engine_c.h. A transfer that is late or canceled has failed:
// programs that poll the C API take any other end for success.
enum class TaskState : uint8_t { kWaiting = 0, kPending = 1, kCompleted = 4, kFailed = 6 };

struct Task {
  TransferRequest request;
  std::shared_ptr<const RegisteredBuffer> memory;  // holds `local` until the transfer ends
  std::atomic<TaskState> state{TaskState::kWaiting};
  // The peer was asked for its registrations anew. Done once at most.
  bool hasRefreshed = false;
};

// Transfers submitted together. Any thread may read the state; one thread at a time submits.
class Batch {
 public:
  Batch(uint64_t id, size_t capacity) : id(id), capacity(capacity), tasks(new Task[capacity]) {}

  const uint64_t id;  // from 1 on
  const size_t capacity;
  const std::unique_ptr<Task[]> tasks;
  std::atomic<size_t> submitted{0};
  std::atomic<size_t> ended{0};  // tasks; a driver's last access to the batch increments it
  std::atomic<size_t> failed{0};
  // Guarded by the TaskQueue's mutex.
  size_t next = 0;  // index of the first task that no driver has claimed
  bool isQueued = false;

  Deadline deadline() const { return Deadline::at(Clock::time_point(Clock::duration(deadline_))); }
  void extend(Deadline to) {
    if (to.when().time_since_epoch().count() > deadline_)
      deadline_ = to.when().time_since_epoch().count();
  }
  bool isOver() const {
    return ended.load(std::memory_order_acquire) == submitted.load(std::memory_order_acquire);
  }

 private:
  std::atomic<Clock::rep> deadline_{0};
};

// The batches of an engine, by id. Each stays until release(). All of them together hold at most
// kMostTasks tasks. Any thread.
class BatchTable {
 public:
  static constexpr size_t kMostTasks = size_t(1) << 20;

  // Null if `capacity` is 0, or if the table would hold more than kMostTasks.
  std::shared_ptr<Batch> add(size_t capacity);
  std::shared_ptr<Batch> find(uint64_t id) const;
  // kInvalid: no batch has this id. kBatchBusy: transfers of the batch are still under way.
  Code release(uint64_t id);
  std::vector<std::shared_ptr<Batch>> all() const;

 private:
  mutable Mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Batch>> batches_ GUARDED_BY(mutex_);
  uint64_t lastId_ GUARDED_BY(mutex_) = 0;
  size_t tasks_ GUARDED_BY(mutex_) = 0;
};

}  // namespace mooncake::transfer
