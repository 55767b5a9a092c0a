#include "engine/doors.h"

#include <algorithm>
#include <utility>

namespace mooncake {

Bytes Doors::encode(uint64_t door, ByteView message) {
  return ByteWriter().put(door).putRaw(message).take();
}

void Doors::open(uint64_t door, OnMessage handler) {
  auto shared = std::make_shared<const OnMessage>(std::move(handler));
  std::lock_guard lock(mutex_);
  const bool caughtUp = !hasEarly(door);
  doors_[door] = {shared, caughtUp};
  if (!caughtUp) loop_.post([this, door, shared] { catchUp(door, shared); });
}

void Doors::close(uint64_t door) {
  std::shared_ptr<const OnMessage> last;  // goes without the lock: it may own anything
  Lock lock(mutex_);
  const auto found = doors_.extract(door);
  if (!found) return;
  last = found.mapped().handler;
  if (!loop_.onLoopThread()) handled_.wait(lock, [&] { return running_ != last.get(); });
}

void Doors::closeAll() {
  std::map<uint64_t, Door> last;
  Lock lock(mutex_);
  last.swap(doors_);
  if (!loop_.onLoopThread()) handled_.wait(lock, [&] { return running_ == nullptr; });
}

void Doors::deliver(const EngineId& from, ByteView message) {
  ByteReader in(message);
  const auto door = in.get<uint64_t>();
  if (in.failed() || in.left() == 0) return;  // nobody can have meant anything by it
  message = in.getRaw(in.left());
  Lock lock(mutex_);
  const auto found = doors_.find(door);
  if (found != doors_.end() && found->second.caughtUp) {
    run(lock, found->second.handler, from, message);
  } else {
    keep({door, from, Bytes(message.begin(), message.end())});
  }
}

void Doors::catchUp(uint64_t door, const std::shared_ptr<const OnMessage>& handler) {
  Lock lock(mutex_);
  for (;;) {
    const auto found = doors_.find(door);
    if (found == doors_.end() || found->second.handler != handler) return;
    const auto early = takeEarly(door);
    if (!early) {
      found->second.caughtUp = true;
      return;
    }
    run(lock, handler, early->from, early->message);
  }
}

// The handler is held here: it may close its own door.
void Doors::run(Lock& lock, const std::shared_ptr<const OnMessage>& handler, const EngineId& from,
                ByteView message) {
  std::shared_ptr<const OnMessage> held = handler;
  running_ = held.get();
  lock.unlock();
  (*held)(from, message);
  held.reset();  // before close() returns
  lock.lock();
  running_ = nullptr;
  handled_.notify_all();
}

void Doors::keep(Early early) {
  earlyBytes_ += early.message.size();
  early_.push_back(std::move(early));
  while (early_.size() > kMostEarly || earlyBytes_ > kMostEarlyBytes) {
    earlyBytes_ -= early_.front().message.size();
    early_.pop_front();
  }
}

bool Doors::hasEarly(uint64_t door) const {
  return std::any_of(early_.begin(), early_.end(),
                     [&](const Early& early) { return early.door == door; });
}

std::optional<Doors::Early> Doors::takeEarly(uint64_t door) {
  const auto found = std::find_if(early_.begin(), early_.end(),
                                  [&](const Early& early) { return early.door == door; });
  if (found == early_.end()) return std::nullopt;
  std::optional<Early> taken = std::move(*found);
  earlyBytes_ -= taken->message.size();
  early_.erase(found);
  return taken;
}

}  // namespace mooncake
