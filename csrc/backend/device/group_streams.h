#pragma once

#include <map>
#include <memory>

#include <c10/core/Device.h>

#include "backend/device/own_stream.h"
#include "backend/device/stream_words.h"
#include "backend/device/wait_words.h"
#include "backend/stream_settings.h"
#include "base/mutex.h"
#include "device/pinned_pool.h"

namespace mooncake {

// The streams of one group on one device. Works that outlive the group keep them.
class GroupStreams {
 public:
  // Throws.
  GroupStreams(const c10::Device& device, const StreamSettings& settings);
  ~GroupStreams();
  GroupStreams(const GroupStreams&) = delete;
  GroupStreams& operator=(const GroupStreams&) = delete;

  const c10::Stream& collectives() const { return collectives_.stream(); }
  // Null: torch alone drives the device.
  Accelerator* accelerator() const { return collectives_.accelerator(); }
  // Returns a stream for copies that are enqueued when they can run at once. For devices with words.
  c10::Stream prompt() const;
  // Null: the host waits for collectives.
  StreamWords* words() const { return words_.get(); }
  // Returns the stream for messages that are called on a stream of the caller's, and for sums of
  // sparse tensors. It waits for that stream only: a message may not wait for another stream's, nor
  // for collectives.
  const c10::Stream& messages(const c10::Stream& callers);
  // Whether a kernel copies used rows, see copyRows(). False without words.
  bool copiesRows() const { return copiesRows_; }
  // For streams that wait for messages. Null if words() is.
  WaitWords* waitWords() const { return waitWords_.get(); }
  // Whether a stream of the program may wait for them: no other stream that a message needs is held up
  // then. Looks once, when the stream is idle; false until it was.
  bool mayWait(const c10::Stream& callers);
  // For values of futures. It waits for them in the order of the calls.
  const c10::Stream& callbacks() const { return callbacks_.stream(); }
  // The process's memory for copies of the device's tensors. Null: no accelerator drives it, so torch
  // has to allocate.
  PinnedPool* pinned() const { return pinned_; }

 private:
  struct Waits {
    DeviceStream stream;
    bool isOwner = false;
  };

  bool hasWords_ = false;  // set before collectives_
  const OwnStream collectives_;
  const OwnStream callbacks_;
  const std::unique_ptr<StreamWords> words_;
  const bool copiesRows_;
  const std::unique_ptr<WaitWords> waitWords_;
  PinnedPool* const pinned_;
  Mutex mutex_;
  // By the caller's stream.
  std::map<c10::StreamId, Waits> mayWait_ GUARDED_BY(mutex_);
  std::map<c10::StreamId, const OwnStream> messages_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
