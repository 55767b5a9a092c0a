#pragma once

#include <atomic>
#include <deque>
#include <vector>

#include "base/mutex.h"
#include "engine/contract/transfer.h"
#include "wires/stream/wire.h"

namespace mooncake {

// The gets and writes of one connection that wait for their answers. add() may run on any thread.
// The receiving side's calls run under the connection's receive lock, so a cancelled target is
// never written again.
class TransferTable {
 public:
  struct Transfer {
    std::byte* target = nullptr;  // for a get only
    uint64_t bytes = 0;
    uint64_t received = 0;
    // Null: cancelled. Its answer is still to come and will be dropped.
    Completion* completion = nullptr;
    uint32_t generation = 0;  // tells a late answer from one to a later transfer in the same slot
    bool used = false;
    bool isWrite = false;
    bool isOfProgram = false;  // the target may be unmapped
    MemoryOwner owner = {};    // the device of a get's target
    bool isAnswered = false;   // ends as soon as its copies to the device have ended
    Error failure = {};        // the cause, if a copy from or to a device has failed
    // For a write: all of it has been handed to the socket. An answer before that is a protocol
    // error.
    bool hasLeft = false;
    WriteRequest pulled;  // the write to send if the peer cannot pull it
    MemoryRegion source;  // for a pull: lets the peer read until the pull has ended
  };

  // Begin the completion and return the request's number. kExhausted: kMaxTransfers are under way.
  Result<uint64_t> add(const GetRequest& request);
  Result<uint64_t> add(const WriteRequest& request);
  Result<uint64_t> addPull(const WriteRequest& request, MemoryRegion source);

  // Null: no such request is under way. The pointer is valid until finish().
  Transfer* find(uint64_t request);
  void received(Transfer& get, uint64_t bytes);
  // Notes that all of the write has been handed to the socket.
  void hasLeft(uint64_t write);
  // Returns whether an answer to it may come now.
  bool isAnswerable(const Transfer& transfer);
  // Returns the write to send if the peer cannot pull. No completion: it was cancelled, send
  // nothing.
  WriteRequest sendInstead(uint64_t pull);
  void finish(uint64_t request, ErrorCode code);
  // Notes that a copy from or to a device has failed. The transfer ends with that, and not before
  // finish(): other copies of it may be under way.
  void failLater(uint64_t request, const Error& failure);
  // Ends a transfer whose memory here is not mapped. Its slot stays taken until the answer has
  // come.
  void fail(uint64_t request, ErrorCode code);
  // Withdraw the transfers that count at this completion, or all of them: no byte of an answer is
  // written any more. The caller ends the completions that are returned, once no copy of theirs is
  // under way. The slots stay taken until the answers have come.
  std::vector<Completion*> withdraw(const Completion* completion);
  std::vector<Completion*> withdrawAll();
  void cancelAll(ErrorCode code);
  // For a new connection: no answer to an earlier request comes any more.
  void forget();

  // Returns whether no answer is awaited, not even for a cancelled transfer.
  bool isEmpty();
  uint64_t unansweredBytes() const { return unanswered_.load(std::memory_order_relaxed); }

 private:
  Result<uint64_t> add(Transfer transfer);
  template <typename Which>
  std::vector<Completion*> withdrawThose(Which&& which) EXCLUDES(mutex_);

  Mutex mutex_;  // the targets belong to the receiving side
  std::deque<Transfer> transfers_ GUARDED_BY(mutex_);
  std::vector<uint32_t> free_ GUARDED_BY(mutex_);
  std::atomic<uint64_t> unanswered_{0};
};

}  // namespace mooncake
