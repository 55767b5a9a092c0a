#include "base/log.h"

#include <array>
#include <climits>
#include <cstdio>
#include <poll.h>
#include <string>
#include <time.h>
#include <unistd.h>

#include "base/log_env.h"

namespace mooncake {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"error", "warning", "info", "debug"};
constexpr std::string_view kLetters = "EWID";
constexpr int kPatienceMs = 10;

std::string now() {
  timespec time{};
  ::clock_gettime(CLOCK_REALTIME, &time);
  tm parts{};
  ::gmtime_r(&time.tv_sec, &parts);
  std::array<char, 64> text{};
  const size_t length = ::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(text.data() + length, text.size() - length, ".%06ldZ", time.tv_nsec / 1000);
  return text.data();
}

LogLevel levelOfProcess() {
  const auto env = LogEnv::read();  // an error here is reported when an engine is made
  return env.ok() ? env->level : LogLevel::kWarning;
}

}  // namespace

std::optional<LogLevel> logLevelFromName(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<LogLevel>(i);
  }
  return std::nullopt;
}

bool logEnabled(LogLevel level) {
  static const LogLevel highest = levelOfProcess();
  return level <= highest;
}

void logLine(LogLevel level, std::string_view who, std::string_view text) {
  std::string line = now() + " mooncake " + kLetters[static_cast<size_t>(level)] + ' ';
  line.append(who).append(": ").append(text);
  // A pipe takes up to PIPE_BUF bytes whole or not at all, and never splits them.
  if (line.size() >= PIPE_BUF) line.resize(PIPE_BUF - 1);
  // One line is one event: text from a peer must not look like a log line of ours.
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  line += '\n';
  pollfd out{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
  if (::poll(&out, 1, kPatienceMs) != 1) return;
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace mooncake
