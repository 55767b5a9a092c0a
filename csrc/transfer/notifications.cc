#include "transfer/notifications.h"

#include <chrono>

#include "base/log.h"

namespace mooncake::transfer {
namespace {

constexpr uint64_t kNotificationTopic = 3;
constexpr uint8_t kNotification = 1, kArrived = 2;
constexpr auto kAgain = std::chrono::milliseconds(200);

size_t bytesOf(const Notification& one) { return one.name.size() + one.message.size(); }

}  // namespace

Notifications::Notifications(Engine& engine) : engine_(engine) {
  engine_.openTopic(kNotificationTopic,
                    [this](const EngineId& from, ByteView message) { onMessage(from, message); });
}

Notifications::~Notifications() { engine_.closeTopic(kNotificationTopic); }

Status Notifications::send(const std::shared_ptr<Peer>& peer, const Notification& notification,
                           Deadline deadline) {
  if (bytesOf(notification) > kMostBytes)
    return {ErrorCode::kInvalidArgument, "a notification has " + std::to_string(kMostBytes) +
                                             " bytes at most, not " +
                                             std::to_string(bytesOf(notification))};
  const uint32_t generation = stopped_.generation();
  uint64_t number;
  {
    Lock lock(mutex_);
    number = ++last_;
    underWay_[number] = false;
  }
  const Bytes message = ByteWriter()
                            .put(kNotification)
                            .put(number)
                            .putString(notification.name)
                            .putString(notification.message)
                            .take();
  const auto hasArrived = [&] {
    Lock lock(mutex_);
    return underWay_[number];
  };
  Status result{ErrorCode::kTimeout, "the peer has not acknowledged it in time"};
  while (!deadline.passed()) {
    const Status sent = engine_.send(*peer, kNotificationTopic, message);
    if (peer->disconnected) {
      result = {ErrorCode::kPeerLost, peer->evidence.detail};
      break;
    }
    // A failed send, or one lost with its connection, is repeated.
    (void)sent;
    const Waiter waiter{acknowledged_, stopped_, generation,
                        deadline.earlier(Deadline::after(kAgain)), SpinPolicy::forMessages()};
    const WaitResult waited = waiter.until(hasArrived);
    if (waited == WaitResult::kTimeout) continue;
    result = waited == WaitResult::kReady ? Status()
                                          : Status(ErrorCode::kAborted, "the engine is closed");
    break;
  }
  Lock lock(mutex_);
  underWay_.erase(number);
  return result;
}

void Notifications::onMessage(const EngineId& from, ByteView message) {
  ByteReader in(message);
  const auto kind = in.get<uint8_t>();
  const auto number = in.get<uint64_t>();
  if (kind == kArrived && in.finish("acknowledgement").ok()) {
    {
      Lock lock(mutex_);
      const auto found = underWay_.find(number);
      if (found == underWay_.end()) return;
      found->second = true;
    }
    acknowledged_.ring();
    return;
  }
  Notification notification;
  notification.name = in.getString(kMostBytes);
  notification.message = in.getString(kMostBytes);
  if (kind != kNotification || !in.finish("notification").ok()) {
    log(LogLevel::kWarning, engine_.logName(), "a notification that does not decode is dropped");
    return;
  }
  bool isNew;
  {
    Lock lock(mutex_);
    isNew = seen_.isNew(from, number);
  }
  if (isNew) keep(std::move(notification));
  (void)engine_.send(from, kNotificationTopic, ByteWriter().put(kArrived).put(number).take());
}

void Notifications::keep(Notification notification) {
  Lock lock(mutex_);
  keptBytes_ += bytesOf(notification) + sizeof notification;
  kept_.push_back(std::move(notification));
  while (keptBytes_ > kMostKeptBytes) {
    if (kept_.size() == 1) break;
    log(LogLevel::kWarning, engine_.logName(),
        "the oldest notification is dropped: ", kMostKeptBytes >> 20, " MiB wait to be taken");
    keptBytes_ -= bytesOf(kept_.front()) + sizeof notification;
    kept_.pop_front();
  }
}

std::vector<Notification> Notifications::take() {
  Lock lock(mutex_);
  std::vector<Notification> all(std::make_move_iterator(kept_.begin()),
                                std::make_move_iterator(kept_.end()));
  kept_.clear();
  keptBytes_ = 0;
  return all;
}

void Notifications::stop() {
  stopped_.bump();
  acknowledged_.ring();
}

}  // namespace mooncake::transfer
