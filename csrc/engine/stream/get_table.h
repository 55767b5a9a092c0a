#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

#include "engine/stream/wire.h"
#include "engine/transfer.h"

namespace mooncake {

// The gets of one connection that wait for their answer. add() may run on any thread; the receiving
// side's calls run under the connection's receive lock, so that a target that was cancelled is
// never written again.
class GetTable {
 public:
  struct Get {
    std::byte* target = nullptr;
    uint64_t bytes = 0;
    uint64_t received = 0;
    Completion* completion =
        nullptr;              // null: cancelled, its answer is still to come and will be dropped
    uint32_t generation = 0;  // tells a late answer to an earlier get of the same slot
    bool used = false;
  };

  // Begins the completion and returns the request's number. kExhausted when kMaxGets are under way.
  Result<uint64_t> add(const GetRequest& request);

  // Null when no such request is under way. The pointer holds until finish().
  Get* find(uint64_t request);
  void received(Get& get, uint64_t bytes);
  void finish(uint64_t request, ErrorCode code);
  // Ends the gets that count at this completion; their slots stay taken until the answers have
  // come.
  void cancel(const Completion* completion, ErrorCode code);
  void cancelAll(ErrorCode code);
  // The connection is another one: no answer to an earlier request comes any more.
  void forget();

  uint64_t unansweredBytes() const { return unanswered_.load(std::memory_order_relaxed); }

 private:
  static void endOne(Get& get, ErrorCode code);

  std::mutex mutex_;  // guards gets_ and free_; the targets belong to the receiving side
  std::deque<Get> gets_;
  std::vector<uint32_t> free_;
  std::atomic<uint64_t> unanswered_{0};
};

}  // namespace mooncake
