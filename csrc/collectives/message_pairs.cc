#include "collectives/message_pairs.h"

#include <algorithm>

namespace mooncake {
namespace {

// Number of acknowledgements in one control message.
constexpr size_t kAcksPerMessage = 4096;

std::shared_ptr<const Meeting> meetIn(const Group& group) {
  return std::make_shared<const Meeting>(Meeting{group.mailboxes(), group.topic() + 1});
}

}  // namespace

void MessagePair::noteAcknowledged(uint64_t number) {
  const auto found = announced.find(number);
  if (found != announced.end()) found->second->isAcknowledged_ = true;
}

MessagePairs::MessagePairs(Group& group) : group_(&group), newest_(meetIn(group)) {
  pairs_.reserve(size_t(group.size()));
  for (int r = 0; r < group.size(); ++r) pairs_.emplace_back(newest_, r);
}

std::vector<std::shared_ptr<const Meeting>> MessagePairs::move(Group& successor,
                                                               const std::vector<bool>& stays) {
  auto unused = places();
  group_ = &successor;
  newest_ = nullptr;
  auto meeting = meetIn(successor);
  std::vector<MessagePair> pairs;
  pairs.reserve(pairs_.size());
  for (int r = 0; r < size(); ++r) {
    if (stays[size_t(r)]) {
      pairs.push_back(std::move(pairs_[size_t(r)]));
    } else {
      newest_ = meeting;
      pairs.emplace_back(meeting, r);
    }
  }
  pairs_ = std::move(pairs);
  const auto used = places();
  std::erase_if(unused, [&](const auto& one) { return std::ranges::count(used, one) > 0; });
  return unused;
}

// The pair with ourselves has no mailboxes.
std::vector<std::shared_ptr<const Meeting>> MessagePairs::places() const {
  std::vector<std::shared_ptr<const Meeting>> places;
  if (newest_) places.push_back(newest_);
  for (int r = 0; r < size(); ++r) {
    const auto& met = pairs_[size_t(r)].met;
    if (r != group_->rank() && met && std::ranges::count(places, met) == 0) places.push_back(met);
  }
  return places;
}

std::vector<std::shared_ptr<const Meeting>> MessagePairs::leave() {
  auto places = this->places();
  newest_ = nullptr;
  for (MessagePair& pair : pairs_) pair.met = nullptr;
  return places;
}

bool MessagePairs::payAcks() {
  bool owes = false;
  for (int r = 0; r < size(); ++r) {
    MailboxPair& mailboxes = pairs_[size_t(r)].mailboxes;
    if (mailboxes.owes()) mailboxes.putAcks(group_->isGone(r));
    owes |= mailboxes.owes();
  }
  return owes;
}

// By a control message, because their memory may be gone by then. If it is lost with its connection,
// the engine repeats it. Wire form:
//   u64 messages that we sent  u8 isLast  u32 count  u64 their messages that we fetched [count]
void MessagePairs::sayThatWeLeft() {
  for (int r = 0; r < size(); ++r) {
    const MessagePair& pair = pairs_[size_t(r)];
    const auto& peer = group_->window().peer(r);
    if (!peer || group_->isGone(r)) continue;
    const std::deque<uint64_t>& acks = pair.mailboxes.unread();
    std::vector<Bytes> words;
    size_t told = 0;
    do {
      const size_t more = std::min(acks.size() - told, kAcksPerMessage);
      ByteWriter last;
      last.put(pair.mailboxes.sent()).put(static_cast<uint8_t>(told + more == acks.size()));
      last.put(static_cast<uint32_t>(more));
      for (size_t i = 0; i < more; ++i) last.put(acks[told++]);
      words.push_back(last.take());
    } while (told < acks.size());
    group_->engine().keepLastWords({peer}, pair.met->topic, words);
    for (const Bytes& word : words) (void)group_->engine().send(*peer, pair.met->topic, word);
  }
}

void MessagePairs::onLeft(const Meeting& place, const EngineId& from, ByteView message) {
  ByteReader in(message);
  const auto sent = in.get<uint64_t>();
  const bool isLast = in.get<uint8_t>() != 0;
  const size_t count = in.get<uint32_t>();
  if (count > kAcksPerMessage) return;
  std::vector<uint64_t> acks(count);
  for (uint64_t& ack : acks) ack = in.get<uint64_t>();
  if (!in.finish("").ok()) return;
  for (int r = 0; r < size(); ++r) {
    MessagePair& pair = pairs_[size_t(r)];
    if (pair.met.get() != &place) continue;  // the rank has another holder by now
    const auto& peer = place.mailboxes->peer(r);
    if (!peer || peer->id != from) continue;
    for (const uint64_t ack : acks) pair.noteAcknowledged(ack);
    if (!isLast) continue;
    pair.left = sent;
    pair.mailboxes.leave();
  }
}

}  // namespace mooncake
