#pragma once

#include <optional>
#include <sstream>
#include <string_view>

namespace mooncake {

enum class LogLevel { kError, kWarning, kInfo, kDebug };

std::optional<LogLevel> logLevelFromName(
    std::string_view name);  // "error", "warning", "info", "debug"

// Writes one line to stderr with one write(2): "2026-01-01T00:00:00.123456Z mooncake W rank 3:
// text". The level is the process's (MOONCAKE_LOG_LEVEL), read once. Never called on the hot path.
// A line is cut at 4096 bytes. If stderr is a full pipe for 10 ms the line is dropped, because a
// heartbeat must not wait for a terminal. `who` names the source of the line.
bool logEnabled(LogLevel level);
void logLine(LogLevel level, std::string_view who, std::string_view text);

template <typename... Parts>
void log(LogLevel level, std::string_view who, const Parts&... parts) {
  if (!logEnabled(level)) return;
  std::ostringstream text;
  (text << ... << parts);
  logLine(level, who, text.str());
}

}  // namespace mooncake
