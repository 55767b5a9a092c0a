#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "backend/device/staging.h"
#include "base/mutex.h"

namespace mooncake {

// Enqueues the copies as the operation begins and ends, so that only the host must be waited for.
// An operation reads the outputs of the one before it, because its copies are enqueued later. No copy
// is enqueued before it can run at once, so it holds up no other stream.
class HostStaging : public Staging {
 public:
  HostStaging(std::shared_ptr<GroupStreams> streams, const c10::Stream& stream,
              std::chrono::milliseconds limit)
      : Staging(std::move(streams), stream, limit), done_(std::in_place, stream.device_type()) {}
  ~HostStaging() override;

  void mark() override;
  bool isOrdered() const override { return false; }
  Status fetch(Group& group) override;
  Status fetchAgain(Group& group) override { return fetchAgainOn(stream(), group); }
  void giveBack() override;
  void abandon() override;
  bool isOver() const override;
  void block() override;
  void synchronize() const override;

 protected:
  // Enqueues the copies of the results.
  virtual void copyResults() REQUIRES(mutex_) { copyOut(); }
  bool isGiven() const;
  // The results were given back, and the device has them.
  bool isDone() const;

 private:
  std::atomic<bool> isReached_ = false;  // the caller's stream has come to the operation
  mutable Mutex mutex_;
  bool isEnded_ GUARDED_BY(mutex_) = false;  // given back or abandoned
  bool isGiven_ GUARDED_BY(mutex_) = false;
  std::optional<c10::Event> done_ GUARDED_BY(mutex_);  // none in the destructor
};

}  // namespace mooncake
