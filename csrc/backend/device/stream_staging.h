#pragma once

#include <chrono>
#include <memory>
#include <mutex>

#include "backend/device/group_streams.h"
#include "backend/device/staging.h"

namespace mooncake {

// Enqueues everything at the call. The stream tells the host by a word that the inputs are there,
// and waits for a word of the host before it copies the outputs. So no caller waits on the host.
class StreamStaging final : public Staging {
 public:
  // The streams must have words.
  StreamStaging(const std::shared_ptr<GroupStreams>& streams, std::chrono::milliseconds limit)
      : Staging(streams, streams->collectives(), limit),
        copied_(stream().device_type()),
        done_(stream().device_type()) {}

  void mark() override;
  bool isOrdered() const override { return true; }
  Status fetch(Group& group) override;
  void giveBack() override;
  // The stream copies the outputs in any case, so their present contents are fetched first. That
  // waits on the host until the stream has come to the operation, for a second at most. If it has
  // not, the outputs are undefined, and later operations of the stream do not wait for it.
  void abandon() override;
  bool isOver() const override { return done_.query(); }
  void block() const override { done_.block(callersStream()); }

 private:
  StreamWords& words() const { return *streams().words(); }
  uint32_t nextNumber() const;
  // Copies the outputs to the host. Returns false if that fails or takes too long.
  bool fetchOutputs() const;

  uint32_t number_ = 0;
  bool isMarked_ = false;  // the number is taken, and the stream may wait for it
  c10::Event copied_;      // the inputs are there
  c10::Event done_;
  std::mutex mutex_;  // guards isEnded_
  bool isEnded_ = false;
};

}  // namespace mooncake
