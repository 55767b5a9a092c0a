#include "wires/packets/incoming.h"

#include <cstring>
#include <utility>

#include "base/log.h"

namespace mooncake {
namespace {

std::atomic<uint64_t>& wordAt(const RegionTable::Use& use) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(use.data());
}

RegionTable::Use openWord(RegionTable& regions, const Packet& put) {
  const uint64_t key = put.signalKey != 0 ? put.signalKey : put.key;
  return regions.open(key, put.signal.offset, sizeof(uint64_t), kRemoteWrite);
}

bool isOfTheSame(const Packet& a, const Packet& b) {
  return a.key == b.key && a.offset == b.offset && a.length == b.length &&
         a.signal.offset == b.signal.offset && a.signal.stamp == b.signal.stamp &&
         a.after == b.after && a.signalKey == b.signalKey;
}

}  // namespace

bool Incoming::hasRoomFor(const Packet& packet, size_t bytes) const {
  // Puts and transfers are numbered apart, and only landed puts are remembered.
  const bool isFarAhead =
      packet.kind == Packet::Kind::kPut &&
      packet.number - std::min(packet.number, landed_.below()) >= Serials::kMostAhead;
  // Only a piece that waits for another put uses the room for held bytes. A put that other
  // pieces wait for always has room.
  const bool waits =
      packet.kind == Packet::Kind::kPut && packet.after != 0 && !landed_.has(packet.after);
  return !isFarAhead && puts_.size() + writes_.size() < kMostBegun &&
         (!waits || heldBytes_ + heldBytesOf(bytes) <= kMostHeldBytes);
}

void Incoming::put(const Packet& piece, ByteView data) {
  if (landed_.has(piece.number)) {
    ++bad_;
    return;
  }
  if (piece.after == 0 || landed_.has(piece.after)) {
    if (place(piece, data)) land(piece.number);
    return;
  }
  held_[piece.after].push_back({piece, Bytes(data.begin(), data.end())});
  heldBytes_ += heldBytesOf(data.size());
}

bool Incoming::place(const Packet& piece, ByteView data) {
  if (landed_.has(piece.number)) {
    ++bad_;
    return false;
  }
  Whole& put = puts_.try_emplace(piece.number, Whole{.first = piece}).first->second;
  if (!isOfTheSame(put.first, piece) || data.size() > piece.length - put.arrived) {
    ++bad_;
    return false;
  }
  put.isDropped = put.isDropped || !copyIn(piece, data);
  put.arrived += data.size();
  if (put.arrived < piece.length) return false;
  if (!put.isDropped) {
    const auto use = openWord(regions_, piece);
    if (use && tryStamp(wordAt(use), piece.signal.stamp)) use.bell().ring();
  }
  puts_.erase(piece.number);
  return true;
}

// Returns false if the put is late or refused.
bool Incoming::copyIn(const Packet& piece, ByteView data) {
  const auto word = openWord(regions_, piece);
  const bool isAligned = reinterpret_cast<uintptr_t>(word.data()) % 8 == 0;
  if (word && isAligned && !canStamp(wordAt(word), piece.signal.stamp)) return false;
  // Opens the whole range: a put that leaves the region writes nothing, not even the part inside.
  const auto use = regions_.open(piece.key, piece.offset, piece.length, kRemoteWrite);
  const bool isFree = piece.offset >= sizeof(Doorbell) || piece.length == 0;
  if (!word || !isAligned || !use || !isFree) {
    if (!std::exchange(loggedRefusal_, true))
      log(LogLevel::kWarning, "fabric", "a put outside of the registered regions was refused: key ",
          piece.key, ", offset ", piece.offset, ", ", piece.length, " bytes");
    return false;
  }
  if (!data.empty()) std::memcpy(use.data() + piece.position, data.data(), data.size());
  return true;
}

// A loop, not a recursion: the peer decides how many puts wait for each other, and could exhaust
// the stack.
void Incoming::land(uint64_t put) {
  landed_.add(put);
  if (held_.empty()) return;
  std::vector<uint64_t> landed{put};
  while (!landed.empty()) {
    const auto waiting = held_.extract(landed.back());
    landed.pop_back();
    if (!waiting) continue;
    for (const Held& held : waiting.mapped()) {
      heldBytes_ -= heldBytesOf(held.data.size());
      if (!place(held.packet, held.data)) continue;
      landed_.add(held.packet.number);
      landed.push_back(held.packet.number);
    }
  }
}

std::optional<Packet::Status> Incoming::write(const Packet& piece, ByteView data) {
  Whole& write = writes_.try_emplace(piece.number, Whole{.first = piece}).first->second;
  if (!isOfTheSame(write.first, piece) || data.size() > piece.length - write.arrived) {
    ++bad_;
    return std::nullopt;
  }
  if (piece.status == Packet::Status::kAborted) {
    write.isCutAt = piece.position;
  } else if (const auto use = regions_.open(piece.key, piece.offset, piece.length, kRemoteWrite);
             !use) {
    write.isDropped = true;
  } else if (!write.isDropped && !data.empty()) {
    std::memcpy(use.data() + piece.position, data.data(), data.size());
  }
  write.arrived += data.size();
  if (write.isCutAt && write.arrived >= *write.isCutAt) {
    writes_.erase(piece.number);
    return std::nullopt;
  }
  if (write.isCutAt || write.arrived < piece.length) return std::nullopt;
  const bool isDropped = write.isDropped;
  writes_.erase(piece.number);
  return isDropped ? Packet::Status::kRefused : Packet::Status::kOk;
}

void Incoming::clear() {
  puts_.clear();
  writes_.clear();
  landed_ = {};
  held_.clear();
  heldBytes_ = 0;
}

}  // namespace mooncake
