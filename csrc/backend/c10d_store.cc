#include "backend/c10d_store.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <iomanip>
#include <netinet/in.h>
#include <poll.h>
#include <sstream>
#include <sys/socket.h>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/backoff.h"

namespace mooncake {
namespace {

// Between two looks at keys that are not there yet: an eighth of the time waited so far, so that a
// store that serves many ranks is asked seldom, and at least and at most this. Also the bounds of the
// pause before an append is repeated that other ranks have overtaken.
constexpr auto kLeastPause = std::chrono::milliseconds(1);
constexpr auto kMostPause = std::chrono::milliseconds(100);

// A timeout is blamed on the store if a call to it has had no answer for this long.
constexpr auto kSilent = std::chrono::milliseconds(500);

// Time between two looks at the launcher's key, and before the first one: a job that begins at once
// looks at nothing.
constexpr auto kLauncherLook = std::chrono::milliseconds(500);
constexpr size_t kMostNamed = 4;

// A store speaks in exceptions of many kinds. None means that a key is late: await() says that.
template <typename Call>
auto guarded(const char* what, Call&& call) -> decltype(call()) {
  try {
    return call();
  } catch (const std::exception& e) {
    std::string text = e.what();
    text = text.substr(0, text.find('\n'));  // without the stack
    return Error{ErrorCode::kSystem, std::string("the c10d store failed to ") + what + ": " + text};
  }
}

std::vector<uint8_t> toVector(ByteView bytes) {
  const auto* first = reinterpret_cast<const uint8_t*>(bytes.data());
  return {first, first + bytes.size()};
}

c10::intrusive_ptr<c10d::Store> withoutPrefixes(c10::intrusive_ptr<c10d::Store> store) {
  while (auto* prefix = dynamic_cast<c10d::PrefixStore*>(store.get()))
    store = prefix->getUnderlyingStore();
  return store;
}

// Null when it is none. Lives as long as `store`.
const c10d::TCPStore* tcpStoreBehind(const c10::intrusive_ptr<c10d::Store>& store) {
  return dynamic_cast<const c10d::TCPStore*>(withoutPrefixes(store).get());
}

// This process's TCP connections that lead to the port, to be polled for the other side's end.
std::vector<pollfd> socketsToPort(uint16_t port) {
  std::vector<pollfd> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    sockaddr_storage peer{};
    socklen_t length = sizeof(peer);
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) continue;
    in_port_t there = 0;
    if (peer.ss_family == AF_INET) there = reinterpret_cast<sockaddr_in&>(peer).sin_port;
    if (peer.ss_family == AF_INET6) there = reinterpret_cast<sockaddr_in6&>(peer).sin6_port;
    if (ntohs(there) == port) found.push_back({.fd = fd, .events = POLLRDHUP, .revents = 0});
  }
  return found;
}

}  // namespace

C10dStore::C10dStore(c10::intrusive_ptr<c10d::Store> store, Deadline until, std::string launcherKey)
    : store_(std::move(store)),
      launcherKey_(std::move(launcherKey)),
      lookAt_(Clock::now() + kLauncherLook) {
  if (tcpStoreBehind(store_)) calls_ = std::make_unique<StoreCalls>(until);
}

template <typename Call>
auto C10dStore::ask(const char* what, Call call) -> decltype(call()) {
  if (!calls_) return guarded(what, call);
  return calls_->run([what, call = std::move(call)] { return guarded(what, call); });
}

Result<bool> C10dStore::check(std::vector<std::string> keys) {
  return ask("look for a key", [store = store_, keys = std::move(keys)]() -> Result<bool> {
    return store->check(keys);
  });
}

// Asks again and again instead of waiting inside the store: a TCPStore whose wait() ends by its
// timeout prints warnings, and a look that finds nothing is nothing to warn of. The last key stands
// for all until it is there: as a rule it is written behind the other keys.
Status C10dStore::await(const std::vector<std::string>& keys, Deadline deadline) {
  const auto began = Clock::now();
  for (;;) {
    MOONCAKE_TRY(ranksLive());
    auto areThere = check({keys.back()});
    if (areThere.ok() && *areThere && keys.size() > 1) areThere = check(keys);
    if (!areThere.ok()) return areThere.error();
    if (*areThere) return {};
    if (deadline.passed())
      return {ErrorCode::kTimeout, "the c10d store had no key " + keys.back() + " in time"};
    const auto pause =
        std::clamp<Clock::duration>((Clock::now() - began) / 8, kLeastPause, kMostPause);
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, deadline.left()));
  }
}

