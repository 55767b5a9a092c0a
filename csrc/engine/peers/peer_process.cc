#include "engine/peers/peer_process.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <dirent.h>
#include <fcntl.h>
#include <memory>
#include <optional>
#include <string_view>
#include <unistd.h>

#include "base/fd.h"

namespace mooncake {
namespace {

// Content of a file of /proc; empty: it does not exist, or we may not read it.
class ProcFile {
 public:
  explicit ProcFile(const std::string& path) {
    const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!file) return;
    const ssize_t got = ::read(file.get(), buffer_.data(), buffer_.size());
    if (got > 0) bytes_ = size_t(got);
  }
  std::string_view text() const { return {buffer_.data(), bytes_}; }

 private:
  std::array<char, 8192> buffer_;
  size_t bytes_ = 0;
};

template <typename T>
T numberIn(std::string_view text, int base = 10) {
  T value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value, base);
  return value;
}

// The fields that we need of a process's or thread's `stat` file; see proc(5).
struct Stat {
  char state = '?';
  uint32_t flags = 0;  // PF_ of the kernel's sched.h
  uint64_t started = 0;
};

std::optional<Stat> statOf(const std::string& folder) {
  const ProcFile file(folder + "/stat");
  std::string_view rest = file.text();
  // The second field is the program's name, in brackets, and may contain anything.
  const size_t name = rest.rfind(')');
  if (name == std::string_view::npos) return std::nullopt;
  rest.remove_prefix(name + 1);
  Stat stat;
  for (int field = 3; field <= 22; ++field) {
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    const std::string_view value = rest.substr(0, rest.find(' '));
    if (value.empty()) return std::nullopt;
    if (field == 3) stat.state = value[0];
    if (field == 9) stat.flags = numberIn<uint32_t>(value);
    if (field == 22) stat.started = numberIn<uint64_t>(value);
    rest.remove_prefix(value.size());
  }
  return stat;
}

// Returns whether SIGKILL is pending in this line of a status file.
bool isKilled(std::string_view status, std::string_view line) {
  const size_t at = status.find(line);
  if (at == std::string_view::npos) return false;
  return numberIn<uint64_t>(status.substr(at + line.size()), 16) >> (SIGKILL - 1) & 1;
}

// Returns whether a thread is exiting, or will exit before it runs another line of the program. The
// kernel sends SIGKILL to all threads of a process that ends. A thread that is gone counts, too.
bool isThreadEnding(const std::string& folder) {
  constexpr uint32_t kPfExiting = 0x4;
  const auto stat = statOf(folder);
  if (!stat || stat->state == 'Z' || stat->state == 'X' || (stat->flags & kPfExiting)) return true;
  return isKilled(ProcFile(folder + "/status").text(), "SigPnd:\t");
}

std::string folderOf(pid_t process) { return "/proc/" + std::to_string(process); }

}  // namespace

PeerProcess::PeerProcess(pid_t process) : number_(process) {
  if (process == 0) return;
  if (const auto stat = statOf(folderOf(process))) started_ = stat->started;
}

bool PeerProcess::isEnding() const {
  if (number_ == 0) return false;
  if (::kill(number_, 0) != 0 && errno == ESRCH) return true;
  const std::string folder = folderOf(number_);
  const auto stat = statOf(folder);
  if (!stat) return false;  // /proc is not readable for us
  if (started_ != 0 && stat->started != started_) return true;
  // A SIGKILL to the process stays pending until the process is gone.
  if (isKilled(ProcFile(folder + "/status").text(), "ShdPnd:\t")) return true;
  // The process may have ended in another way. The end of its first thread alone is not enough.
  const std::unique_ptr<DIR, int (*)(DIR*)> tasks(::opendir((folder + "/task").c_str()),
                                                  ::closedir);
  if (!tasks) return false;
  bool any = false;
  while (const dirent* task = ::readdir(tasks.get())) {
    if (task->d_name[0] == '.') continue;
    any = true;
    if (!isThreadEnding(folder + "/task/" + task->d_name)) return false;
  }
  return any;
}

bool PeerProcess::isDumpingCore() const {
  if (number_ == 0) return false;
  const ProcFile status(folderOf(number_) + "/status");
  return status.text().find("CoreDumping:\t1") != std::string_view::npos;
}

}  // namespace mooncake
