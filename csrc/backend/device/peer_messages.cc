#include "backend/device/peer_messages.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "backend/device/accelerator_of.h"
#include "base/log.h"

namespace mooncake {
namespace {

// Each rank is a user of the pools, and so are receives from any source.
uint64_t userOf(const Group& group, int peer) {
  if (peer == PointToPoint::kAnySource) return 0;
  const EngineId& id = group.window().peer(peer)->id;
  uint64_t user;
  static_assert(sizeof(user) <= sizeof(id));
  std::memcpy(&user, id.data(), sizeof(user));
  return user;
}

std::string nameOf(const Group& group, int peer) {
  return peer == PointToPoint::kAnySource ? "any source" : group.nameRank(peer);
}

}  // namespace

std::optional<PeerMessages::Place> PeerMessages::find(Group& group, const at::Tensor& tensor,
                                                      int peer, bool isSend) {
  MessagePools& pools = group.engine().messagePools();
  const size_t bytes = tensor.nbytes();
  if (!pools.isOn() || bytes < kLeastBytes || peer >= group.size() || peer == group.rank() ||
      (peer < 0 && (isSend || peer != PointToPoint::kAnySource)))
    return std::nullopt;
  const auto accelerator = acceleratorOf(tensor.device().type());
  if (!accelerator.ok()) {
    tell("messages", accelerator.error().message);
    return std::nullopt;
  }
  const std::string with = std::string(isSend ? "messages to " : "messages from ");
  if (const Status reached = reaches(group, peer); !reached.ok()) {
    tell(with + nameOf(group, peer), reached.error().message);
    return std::nullopt;
  }
  const MemoryOwner owner{*accelerator, tensor.device().index()};
  const auto device = pools.of(owner);
  if (!device.ok()) {
    tell("messages", device.error().message);
    return std::nullopt;
  }
  const auto& pool = isSend ? device->sends : device->receives;
  const auto piece = pool->take(userOf(group, peer), bytes);
  if (!piece.ok()) {
    tell("some " + with + nameOf(group, peer),
         "MOONCAKE_PEER_MESSAGES is too small: " + piece.error().message);
    return std::nullopt;
  }
  MessageDevice where{.owner = owner, .offer = {}};
  if (isSend) where.offer = MessagePools::offerOf(*device, piece->memory);
  return Place{pool, *piece, std::move(where)};
}

// Ok: the rank maps our memory, and we map its; of any source, all other ranks do.
Status PeerMessages::reaches(const Group& group, int peer) const {
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank == group.rank() || (peer != PointToPoint::kAnySource && rank != peer)) continue;
    if (group.window().mapsDevices(rank)) continue;
    return {ErrorCode::kUnsupported,
            group.nameRank(rank) + " is on another host, or its process has no " +
                "MOONCAKE_PEER_MESSAGES, or MOONCAKE_TRANSPORTS leaves out shared memory"};
  }
  return {};
}

void PeerMessages::tell(const std::string& what, const std::string& why) {
  {
    Lock lock(mutex_);
    if (!told_.insert(what).second) return;
  }
  log(LogLevel::kInfo, "group '" + name_ + "'", what + " go through host memory: ", why);
}

}  // namespace mooncake
