#pragma once

#include <atomic>
#include <chrono>
#include <mutex>

#include "backend/device/staging.h"

namespace mooncake {

// Enqueues the copies as the operation begins and ends, so that only the host must be waited for.
// An operation reads the outputs of the one before it, because its copies are enqueued later.
class HostStaging final : public Staging {
 public:
  HostStaging(const c10::Stream& stream, std::chrono::milliseconds limit)
      : Staging(stream, limit), done_(stream.device_type()) {}

  void mark() override { markReached(); }
  bool isOrdered() const override { return false; }
  Status fetch(Group& group) override;
  void giveBack() override;
  void abandon() override;
  bool isOver() const override;
  void block() const override;
  void synchronize() const override;

 private:
  mutable std::mutex mutex_;  // guards everything below
  bool isEnded_ = false;      // given back or abandoned
  bool isGiven_ = false;
  c10::Event done_;
};

}  // namespace mooncake
