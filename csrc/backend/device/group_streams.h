#pragma once

#include <memory>

#include <c10/core/Device.h>

#include "backend/device/own_stream.h"
#include "backend/device/stream_settings.h"
#include "backend/device/stream_words.h"
#include "device/pinned_pool.h"

namespace mooncake {

// The streams of one group on one device. Works that outlive the group keep them.
class GroupStreams {
 public:
  // Throws.
  GroupStreams(const c10::Device& device, const StreamSettings& settings);

  const c10::Stream& collectives() const { return collectives_.stream(); }
  // Null: the host waits for collectives.
  StreamWords* words() const { return words_.get(); }
  // A collective under way may wait on its stream for a rank that waits for a message.
  const c10::Stream& messages() const { return messages_.stream(); }
  // For values of futures. It waits for them in the order of the calls.
  const c10::Stream& callbacks() const { return callbacks_.stream(); }
  // The process's memory for copies of the device's tensors. Null: no accelerator drives it, so torch
  // has to allocate.
  PinnedPool* pinned() const { return pinned_; }

 private:
  const OwnStream collectives_;
  const OwnStream messages_;
  const OwnStream callbacks_;
  const std::unique_ptr<StreamWords> words_;
  PinnedPool* const pinned_;
};

}  // namespace mooncake