Status C10dStore::ranksLive() {
  if (launcherKey_.empty() || Clock::now() < lookAt_) return {};
  lookAt_ = Clock::now() + kLauncherLook;
  const auto lines =
      ask("look for lost ranks",
          [root = withoutPrefixes(store_), key = launcherKey_]() -> Result<std::string> {
            if (!root->check({key})) return std::string();
            const auto value = root->get(key);
            return std::string(value.begin(), value.end());
          });
  // If the store has failed, the look at the key that the caller awaits reports it.
  if (!lines.ok() || lines->empty()) return {};
  std::istringstream in(*lines);
  std::string died, line;
  for (size_t count = 0; std::getline(in, line); ++count) {
    if (count < kMostNamed) died += (count ? "; " : "") + line;
    if (count == kMostNamed) died += "; and others";
  }
  return {
      ErrorCode::kRefused,
      "the job cannot begin with all of its ranks, as mooncake-run has seen some of them die: " +
          died + ". Look at their logs, then start the job again"};
}

Status C10dStore::set(const std::string& key, ByteView value) {
  const Status set = ask("set a key", [store = store_, key, bytes = toVector(value)]() -> Status {
    store->set(key, bytes);
    return {};
  });
  return noteSilence(set);
}

Status C10dStore::append(const std::string& key, ByteView value) {
  const Status appended =
      ask("append to a key", [store = store_, key, bytes = toVector(value)]() -> Status {
        if (store->hasExtendedApi()) {
          store->append(key, bytes);
          return {};
        }
        Clock::duration pause = kLeastPause;
        std::vector<uint8_t> before, after = bytes;
        for (bool isFirst = true;; isFirst = false) {
          std::vector<uint8_t> now = store->compareSet(key, before, after);
          if (now == after) return {};
          if (!isFirst) {  // other ranks append, too
            std::this_thread::sleep_for(jittered(pause));
            pause = doubled(pause, kMostPause);
          }
          before = std::move(now);
          after = before;
          after.insert(after.end(), bytes.begin(), bytes.end());
        }
      });
  return noteSilence(appended);
}

Result<std::vector<Bytes>> C10dStore::get(const std::vector<std::string>& keys, Deadline deadline) {
  MOONCAKE_TRY(noteSilence(await(keys, deadline)));
  auto found = ask("wait for a key", [store = store_, keys]() -> Result<std::vector<Bytes>> {
    std::vector<std::vector<uint8_t>> values;
    if (store->hasExtendedApi()) {
      values = store->multiGet(keys);
    } else {
      for (const auto& key : keys) values.push_back(store->get(key));
    }
    std::vector<Bytes> result;
    for (const auto& value : values) {
      const auto* first = reinterpret_cast<const std::byte*>(value.data());
      result.emplace_back(first, first + value.size());
    }
    return result;
  });
  MOONCAKE_TRY(noteSilence(found.status()));
  return found;
}

Status C10dStore::noteSilence(Status status) {
  if (!status.ok()) silence_ = calls_ ? calls_->silence() : Clock::duration::zero();
  return status;
}

Result<bool> C10dStore::present(const std::string& key) { return check({key}); }

Error C10dStore::explain(Error error) const {
  if (error.code != ErrorCode::kTimeout || silence_ < kSilent) return error;
  const auto* tcp = tcpStoreBehind(store_);
  std::ostringstream text;
  text << "the store of the job at " << tcp->getHost() << ':' << tcp->getPort()
       << " has not answered for " << std::fixed << std::setprecision(1)
       << std::chrono::duration<double>(silence_).count()
       << " s. Is the process that holds it stopped, or its host cut off?";
  return {ErrorCode::kTimeout, text.str()};
}

std::string rendezvousHost(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto* tcp = tcpStoreBehind(store);
  return tcp ? tcp->getHost() : std::string();
}

void awaitServersEnd(const c10::intrusive_ptr<c10d::Store>& store, Deadline deadline) {
  const auto* tcp = tcpStoreBehind(store);
  if (!tcp) return;
  auto sockets = socketsToPort(tcp->getPort());
  while (!sockets.empty() && !deadline.passed()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.left()).count();
    if (::poll(sockets.data(), sockets.size(), static_cast<int>(left)) < 0 && errno != EINTR)
      return;
    std::erase_if(sockets, [](const pollfd& socket) { return socket.revents != 0; });
  }
}

}  // namespace mooncake
