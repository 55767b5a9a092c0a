#pragma once

#include <chrono>
#include <memory>
#include <mutex>

#include "backend/device/staging.h"
#include "backend/device/stream_words.h"

namespace mooncake {

// Enqueues everything at the call. The stream tells the host by a word that the inputs are there,
// and waits for a word of the host before it copies the outputs. So no caller waits on the host.
class StreamStaging final : public Staging {
 public:
  StreamStaging(const c10::Stream& stream, std::chrono::milliseconds limit,
                std::shared_ptr<StreamWords> words)
      : Staging(stream, limit),
        words_(std::move(words)),
        copied_(stream.device_type()),
        done_(stream.device_type()) {}

  void mark() override;
  bool isOrdered() const override { return true; }
  Status fetch(Group& group) override;
  void giveBack() override;
  // The stream copies the outputs in any case, so their present contents are fetched first. That
  // waits on the host until the stream has come to the operation, for a second at most. If it has
  // not, the outputs are undefined.
  void abandon() override;
  bool isOver() const override { return done_.query(); }
  void block() const override { done_.block(callersStream()); }
  void synchronize() const override { done_.synchronize(); }

 private:
  uint32_t nextNumber() const;
  // Copies the outputs to the host. Returns false if that fails or takes too long.
  bool fetchOutputs() const;

  const std::shared_ptr<StreamWords> words_;
  uint32_t number_ = 0;
  bool isMarked_ = false;  // the number is taken, and the stream may wait for it
  c10::Event copied_;      // the inputs are there
  c10::Event done_;
  std::mutex mutex_;  // guards isEnded_
  bool isEnded_ = false;
};

}  // namespace mooncake
