#include "base/log_env.h"

namespace mooncake {
namespace {

bool parseLogLevel(std::string_view value, LogEnv& env, std::string& allowed) {
  allowed = "error, warning, info or debug";
  const auto level = logLevelFromName(value);
  if (level) env.level = *level;
  return level.has_value();
}

constexpr EnvEntry<LogEnv> kTable[] = {
    {{"MOONCAKE_LOG_LEVEL", "warning", "What is logged to stderr: error, warning, info or debug"},
     parseLogLevel},
};

}  // namespace

Result<LogEnv> LogEnv::read() { return readEnv(kTable); }

std::vector<EnvVariable> LogEnv::variables() { return variablesOf(kTable); }

}  // namespace mooncake
