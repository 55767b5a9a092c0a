#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include <c10/core/Device.h>

#include "backend/device/own_stream.h"
#include "backend/device/stream_words.h"
#include "device/pinned_pool.h"

namespace mooncake {

// The streams of one group on one device. Works that outlive the group keep them.
class GroupStreams {
 public:
  struct Settings {
    bool words = true;       // collectives use them, where the device's streams know words
    size_t pinnedCache = 0;  // bytes; of the first group that uses the device
  };

  // Throws.
  GroupStreams(const c10::Device& device, const Settings& settings);

  const c10::Stream& collectives() const { return collectives_.stream(); }
  // Null: the host waits for collectives.
  StreamWords* words() const { return words_.get(); }
  // A collective under way may wait on its stream for a rank that waits for a message.
  const c10::Stream& messages() const { return messages_.stream(); }
  // For values of futures. It waits for them in the order of the calls.
  const c10::Stream& callbacks() const { return callbacks_.stream(); }
  // Never waits for a rank: for copies when an operation has failed.
  const c10::Stream& rescue() const { return rescue_.stream(); }
  // The process's memory for copies of the device's tensors. Null: no accelerator drives it, so torch
  // has to allocate.
  PinnedPool* pinned() const { return pinned_; }
  // The stream of collectives does not go on, so nobody waits for it any more.
  std::atomic<bool>& isStuck() { return isStuck_; }

 private:
  const OwnStream collectives_;
  const OwnStream messages_;
  const OwnStream callbacks_;
  const OwnStream rescue_;
  const std::unique_ptr<StreamWords> words_;
  PinnedPool* const pinned_;
  std::atomic<bool> isStuck_{false};
};

}  // namespace mooncake
