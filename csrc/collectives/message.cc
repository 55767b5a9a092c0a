#include "collectives/message.h"

namespace mooncake {

const char* Message::operation() const {
  switch (kind_) {
    case Kind::kSend:
      return "send";
    case Kind::kReceive:
      return "receive";
    case Kind::kPut:
      return "put";
    case Kind::kSignal:
      return "signal";
    case Kind::kAwaitSignal:
      return "wait_signal";
    case Kind::kAwaitApplied:
      return "wait for the puts";
  }
  return "unknown operation";
}

std::string Message::whatIsMissing() const {
  const std::string tag = " a message with tag " + std::to_string(tag_);
  switch (kind_) {
    case Kind::kSend:
      if (hasData_) {
        return "its data is not there: earlier work on the caller's stream still runs. Find the "
               "work that hangs, or give the group a longer timeout";
      }
      return "the other side did not receive" + tag;
    case Kind::kReceive:
      return fetch_ ? "the other side announced" + tag +
                          ", but its content did not come. It is kept: receive again"
                    : "the other side did not send" + tag;
    case Kind::kPut:
    case Kind::kSignal:
      return "the other side did not take it; is its process stopped, or its window gone?";
    case Kind::kAwaitSignal:
      return "the other side did not signal";
    case Kind::kAwaitApplied:
      return "not all of its puts and signals arrived";
  }
  return {};
}

}  // namespace mooncake
