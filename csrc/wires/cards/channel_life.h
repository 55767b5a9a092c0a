#pragma once

#include <optional>

#include "base/result.h"

namespace mooncake {

// Which ends of a channel still count, and whether its connection stands. Under the channel's lock.
struct ChannelLife {
  std::optional<Error> lost;  // why the connection has broken, until it is made again
  bool hasLeft = false;       // the peer, in peace
  bool isClosed = false;
  bool isFenced = false;  // the peer, by us
  bool isOut = false;     // we, by the peer

  // Returns ok if transfers may begin.
  Status usable() const {
    if (lost) return *lost;  // also when the channel was closed later
    return isClosed ? Status(ErrorCode::kAborted, "the channel is closed") : Status();
  }
};

}  // namespace mooncake
