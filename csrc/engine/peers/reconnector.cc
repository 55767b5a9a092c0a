#include "engine/peers/reconnector.h"

#include <algorithm>
#include <utility>

#include "base/backoff.h"

namespace mooncake {
namespace {

// Bounds of the pause between two attempts.
constexpr auto kLeastPause = std::chrono::milliseconds(1);
constexpr auto kMostPause = std::chrono::milliseconds(100);

}  // namespace

void Reconnector::reconnect(const EngineId& peer, Connection connection, const Evidence& how) {
  {
    Lock lock(mutex_);
    if (stopped_) return;
    ++count_;
  }
  Broken now{.number = ++lastNumber_,
             .connection = std::move(connection),
             .how = how,
             .deadline = Deadline::after(options_.failureTimeout),
             .pause = kLeastPause};
  now.heard = now.connection.channel->lifeSigns();
  // A connection that is not made again yet, or that carried nothing since its last break, continues
  // that break: same deadline, longer pause. Otherwise a useless connection could be made again
  // forever.
  auto last = forget(peer);
  if (auto node = lastBroken_.extract(peer); !last && node && node.mapped().heard == now.heard)
    last = std::move(node.mapped());
  if (last) {
    now.how = last->how;
    now.deadline = last->deadline;
    now.pause = doubled(last->pause, kMostPause);
    now.answered = last->answered;
  }
  const uint64_t number = now.number;
  now.timer = loop_.runAt(Deadline::at(now.deadline.when() + kMostPause), [this, peer, number] {
    giveUp(peer, number, Evidence::Kind::kUnreachable, "and it was not made again" + inTime());
  });
  const bool isFirst = now.pause == kLeastPause;
  broken_.insert_or_assign(peer, std::move(now));
  isFirst ? connect(peer, number) : connectLater(peer, number);
}

std::string Reconnector::inTime() const {
  return " for " + std::to_string(options_.failureTimeout.count()) + " ms";
}

// Null: this break is over.
Reconnector::Broken* Reconnector::find(const EngineId& peer, uint64_t number) {
  const auto found = broken_.find(peer);
  if (found == broken_.end() || found->second.number != number) return nullptr;
  {
    Lock lock(mutex_);
    if (!stopped_) return &found->second;
  }
  forget(peer);
  return nullptr;
}

void Reconnector::connect(const EngineId& peer, uint64_t number) {
  Broken* const one = find(peer, number);
  if (!one) return;
  const auto& [channel, transport, endpoint, isOurs] = one->connection;
  if (!isOurs) return askAfter(peer, number);
  transport->reconnect(
      peer, channel, endpoint, one->deadline, [this, peer, number](const Status& how) {
        if (!find(peer, number)) return;
        if (how.ok()) return reconnected(peer);
        const bool isFinal =
            how.code() == ErrorCode::kUnsupported || how.code() == ErrorCode::kAborted;
        if (!isFinal) return askAfter(peer, number);
        giveUp(peer, number, Evidence::Kind::kUnreachable, "");
      });
}

void Reconnector::askAfter(const EngineId& peer, uint64_t number) {
  Broken* const one = find(peer, number);
  if (!one || one->connection.endpoint.empty()) return;
  one->connection.transport->probe(
      one->connection.endpoint, one->deadline, [this, peer, number](Transport::Listener answer) {
        switch (answer) {
          case Transport::Listener::kRefuses:
            return giveUp(peer, number, Evidence::Kind::kRefused,
                          "and nobody listens there any more");
          case Transport::Listener::kNoAnswer:
            if (const Broken* one = find(peer, number); one && one->answered) {
              return giveUp(peer, number, Evidence::Kind::kUnreachable,
                            "and though something still listens there, it could not be made again" +
                                inTime());
            }
            return giveUp(peer, number, Evidence::Kind::kSilent,
                          "and it could not be reached again" + inTime());
          case Transport::Listener::kAnswers:
            if (Broken* const one = find(peer, number)) one->answered = true;
            return connectLater(peer, number);
          case Transport::Listener::kUnknown:
            return giveUp(peer, number, Evidence::Kind::kUnreachable, "");
        }
      });
}

void Reconnector::connectLater(const EngineId& peer, uint64_t number) {
  Broken* const one = find(peer, number);
  if (!one) return;
  loop_.runAt(Deadline::after(jittered(one->pause)),
              [this, peer, number] { connect(peer, number); });
  one->pause = doubled(one->pause, kMostPause);
}

void Reconnector::giveUp(const EngineId& peer, uint64_t number, Evidence::Kind kind,
                         const std::string& why) {
  if (!find(peer, number)) return;
  const auto last = forget(peer);
  const std::string detail = last->how.detail + (why.empty() ? "" : ", ") + why;
  // If the peer connects to us later, it is too late.
  if (kind != Evidence::Kind::kUnreachable || !why.empty()) last->connection.channel->abandon();
  // Silence is dated now, as it is on an unbroken connection. Any other loss is dated at the break.
  const bool isSilent = kind == Evidence::Kind::kSilent;
  options_.onLost(peer, {kind, detail, isSilent ? Clock::now() : last->how.when});
}

std::optional<Reconnector::Broken> Reconnector::forget(const EngineId& peer) {
  auto found = broken_.extract(peer);
  if (!found) return std::nullopt;
  loop_.cancel(found.mapped().timer);
  Lock lock(mutex_);
  --count_;
  idle_.notify_all();
  return std::move(found.mapped());
}

void Reconnector::drop(const EngineId& peer) {
  forget(peer);
  lastBroken_.erase(peer);
}

void Reconnector::reconnected(const EngineId& peer) {
  {
    Lock lock(mutex_);
    if (stopped_) return;
  }
  std::optional<Evidence> how;
  if (auto last = forget(peer)) {
    how = last->how;
    lastBroken_.insert_or_assign(peer, std::move(*last));
  }
  options_.onReconnected(peer, how);
}

void Reconnector::stop(Clock::duration patience) {
  Lock lock(mutex_);
  idle_.wait_for(mutex_, patience, [&]() REQUIRES(mutex_) { return stopped_ || count_ == 0; });
  stopped_ = true;
  idle_.notify_all();
}

void Reconnector::forgetAll() {
  broken_.clear();
  lastBroken_.clear();
}

}  // namespace mooncake
