#include "engine/window.h"

#include <atomic>
#include <cstring>
#include <new>

namespace mooncake {

// A part's description, wire form:  u64 address  u64 bytes  u64 key  u64 offset in the owner's
// arena

Result<std::unique_ptr<Window>> Window::create(std::shared_ptr<Engine> engine, size_t bytes) {
  auto block = engine->arena().allocate(kUserOffset + bytes);
  if (!block.ok()) return block.error();
  auto region = engine->regions().add(block->data(), block->bytes(), kRemoteRead | kRemoteWrite);
  if (!region.ok()) return region.error();
  std::unique_ptr<Window> window(new Window);
  window->engine_ = std::move(engine);
  window->block_ = std::move(*block);
  window->region_ = std::move(*region);
  window->local_ = window->block_.data();
  new (window->local_) Doorbell;
  return window;
}

Bytes Window::describe() const {
  const RemoteRegion remote = region_.remote();
  return ByteWriter()
      .put(remote.address)
      .put(remote.bytes)
      .put(remote.key)
      .put(block_.offset())
      .take();
}

Status Window::attach(int rank, std::vector<std::shared_ptr<Peer>> peers,
                      const std::vector<Bytes>& parts) {
  rank_ = rank;
  members_.resize(peers.size());
  for (size_t r = 0; r < peers.size(); ++r) {
    Member& member = members_[r];
    ByteReader in(parts[r]);
    member.part.address = in.get<uint64_t>();
    member.part.bytes = in.get<uint64_t>();
    member.part.key = in.get<uint64_t>();
    const uint64_t offset = in.get<uint64_t>();
    MOONCAKE_TRY(in.finish("window part of rank " + std::to_string(r)));
    if (member.part.bytes != block_.bytes()) {
      return Error{ErrorCode::kMismatch, "rank " + std::to_string(r) + " made a window of " +
                                             std::to_string(member.part.bytes) + " bytes, rank " +
                                             std::to_string(rank) + " one of " +
                                             std::to_string(block_.bytes()) +
                                             ": do all ranks have the same options and version?"};
    }
    member.peer = std::move(peers[r]);
    if (!member.peer) {
      member.mapped = block_.data();
    } else if (const auto arena = member.peer->channel->peerArena(); !arena.empty()) {
      if (offset > arena.size() || member.part.bytes > arena.size() - offset) {
        return Error{ErrorCode::kProtocol,
                     "rank " + std::to_string(r) + " described a window part outside its arena"};
      }
      member.mapped = arena.data() + offset;
    } else {
      fullyMapped_ = false;
    }
  }
  return {};
}

Status Window::put(int rank, uint64_t offset, std::span<const std::byte> data,
                   Signal signal) const {
  const Member& member = members_[rank];
  return member.peer->channel->put(
      {.region = member.part, .offset = offset, .data = data, .signal = signal});
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
                   std::span<std::byte> target, Completion& completion) const {
  return members_[rank].peer->channel->get(
      {.region = region, .offset = offset, .target = target, .completion = &completion});
}

void Window::cancelGets(const Completion& completion) const {
  for (const Member& member : members_) {
    if (member.peer) member.peer->channel->cancelGets(&completion);
  }
}

const Evidence* Window::ended(int rank) const {
  const auto& peer = members_[rank].peer;
  return peer && peer->ended.load(std::memory_order_acquire) ? &peer->evidence : nullptr;
}

const char* Window::transportName(int rank) const {
  return members_[rank].peer ? members_[rank].peer->channel->transportName() : "self";
}

}  // namespace mooncake
