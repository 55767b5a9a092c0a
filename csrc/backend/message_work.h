#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/message_memory.h"
#include "backend/profile.h"
#include "collectives/point_to_point.h"

namespace mooncake {

class Completions;
class MessageDriver;

// A send or a receive that was called.
class MessageWork : public c10d::Work {
 public:
  // `memory` holds the message's bytes; null where it has none. `capacity`: ranks that the group
  // may grow to. `key`: see CompletionHooks.
  MessageWork(int rank, int capacity, c10d::OpType type, std::shared_ptr<MessageDriver> driver,
              std::shared_ptr<Message> message, std::shared_ptr<MessageMemory> memory,
              const Profile& profile, uint64_t key);
  ~MessageWork() override;

  bool finished() const { return message_->finished(); }
  bool isCompleted() override;
  bool isSuccess() const override { return message_->finished() && message_->status().ok(); }
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  // The tensor of a send or a receive; empty for a window's call.
  std::vector<at::Tensor> result() override;
  int sourceRank() const override;
  // Ends it with this error, unless it is finished.
  void cancel(const Error& why);
  // If the message ended because its peer is lost: the peer, or all other ranks for a receive from
  // any source. Else empty.
  std::vector<int> failedRanks() const;
  // True once the message has ended well, or has lost its peer quietly: a receive then gives zeros.
  bool hasResult() const { return isSuccess() || (message_->finished() && isLostQuietly()); }
  // Ends the call's event for torch's profiler, if the end of the message has not done so.
  void endProfile();
  const std::shared_ptr<Message>& message() const { return message_; }
  // Copies a finished receive to its tensor. If torch throws, the caller's own wait() raises that.
  void takeOverQuietly();
  int capacity() const { return capacity_; }
  // Without `override`: c10d::Work has it since torch 2.15 only.
  uint64_t getCompletionKey() const { return key_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  const std::shared_ptr<Completions>& completions() const;

 private:
  // Ends a finished message, once: ends the profiler's event, and copies a receive to a tensor that
  // is not contiguous. If the peer is lost quietly, the tensor becomes zeros.
  void takeOver();
  bool isLostQuietly() const;

  const int capacity_;
  const uint64_t key_;
  const std::shared_ptr<MessageDriver> driver_;
  const std::shared_ptr<Message> message_;
  const std::shared_ptr<MessageMemory> memory_;
  std::once_flag taken_;
  std::atomic<bool> isProfileEnded_{false};
};

}  // namespace mooncake
