#include "wires/packets/put_queue.h"

#include <algorithm>

namespace mooncake {
namespace {

constexpr size_t kMostCopiedBytes = size_t(256) << 20;  // as over TCP
constexpr size_t kMostWords = 4096;                     // remembered

}  // namespace

bool PutQueue::hasRoomFor(size_t bytes) const {
  return copiedBytes_ == 0 || copiedBytes_ + bytes <= kMostCopiedBytes;
}

uint64_t PutQueue::add(const PutRequest& request, uint64_t firstRail) {
  const uint64_t number = ++last_;
  uint64_t& last = lastOfWord_[{request.regionOfSignal().key, request.signal.offset}];
  puts_.push_back({.packet = {.kind = Packet::Kind::kPut,
                              .number = number,
                              .key = request.region.key,
                              .offset = request.offset,
                              .length = request.data.size(),
                              .signal = request.signal,
                              .signalKey = request.signalRegion.key,
                              .after = std::exchange(last, number)},
                   .data = request.data,
                   .firstRail = firstRail});
  return number;
}

void PutQueue::copyUnsent(uint64_t number) {
  const auto found = std::find_if(puts_.rbegin(), puts_.rend(), [&](const PacketSource& put) {
    return put.packet.number == number;
  });
  if (found == puts_.rend()) return;
  const auto left = found->data.subspan(found->packet.position);
  found->owned.assign(left.begin(), left.end());
  found->ownedFrom = found->packet.position;
  found->data = {};
  copiedBytes_ += found->owned.size();
}

void PutQueue::pop() {
  copiedBytes_ -= puts_.front().owned.size();
  puts_.pop_front();
}

void PutQueue::clear() {
  puts_.clear();
  copiedBytes_ = 0;
}

void PutQueue::restart() {
  clear();
  last_ = 0;
  lastOfWord_.clear();
}

bool PutQueue::remembersMany() const { return lastOfWord_.size() >= kMostWords; }

void PutQueue::forgetBelow(uint64_t number) {
  const uint64_t first = puts_.empty() ? number : std::min(number, puts_.front().packet.number);
  std::erase_if(lastOfWord_, [&](const auto& entry) { return entry.second < first; });
}

}  // namespace mooncake
