#include "engine/window.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <optional>

namespace mooncake {

// A part's description, wire form:  u64 address  u64 bytes  u64 key  u64 offset in the owner's
// arena  u64 lease's offset there  u64 lease's turn  u64 bell's offset there

Result<std::unique_ptr<Window>> Window::create(std::shared_ptr<Engine> engine, size_t bytes,
                                               std::shared_ptr<LineBell> bell) {
  auto block = engine->allocate(kUserOffset + bytes);
  if (!block.ok()) return block.error();
  auto region = engine->regions().add(block->data(), block->bytes(), kRemoteRead | kRemoteWrite, {},
                                      &bell->doorbell());
  if (!region.ok()) return region.error();
  auto lease = engine->leases().take();
  if (!lease.ok()) return lease.error();
  std::unique_ptr<Window> window(new Window);
  window->engine_ = std::move(engine);
  window->block_ = std::move(*block);
  window->region_ = std::move(*region);
  window->lease_ = std::move(*lease);
  window->line_ = std::move(bell);
  window->local_ = window->block_.data();
  return window;
}

Window::~Window() {
  if (block_) retire();
}

// Until attach() has succeeded, we do not know which peers have our description and so our part.
// Then the part stays until the engine ends.
void Window::retire(std::vector<RetiredMemory> more) {
  struct Mapper {
    std::shared_ptr<Peer> peer;
    std::optional<LeaseTable::Remote>
        lease;  // none: we have no description of the peer's part, but it may have ours
  };
  std::vector<Mapper> mappers;
  for (const Member& member : members_) {
    if (!member.peer || member.peer->channel->peerArena().empty()) continue;
    mappers.push_back({member.peer, std::nullopt});
    if (member.mapped) mappers.back().lease = member.lease;
  }
  more.push_back({.keeps = line_, .block = std::move(block_), .region = std::move(region_)});
  lease_.end();
  engine_->retire(std::move(more), [isAttached = isAttached_, mappers = std::move(mappers)] {
    return isAttached && std::ranges::all_of(mappers, [](const Mapper& mapper) {
             const std::byte* arena = mapper.peer->channel->peerArena().data();
             return mapper.peer->hasExited() ||
                    (mapper.lease && LeaseTable::hasEnded(*mapper.lease, arena));
           });
  });
}

Bytes Window::describe() const {
  const RemoteRegion remote = region_.remote();
  const LeaseTable::Remote lease = lease_.describe();
  return ByteWriter()
      .put(remote.address)
      .put(remote.bytes)
      .put(remote.key)
      .put(block_.offset())
      .put(lease.offset)
      .put(lease.turn)
      .put(line_->offset())
      .take();
}

Status Window::attach(int rank, std::vector<std::shared_ptr<Peer>> peers,
                      const std::vector<Bytes>& parts) {
  rank_ = rank;
  members_.resize(peers.size());
  for (size_t r = 0; r < peers.size(); ++r) {
    Member& member = members_[r];
    const bool isOurs = peers[r] == nullptr;
    const auto arena = isOurs ? std::span<std::byte>() : peers[r]->channel->peerArena();
    // This does not depend on its description, because all ranks must get the same result.
    if (!isOurs && arena.empty()) fullyMapped_ = false;
    member.peer = std::move(peers[r]);
    if (parts[r].empty()) continue;
    ByteReader in(parts[r]);
    member.part.address = in.get<uint64_t>();
    member.part.bytes = in.get<uint64_t>();
    member.part.key = in.get<uint64_t>();
    const uint64_t offset = in.get<uint64_t>();
    member.lease.offset = in.get<uint64_t>();
    member.lease.turn = in.get<uint64_t>();
    const uint64_t bell = in.get<uint64_t>();
    MOONCAKE_TRY(in.finish("window part of rank " + std::to_string(r)));
    if (member.part.bytes != block_.bytes()) {
      return Error{ErrorCode::kMismatch, "rank " + std::to_string(r) + " made a window of " +
                                             std::to_string(member.part.bytes) + " bytes, rank " +
                                             std::to_string(rank) + " one of " +
                                             std::to_string(block_.bytes()) +
                                             ": do all ranks have the same options and version?"};
    }
    if (isOurs) {
      member.mapped = block_.data();
      member.bell = &line_->doorbell();
    } else if (!arena.empty()) {
      if (offset > arena.size() || member.part.bytes > arena.size() - offset ||
          !LeaseTable::liesIn(member.lease, arena.size()) || bell % alignof(Doorbell) != 0 ||
          bell > arena.size() - sizeof(Doorbell)) {
        return Error{ErrorCode::kProtocol,
                     "rank " + std::to_string(r) + " described a window part outside its arena"};
      }
      member.mapped = arena.data() + offset;
      member.bell = reinterpret_cast<Doorbell*>(arena.data() + bell);
      member.fence = member.peer->channel->fenceWord();
    }
  }
  isAttached_ = true;
  return {};
}

const std::byte* Window::peerArena(int rank, uint64_t offset, size_t bytes) const {
  const Member& member = members_[rank];
  if (!member.mapped) return nullptr;
  const Arena& ours = engine_->arena();
  const std::span<const std::byte> arena =
      member.peer ? member.peer->channel->peerArena()
                  : std::span<const std::byte>(ours.base(), ours.capacity());
  if (offset > arena.size() || bytes > arena.size() - offset) return nullptr;
  return arena.data() + offset;
}

Status Window::put(int rank, uint64_t offset, std::span<const std::byte> data,
                   Signal signal) const {
  const Member& member = members_[rank];
  return member.peer->channel->put(
      {.region = member.part, .offset = offset, .data = data, .signal = signal});
}

Status Window::put(int rank, const RemoteRegion& region, uint64_t offset,
                   std::span<const std::byte> data, Signal signal) const {
  const Member& member = members_[rank];
  return member.peer->channel->put({region, offset, data, signal, member.part});
}

Status Window::write(int rank, const RemoteRegion& region, uint64_t offset,
                     std::span<const std::byte> data, Signal signal, Completion& completion) const {
  const Member& member = members_[rank];
  return member.peer->channel->write(
      {.region = region, .offset = offset, .source = data, .completion = &completion},
      {member.part, signal});
}

Status Window::place(int rank, uint64_t offset, std::span<const std::byte> data,
                     Signal signal) const {
  std::byte* part = members_[rank].mapped;
  if (!part) return put(rank, offset, data, signal);
  auto& word = *reinterpret_cast<std::atomic<uint64_t>*>(part + signal.offset);
  if (!canStamp(word, signal.stamp)) return {};
  if (!data.empty()) std::memcpy(part + offset, data.data(), data.size());
  if (tryStamp(word, signal.stamp)) ring(rank);
  return {};
}

Status Window::get(int rank, const RemoteRegion& region, uint64_t offset,
                   std::span<std::byte> target, Completion& completion,
                   const MemoryOwner& owner) const {
  const auto& peer = members_[rank].peer;
  if (!peer) return {ErrorCode::kPeerLost, "the rank was lost before the window was made"};
  return peer->channel->get({.region = region,
                             .offset = offset,
                             .target = target,
                             .completion = &completion,
                             .owner = owner});
}

Status Window::get(int rank, std::span<const GetRequest> requests) const {
  return members_[rank].peer->channel->get(requests);
}

void Window::cancel(const Completion& completion) const {
  for (const Member& member : members_) {
    if (member.peer) member.peer->channel->cancel(&completion);
  }
}

uint64_t Window::retire(int rank, const RemoteRegion& region) const {
  return members_[rank].peer->channel->retire(region);
}

bool Window::isRetired(int rank, uint64_t number) const {
  return members_[rank].peer->channel->isRetired(number);
}

const Evidence* Window::disconnection(int rank) const {
  const auto& peer = members_[rank].peer;
  return peer && peer->disconnected.load(std::memory_order_acquire) ? &peer->evidence : nullptr;
}

const char* Window::transportName(int rank) const {
  return members_[rank].peer ? members_[rank].peer->channel->transportName() : "self";
}

}  // namespace mooncake
