#include "engine/peers/outbox.h"

#include "base/log.h"
#include "engine/peers/message_router.h"

namespace mooncake {
namespace {

constexpr size_t kMostBytes = size_t(16) << 20;

}  // namespace

Status Outbox::send(Peer& peer, uint64_t topic, ByteView message) {
  if (message.empty() || message.size() > MessageRouter::kMostBytes) {
    return {ErrorCode::kInvalidArgument, "a message has 1 to " +
                                             std::to_string(MessageRouter::kMostBytes) +
                                             " bytes, not " + std::to_string(message.size())};
  }
  if (peer.disconnected) return {ErrorCode::kPeerLost, peer.evidence.detail};
  bool isFirst;
  {
    Lock lock(mutex_);
    if (bytes_ + message.size() > kMostBytes)
      return {ErrorCode::kExhausted, "16 MiB of messages wait for the thread that sends them"};
    isFirst = waiting_.empty();
    waiting_.emplace_back(peer.shared_from_this(), MessageRouter::encode(topic, message));
    bytes_ += message.size();
    ++accepted_.messages;
    accepted_.bytes += message.size();
  }
  if (loop_.onLoopThread()) {
    flush();
  } else if (isFirst) {
    loop_.post([this] { flush(); });
  }
  return {};
}

Outbox::Accepted Outbox::accepted() const {
  Lock lock(mutex_);
  return accepted_;
}

void Outbox::flush() {
  Lock sending(sendingMutex_);
  std::vector<std::pair<std::shared_ptr<Peer>, Bytes>> due;
  {
    Lock lock(mutex_);
    due.swap(waiting_);
    bytes_ = 0;
  }
  for (const auto& [peer, message] : due) {
    const Status sent = peer->channel->send(message);
    // Any other error is the end of the channel, which is reported on its own.
    if (sent.code() == ErrorCode::kExhausted)
      log(LogLevel::kWarning, logName_, "a message is lost: ", sent.error().message);
  }
}

}  // namespace mooncake
