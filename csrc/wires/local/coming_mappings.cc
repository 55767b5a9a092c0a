#include "wires/local/coming_mappings.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/log.h"
#include "engine/memory/descriptor_offers.h"

namespace mooncake {
namespace {

// Longest wait for a peer that is to hand its memory over.
constexpr auto kPatience = std::chrono::seconds(3);

}  // namespace

void ComingMappings::add(Wanted wanted, const Completion* completion, Map map, Then then) {
  {
    Lock lock(mutex_);
    if (isClosed_) {
      lock.unlock();
      return then({ErrorCode::kAborted, "the channel is closed"});
    }
    waiting_.push_back({wanted.key(), completion, std::move(then)});
    if (!requested_.insert(wanted.key()).second) return;
  }
  loop_.post([self = shared_from_this(), wanted = std::move(wanted), map = std::move(map)] {
    self->request(wanted, map);
  });
}

void ComingMappings::request(const Wanted& wanted, const Map& map) {
  requestDescriptor(
      loop_, wanted.memory, Deadline::after(kPatience),
      [self = shared_from_this(), wanted, map](const Result<Fd>& descriptor) {
        {
          Lock lock(self->mutex_);
          if (self->isClosed_) return;
        }
        Status how;
        if (descriptor.ok()) {
          map(wanted, *descriptor);
        } else {
          how = {ErrorCode::kUnsupported, descriptor.error().message};
          log(LogLevel::kWarning, "shm", "memory of a peer's device is not mapped for device ",
              wanted.owner.device, ", and goes through pinned buffers: ", how.error().message);
        }
        {
          Lock lock(self->mutex_);
          self->requested_.erase(wanted.key());
        }
        self->end([key = wanted.key()](const Waiting& one) { return one.key == key; }, how);
      });
}

void ComingMappings::end(const Which& which, const Status& how) {
  Lock lock(mutex_);
  for (;;) {
    const auto next = std::ranges::find_if(
        waiting_, [&](const Waiting& one) { return !one.isEnding && which(one); });
    if (next == waiting_.end()) break;
    next->isEnding = true;  // it stays in the list until its owner has been told
    const Then then = std::move(next->then);
    lock.unlock();
    then(how);
    lock.lock();
    waiting_.erase(next);
    ended_.notify_all();
  }
}

void ComingMappings::await(const Completion* completion) {
  const auto isOfIt = [completion](const Waiting& one) { return one.completion == completion; };
  end(isOfIt, {ErrorCode::kAborted, "the transfer was cancelled"});
  Lock lock(mutex_);
  ended_.wait(mutex_, [&]() REQUIRES(mutex_) { return std::ranges::none_of(waiting_, isOfIt); });
}

void ComingMappings::close() {
  {
    Lock lock(mutex_);
    isClosed_ = true;
  }
  const auto any = [](const Waiting&) { return true; };
  end(any, {ErrorCode::kAborted, "the channel is closed"});
  // A thread of the loop that closes the channel may be within a call of `then`.
  if (loop_.onLoopThread()) return;
  Lock lock(mutex_);
  ended_.wait(mutex_, [&]() REQUIRES(mutex_) { return waiting_.empty(); });
}

}  // namespace mooncake
