#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"

namespace mooncake::transfer {

// Address of an engine's session port: "10.0.0.1:15123", "[fd00::1]:15123", "node7:15123".
struct SessionId {
  std::string host;   // an address or a name, without brackets
  uint16_t port = 0;  // 0: not given

  std::string text() const;
  static Result<SessionId> parse(std::string_view text);
};

}  // namespace mooncake::transfer
