#pragma once

#include "backend/message_work.h"
#include "base/result.h"
#include "collectives/point_to_point.h"

namespace mooncake {

// The copy of a message's tensor of a device, which the message carries in the tensor's place.
class MessageCopies {
 public:
  virtual ~MessageCopies() = default;

  // The device that has the copy, if one has.
  virtual const MessageDevice& device() const = 0;
  // The message has been posted.
  virtual void watch(c10::intrusive_ptr<MessageWork> work) = 0;
  // Whether the data of a send is in the copy. Never waits.
  virtual Result<bool> hasData() const = 0;
  // Gives the results of a message that has ended back, or abandons it. Throws torch's errors.
  virtual void settle() = 0;
  // The copy to the device cannot be had: lets the caller's stream go on.
  virtual void release() = 0;
};

}  // namespace mooncake
