#include "transfer/link.h"

#include <chrono>

#include "base/log.h"
#include "engine/route.h"

namespace mooncake::transfer {
namespace {

constexpr uint64_t kPullTopic = 0x50554c4c;
constexpr uint8_t kPull = 1, kPulled = 2;

}  // namespace

Link::Link(Engine& engine) : engine_(engine) {
  engine_.openTopic(kPullTopic,
                    [this](const EngineId& from, ByteView message) { onMessage(from, message); });
}

Link::~Link() {
  engine_.closeTopic(kPullTopic);
  calls_.stop();
  copies_.stop();
}

Result<std::shared_ptr<Peer>> Link::open(ByteView endpoint, Deadline deadline) {
  auto peers = engine_.connect({Bytes(endpoint.begin(), endpoint.end())}, deadline);
  if (!peers.ok()) return peers.error();
  if (peers->front()) {
    std::lock_guard lock(mutex_);
    peers_[peers->front()->id] = peers->front();
  }
  return peers->front();
}

void Link::answerCall(const Bytes& endpoint) {
  if (endpoint.empty()) return;
  calls_.post([this, endpoint] {
    const auto peer = open(endpoint, Deadline::after(std::chrono::seconds(5)));
    if (!peer.ok()) log(LogLevel::kInfo, "transfer", peer.error().message);
  });
}

Status Link::write(Peer& peer, const WriteRequest& request) {
  uint64_t id;
  request.completion->begin();
  {
    std::lock_guard lock(mutex_);
    id = ++lastPull_;
    pulls_[id] = {peer.shared_from_this(), request.completion};
  }
  const Status sent = engine_.send(peer, kPullTopic,
                                   ByteWriter()
                                       .put(kPull)
                                       .put(id)
                                       .put(request.source.address)
                                       .put(request.source.bytes)
                                       .put(request.source.key)
                                       .put(request.sourceOffset)
                                       .put(request.region.key)
                                       .put(request.offset)
                                       .put(request.bytes)
                                       .take());
  if (sent.ok()) return {};
  std::lock_guard lock(mutex_);
  if (pulls_.erase(id) != 0) request.completion->end(sent.code());
  return {};
}

void Link::cancel(Peer& peer, const Completion* completion) {
  peer.channel->cancelGets(completion);
  std::lock_guard lock(mutex_);
  std::erase_if(pulls_, [&](auto& one) {
    if (one.second.completion != completion) return false;
    one.second.completion->end(ErrorCode::kAborted);
    return true;
  });
}

void Link::endLost() {
  std::lock_guard lock(mutex_);
  std::erase_if(pulls_, [&](auto& one) {
    if (!one.second.peer->disconnected) return false;
    one.second.completion->end(ErrorCode::kPeerLost);
    return true;
  });
}

void Link::onMessage(const EngineId& from, ByteView message) {
  ByteReader in(message);
  const auto kind = in.get<uint8_t>();
  const auto id = in.get<uint64_t>();
  if (kind == kPulled) {
    const auto code = static_cast<ErrorCode>(in.get<uint8_t>());
    std::lock_guard lock(mutex_);
    const auto found = pulls_.find(id);
    if (in.failed() || found == pulls_.end() || found->second.peer->id != from) return;
    found->second.completion->end(code);
    pulls_.erase(found);
    return;
  }
  WriteRequest request;
  request.source.address = in.get<uint64_t>();
  request.source.bytes = in.get<uint64_t>();
  request.source.key = in.get<uint64_t>();
  request.sourceOffset = in.get<uint64_t>();
  request.region.key = in.get<uint64_t>();
  request.offset = in.get<uint64_t>();
  request.bytes = in.get<uint64_t>();
  if (!in.finish("pull").ok() || kind != kPull) return;
  copies_.post([this, from, id, request] { pull(from, id, request); });
}

void Link::pull(const EngineId& from, uint64_t id, WriteRequest request) {
  Doorbell bell;
  Completion completion(&bell);
  ErrorCode code = ErrorCode::kRefused;
  std::shared_ptr<Peer> peer;
  for (const auto patience = Deadline::after(std::chrono::seconds(2)); !peer && !patience.passed();
       std::this_thread::yield()) {
    std::lock_guard lock(mutex_);
    if (const auto found = peers_.find(from); found != peers_.end()) peer = found->second.lock();
  }
  auto use =
      engine_.regions().open(request.region.key, request.offset, request.bytes, kRemoteWrite);
  if (use && peer) {
    const Status begun = peer->channel->get({.region = request.source,
                                             .offset = request.sourceOffset,
                                             .target = {use.data(), request.bytes},
                                             .completion = &completion});
    code = begun.code();
    if (begun.ok()) {
      const Interrupt never;
      const Waiter waiter{bell, never, 0, Deadline::after(std::chrono::seconds(30)),
                          SpinPolicy::forMessages()};
      if (waiter.until([&] { return completion.finished(); }) != WaitResult::kReady)
        peer->channel->cancelGets(&completion);
      code = completion.error;
    }
  }
  (void)engine_.send(from, kPullTopic,
                     ByteWriter().put(kPulled).put(id).put(static_cast<uint8_t>(code)).take());
}

}  // namespace mooncake::transfer
