#pragma once

#include <optional>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "base/deadline.h"

namespace mooncake {

// A position of a stream. Its event goes while its device is the current one, if the device can be
// that: torch would make a context on another one.
class StreamMark {
 public:
  // Marks the stream's work so far.
  explicit StreamMark(const c10::Stream& stream);
  ~StreamMark();
  StreamMark(const StreamMark&) = delete;
  StreamMark& operator=(const StreamMark&) = delete;

  // Whether the stream has passed it. Throws torch's errors.
  bool isReached() const;
  // Makes the current stream of the device wait for it.
  void block() const;
  // Waits on the host. Returns false if the deadline passed first. Throws torch's errors.
  bool await(Deadline deadline) const;

 private:
  const c10::Device device_;
  std::optional<c10::Event> event_;
};

// Returns the current stream of this thread on a device.
c10::Stream currentOn(const c10::Device& device);

// Makes a stream wait for the work of another one so far.
void placeBehind(const c10::Stream& stream, const c10::Stream& other);

}  // namespace mooncake
