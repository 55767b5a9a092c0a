#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

#include "engine/stream/wire.h"
#include "engine/transfer.h"

namespace mooncake {

// The gets and writes of one connection that wait for their answer. add() may run on any thread;
// the receiving side's calls run under the connection's receive lock, so that a target that was
// cancelled is never written again.
class TransferTable {
 public:
  struct Transfer {
    std::byte* target = nullptr;  // of a get
    uint64_t bytes = 0;
    uint64_t received = 0;
    // Null: cancelled, its answer is still to come and will be dropped.
    Completion* completion = nullptr;
    uint32_t generation = 0;  // tells a late answer to an earlier transfer of the same slot
    bool used = false;
    bool isWrite = false;
    bool isOfProgram = false;  // the target
    // Of a write: all of it has been handed to the socket. Before that an answer is none.
    bool hasLeft = false;
    WriteRequest pulled;  // what to send if the peer cannot pull it
    MemoryRegion source;  // of a write that the peer pulls: it may for so long
  };

  // They begin the completion and return the request's number. kExhausted when kMaxTransfers are
  // under way.
  Result<uint64_t> add(const GetRequest& request);
  Result<uint64_t> add(const WriteRequest& request);
  Result<uint64_t> addPull(const WriteRequest& request, MemoryRegion source);

  // Null when no such request is under way. The pointer holds until finish().
  Transfer* find(uint64_t request);
  void received(Transfer& get, uint64_t bytes);
  // All of that write has been handed to the socket.
  void hasLeft(uint64_t write);
  // Whether an answer to it may come now.
  bool isAnswerable(const Transfer& transfer);
  // What to send of a pull that the peer cannot make. No completion: nothing, it was cancelled.
  WriteRequest sendInstead(uint64_t pull);
  void finish(uint64_t request, ErrorCode code);
  // Ends a transfer whose memory here is not there; its slot stays taken until the answer has come.
  void fail(uint64_t request, ErrorCode code);
  // Ends the transfers that count at this completion; their slots stay taken until the answers have
  // come.
  void cancel(const Completion* completion, ErrorCode code);
  void cancelAll(ErrorCode code);
  // The connection is another one: no answer to an earlier request comes any more.
  void forget();

  // Whether no answer is still to come, also of what was cancelled.
  bool isEmpty();
  uint64_t unansweredBytes() const { return unanswered_.load(std::memory_order_relaxed); }

 private:
  Result<uint64_t> add(Transfer transfer);
  template <typename Which>
  void endThose(Which&& which, ErrorCode code);

  std::mutex mutex_;  // guards transfers_ and free_; the targets belong to the receiving side
  std::deque<Transfer> transfers_;
  std::vector<uint32_t> free_;
  std::atomic<uint64_t> unanswered_{0};
};

}  // namespace mooncake
