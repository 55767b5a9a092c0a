#pragma once

#include <memory>

#include "base/mutex.h"
#include "base/result.h"
#include "engine/contract/channel.h"

namespace mooncake {

// Messages of the engine's user on the channel below, which carries at most 64 KiB at a time: a
// longer one, by the byte that says its kind, goes in two parts.
class MessageParts {
 public:
  // Sends one message. The parts of two messages are never mixed. Any thread.
  Status send(Channel& below, ByteView message);

  // ---- the loop's thread
  void begin(ByteView part) { arriving_.assign(part.begin(), part.end()); }
  // Returns the whole message, or nothing if the first part is missing.
  Bytes end(ByteView part);
  // Drops a first part: its second part does not come.
  void clear() { arriving_.clear(); }

 private:
  Mutex sendMutex_;
  Bytes arriving_;
};

}  // namespace mooncake
