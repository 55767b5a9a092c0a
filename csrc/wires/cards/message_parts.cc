#include "wires/cards/message_parts.h"

#include <utility>

#include "wires/cards/control.h"

namespace mooncake {

Status MessageParts::send(Channel& below, ByteView message) {
  using control::Kind, control::withKind;
  constexpr size_t kMost = Channel::kMaxMessageBytes - 1;
  Lock lock(sendMutex_);
  if (message.size() <= kMost) return below.send(withKind(Kind::kMessage, message));
  // If the second part is not sent, the peer drops the first one.
  MOONCAKE_TRY(below.send(withKind(Kind::kBegin, message.first(kMost))));
  return below.send(withKind(Kind::kEnd, message.subspan(kMost)));
}

Bytes MessageParts::end(ByteView part) {
  if (arriving_.empty()) return {};
  Bytes message = std::exchange(arriving_, {});
  message.insert(message.end(), part.begin(), part.end());
  return message;
}

}  // namespace mooncake
