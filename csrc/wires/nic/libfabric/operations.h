#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <rdma/fabric.h>
#include <sys/uio.h>
#include <vector>

#include "wires/nic/nic.h"

namespace mooncake {

// One operation, from the call that begins it to the provider's last report on it.
struct NicOperation {
  enum class State : uint8_t {
    kFree,
    kQueued,     // begun, but not taken by the provider yet
    kUnderWay,   // the provider has it
    kAbandoned,  // ended for its owner; the provider still has it
  };

  fi_context2 provider{};  // first: the provider returns its address
  State state = State::kFree;
  NicCompletion::Kind kind = NicCompletion::Kind::kSent;
  void* context = nullptr;
  NicPeer peer = 0;    // not for receives
  uint64_t begun = 0;  // on the card's own clock
  uint64_t bytes = 0;
  // The request to the provider.
  std::array<iovec, 2> pieces{};
  std::array<void*, 2> descriptors{};
  size_t pieceCount = 0;
  uint64_t remoteAddress = 0;
  uint64_t remoteKey = 0;
};

// A fixed number of operations, so the provider never gets more than it has room for. An operation
// that the provider never ends keeps its place, so its late completion is not taken for another
// one's.
class NicOperations {
 public:
  explicit NicOperations(size_t count)
      : all_(std::make_unique<NicOperation[]>(count)), count_(count) {
    free_.reserve(count);
    for (size_t i = count; i > 0; --i) free_.push_back(&all_[i - 1]);
  }

  NicOperation* take() {  // null: all are in use
    if (free_.empty()) return nullptr;
    NicOperation* operation = free_.back();
    free_.pop_back();
    return operation;
  }
  void giveBack(NicOperation& operation) {
    operation.state = NicOperation::State::kFree;
    free_.push_back(&operation);
  }
  // Null: the context is not ours.
  NicOperation* find(const void* provider) const {
    const auto at = reinterpret_cast<uintptr_t>(provider);
    const auto first = reinterpret_cast<uintptr_t>(all_.get());
    const bool isOurs = at >= first && at < first + count_ * sizeof(NicOperation) &&
                        (at - first) % sizeof(NicOperation) == 0;
    return isOurs ? &all_[(at - first) / sizeof(NicOperation)] : nullptr;
  }
  std::span<NicOperation> all() { return {all_.get(), count_}; }
  size_t inUse() const { return count_ - free_.size(); }

 private:
  std::unique_ptr<NicOperation[]> all_;
  size_t count_;
  std::vector<NicOperation*> free_;
};

}  // namespace mooncake
