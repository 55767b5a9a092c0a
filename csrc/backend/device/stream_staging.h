#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "backend/device/group_streams.h"
#include "backend/device/staging.h"
#include "base/mutex.h"

namespace mooncake {

// Enqueues everything at the call. The stream tells the host by a word that the inputs are there,
// and waits for a word of the host before it copies the outputs. So no caller waits on the host.
class StreamStaging final : public Staging {
 public:
  // The streams must have words.
  StreamStaging(const std::shared_ptr<GroupStreams>& streams, std::chrono::milliseconds limit)
      : Staging(streams, streams->collectives(), limit),
        copied_(std::in_place, stream().device_type()),
        done_(std::in_place, stream().device_type()) {}
  ~StreamStaging() override;

  void mark() override;
  bool isOrdered() const override { return true; }
  Status fetch(Group& group) override;
  Status fetchAgain(Group& group) override;
  void giveBack() override;
  // The outputs keep their contents by a rescue: see Rescues. Does not wait.
  void abandon() override;
  bool isOver() const override { return done_->query(); }
  void block() override { done_->block(callersStream()); }
  void synchronize() const override { done_->synchronize(); }

  // Returns the number of the next operation on the stream of the words. Waits on the host while too
  // many are under way, at most for `limit`. Throws.
  static uint32_t nextNumber(StreamWords& words, const c10::Stream& stream,
                             std::chrono::milliseconds limit);

 private:
  StreamWords& words() const { return *streams().words(); }
  void enqueueAll();

  uint32_t number_ = 0;
  bool isMarked_ = false;  // the number is taken, and the stream may wait for it
  // None in the destructor: see ~Staging().
  std::optional<c10::Event> copied_;  // the inputs are there
  std::optional<c10::Event> done_;
  Mutex mutex_;
  bool isEnded_ GUARDED_BY(mutex_) = false;
};

}  // namespace mooncake
