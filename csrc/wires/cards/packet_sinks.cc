#include "wires/cards/packet_sinks.h"

namespace mooncake {

void PacketSinks::add(uint64_t incarnation, std::weak_ptr<PacketSink> sink) {
  Guard lock(mutex_);
  sinks_[incarnation] = std::move(sink);
}

void PacketSinks::remove(uint64_t incarnation) {
  Guard lock(mutex_);
  sinks_.erase(incarnation);
}

std::vector<std::shared_ptr<PacketSink>> PacketSinks::all() const {
  std::vector<std::shared_ptr<PacketSink>> sinks;
  SharedLock lock(mutex_);
  for (const auto& [incarnation, weak] : sinks_) {
    if (auto sink = weak.lock()) sinks.push_back(std::move(sink));
  }
  return sinks;
}

void PacketSinks::deliver(size_t rail, ByteView received) {
  ByteReader in(received);
  const auto packet = Packet::decode(in);
  std::shared_ptr<PacketSink> sink;
  if (packet.ok()) {
    SharedLock lock(mutex_);
    if (const auto found = sinks_.find(packet->incarnation); found != sinks_.end())
      sink = found->second.lock();
  }
  if (sink) {
    sink->onPacket(rail, *packet, in.getRaw(in.left()));
  } else {
    dropped_.fetch_add(1, std::memory_order_relaxed);
  }
}

}  // namespace mooncake
