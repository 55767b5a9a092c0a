#pragma once

#include <vector>

#include "base/env.h"
#include "base/log.h"

namespace mooncake {

// The variables of the log. The log itself reads them once per process.
struct LogEnv {
  LogLevel level = LogLevel::kWarning;  // MOONCAKE_LOG_LEVEL

  static Result<LogEnv> read();
  static std::vector<EnvVariable> variables();
};

}  // namespace mooncake
