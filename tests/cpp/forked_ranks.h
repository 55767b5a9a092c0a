#pragma once

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "engine/rendezvous/store.h"

// Ranks that are forked children of the test, so that they can be killed and stopped. Their results
// are in memory that they share with the test, so the results outlive them.
namespace mooncake::test {

// fork() copies only the thread that calls it, so there must be no other thread.
inline bool canFork() {
  const auto tasks = std::filesystem::directory_iterator("/proc/self/task");
  return std::distance(begin(tasks), end(tasks)) == 1;
}

// Zeroed memory that forked children share with us.
template <typename T>
class SharedWithChildren {
 public:
  SharedWithChildren()
      : at_(static_cast<T*>(::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedWithChildren() { ::munmap(at_, sizeof(T)); }
  SharedWithChildren(const SharedWithChildren&) = delete;
  SharedWithChildren& operator=(const SharedWithChildren&) = delete;
  T* operator->() const { return at_; }
  T& operator*() const { return *at_; }

 private:
  T* const at_;
};

struct StoreMemory {
  struct Entry {
    std::atomic<bool> isThere;
    char key[48];
    uint32_t bytes;
    std::byte value[2048];
  };
  std::atomic<uint32_t> used;
  Entry entries[64];
};

// A store that hides the shared-memory endpoint of the ranks that are remote, so that they cannot
// be reached over shared memory.
class ForkedStore final : public Store {
 public:
  ForkedStore(StoreMemory& memory, std::vector<bool> isRemote)
      : memory_(memory), isRemote_(std::move(isRemote)) {}

  Status set(const std::string& key, ByteView value) override {
    const uint32_t index = memory_.used.fetch_add(1);
    if (index >= std::size(memory_.entries) || key.size() >= sizeof(StoreMemory::Entry::key) ||
        value.size() > sizeof(StoreMemory::Entry::value))
      return {ErrorCode::kExhausted, "the store is full"};
    StoreMemory::Entry& entry = memory_.entries[index];
    std::memcpy(entry.key, key.c_str(), key.size() + 1);
    std::memcpy(entry.value, value.data(), value.size());
    entry.bytes = static_cast<uint32_t>(value.size());
    entry.isThere.store(true, std::memory_order_release);
    return {};
  }
  // No test reads more than the first part.
  Status append(const std::string& key, ByteView value) override { return set(key, value); }
  Result<std::vector<Bytes>> get(const std::vector<std::string>& keys, Deadline deadline) override {
    std::vector<Bytes> found;
    for (const auto& key : keys) {
      const StoreMemory::Entry* entry = nullptr;
      while (!(entry = find(key))) {
        if (deadline.passed()) return Error{ErrorCode::kTimeout, "no key " + key};
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      found.emplace_back(entry->value, entry->value + entry->bytes);
      // Keys end with a rank, except the job's key for the first rank that failed.
      const std::string last = key.substr(key.rfind('/') + 1);
      if (std::isdigit(static_cast<unsigned char>(last[0])) && isRemote_[std::stoul(last)])
        hideSharedMemory(found.back());
    }
    return found;
  }
  Result<bool> present(const std::string& key) override { return find(key) != nullptr; }

 private:
  const StoreMemory::Entry* find(const std::string& key) const {
    for (const auto& entry : memory_.entries) {
      if (entry.isThere.load(std::memory_order_acquire) && key == entry.key) return &entry;
    }
    return nullptr;
  }
  // Renames the entry in the list of the member's endpoints.
  static void hideSharedMemory(Bytes& member) {
    constexpr std::string_view kName("\3\0\0\0shm", 7);
    const ByteView name = std::as_bytes(std::span(kName));
    const auto at = std::search(member.begin(), member.end(), name.begin(), name.end());
    if (at != member.end()) at[4] = std::byte{'-'};
  }

  StoreMemory& memory_;
  const std::vector<bool> isRemote_;
};

// One forked child. It is killed when this process ends in any way.
class ForkedChild {
 public:
  explicit ForkedChild(const std::function<void()>& body) {
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    body();
    ::_exit(0);
  }
  ForkedChild(ForkedChild&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), hasEnded_(other.hasEnded_), status_(other.status_) {}
  ~ForkedChild() {
    if (pid_ <= 0) return;
    if (!hasEnded_) ::kill(pid_, SIGKILL);
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }

  enum class Event { kNone, kStopped, kEnded };
  // The destructor takes the ended process away: while peers look at it in /proc, that may take
  // seconds.
  Event look() {
    if (pid_ <= 0 || hasEnded_) return Event::kNone;
    siginfo_t info{};
    if (::waitid(P_PID, id_t(pid_), &info, WSTOPPED | WNOHANG) == 0 && info.si_pid == pid_)
      return Event::kStopped;
    info = {};
    if (::waitid(P_PID, id_t(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid != pid_)
      return Event::kNone;
    status_ = info.si_code == CLD_EXITED ? W_EXITCODE(info.si_status, 0) : info.si_status;
    hasEnded_ = true;
    return Event::kEnded;
  }
  bool hasEnded() const { return hasEnded_; }
  pid_t pid() const { return pid_; }
  int status() const { return status_; }  // once it has ended
  void resume() const {
    if (!hasEnded_) ::kill(pid_, SIGCONT);
  }

 private:
  pid_t pid_;
  bool hasEnded_ = false;
  int status_ = 0;
};

}  // namespace mooncake::test
