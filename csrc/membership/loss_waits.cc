#include "membership/loss_waits.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

#include "base/fd.h"

namespace mooncake {
namespace {

Status append(const std::string& file, const std::string& lines) {
  if (file.empty() || lines.empty()) return {};
  const Fd out(::open(file.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW));
  if (!out && errno == ENOENT) return {};
  // One call: several processes may append to it.
  if (out && ::write(out.get(), lines.data(), lines.size()) == ssize_t(lines.size())) return {};
  return {ErrorCode::kSystem, "the launcher cannot be told, as " + file +
                                  " cannot be written: " + std::strerror(errno)};
}

}  // namespace

Status noteJoined(const std::string& file) { return append(file, "joined\n"); }

Status noteWaits(const std::string& file, const std::vector<LossWait>& waits) {
  std::string lines;
  for (const auto& [rank, time] : waits) {
    const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(time).count();
    lines += std::to_string(rank) + " " + std::to_string(micros) + "\n";
  }
  return append(file, lines);
}

}  // namespace mooncake
