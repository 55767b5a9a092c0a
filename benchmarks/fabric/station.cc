#include "fabric/station.h"

#include <atomic>
#include <cstring>
#include <sys/mman.h>
#include <thread>

#include "wires/nic/libfabric/cards.h"

namespace mooncake::bench {
namespace {

constexpr uintptr_t kReceiveTag = uintptr_t(1) << 32;

std::span<std::byte> allocate(size_t bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (at == MAP_FAILED) die("out of memory");
  std::memset(at, 1, bytes);
  return {static_cast<std::byte*>(at), bytes};
}

double secondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

Station::Station(Crew& crew, const FabricEnv& env, size_t bytes, size_t copies, bool spins)
    : crew_(crew), spins_(spins) {
  const auto listed = orDie(listLibfabricCards(env));
  for (size_t copy = 0; copy < copies; ++copy) {
    for (const LibfabricCard& card : listed) cards_.push_back(orDie(openLibfabricNic(card, env)));
  }
  memory_ = allocate(bytes);
  inbox_ = allocate(kReceives * kReceiveBytes);
  for (const auto& card : cards_) {
    const uint32_t both = static_cast<uint32_t>(NicAccess::kRemoteRead) |
                          static_cast<uint32_t>(NicAccess::kRemoteWrite);
    registered_.push_back(orDie(card->registerMemory(memory_, both)));
    inboxes_.push_back(orDie(card->registerMemory(inbox_, 0)));
  }
  ByteWriter mine;
  mine.put(static_cast<uint32_t>(cards_.size()));
  for (size_t i = 0; i < cards_.size(); ++i) {
    const NicKey key = registered_[i]->key();
    mine.putBytes(cards_[i]->address()).put(key.key).put(key.base);
  }
  for (const Bytes& told : crew_.exchange(mine.take())) {
    ByteReader in(told);
    Remote remote;
    const auto count = in.get<uint32_t>();
    for (uint32_t i = 0; i < count; ++i) {
      const ByteView address = in.getBytes(256);
      remote.addresses.emplace_back(address.begin(), address.end());
      const auto key = in.get<uint64_t>();
      remote.keys.push_back({key, in.get<uint64_t>()});
    }
    remotes_.push_back(std::move(remote));
  }
}

NicPeer Station::peer(size_t card, int rank) {
  const auto& addresses = remotes_[static_cast<size_t>(rank)].addresses;
  return orDie(cards_[card]->insert(addresses[card % addresses.size()]));
}

void Station::postReceive(size_t card, size_t i) {
  const NicBuffer buffer{inbox_.subspan(i % kReceives * kReceiveBytes, kReceiveBytes),
                         inboxes_[card].get()};
  orDie(cards_[card]->receive(buffer, reinterpret_cast<void*>(kReceiveTag + i)));
}

size_t Station::pollAll() {
  size_t ended = 0;
  for (size_t c = 0; c < cards_.size(); ++c) {
    std::array<NicCompletion, 64> some;
    const size_t count = cards_[c]->poll(some);
    for (const NicCompletion& one : std::span(some).first(count)) {
      const auto tag = reinterpret_cast<uintptr_t>(one.context);
      if (one.kind == NicCompletion::Kind::kReceived) {
        if (one.error == NicError::kNone) postReceive(c, tag - kReceiveTag);
        continue;
      }
      if (one.error != NicError::kNone)
        die("an operation failed: " + std::string(std::strerror(one.providerError)));
      if (--left_[tag] == 0) ended_.push_back(tag);
      ++ended;
    }
    if (count == 0 && !spins_ && cards_.size() == 1)
      cards_[c]->wait(Deadline::after(std::chrono::milliseconds(1)));
  }
  return ended;
}

void Station::begin(Verb verb, int target, const Piece& piece, size_t slot) {
  Nic& card = *cards_[piece.card];
  const NicPeer to = peers_[piece.card][static_cast<size_t>(target)];
  const auto& keys = remotes_[static_cast<size_t>(target)].keys;
  const NicKey key = keys[piece.card % keys.size()];
  const NicBuffer buffer{memory_.subspan(piece.offset, piece.bytes), registered_[piece.card].get()};
  void* context = reinterpret_cast<void*>(slot);
  for (;;) {
    Status status;
    switch (verb) {
      case Verb::kSend:
        status = card.send(to, buffer, {}, context);
        break;
      case Verb::kWrite:
        status = card.write(to, buffer, key, piece.offset, context);
        break;
      case Verb::kRead:
        status = card.read(to, buffer, key, piece.offset, context);
        break;
    }
    if (status.ok()) return;
    if (status.code() != ErrorCode::kExhausted) die(status.error().message);
    pollAll();
  }
}

double Station::stream(Verb verb, const std::vector<int>& targets, const Plan& plan, size_t depth,
                       double seconds) {
  peers_.assign(cards_.size(), std::vector<NicPeer>(static_cast<size_t>(crew_.size())));
  for (size_t c = 0; c < cards_.size(); ++c) {
    for (const int target : targets) peers_[c][static_cast<size_t>(target)] = peer(c, target);
  }
  left_.assign(depth * targets.size(), 0);
  ended_.clear();
  for (size_t slot = 0; slot < left_.size(); ++slot) ended_.push_back(slot);
  uint64_t bytes = 0;
  size_t number = 0, underWay = 0;
  std::vector<Piece> pieces;
  const auto start = Clock::now();
  double elapsed = 0;
  for (;;) {
    elapsed = secondsSince(start);
    if (elapsed < seconds) {
      while (!ended_.empty()) {
        const size_t slot = ended_.back();
        ended_.pop_back();
        pieces.clear();
        plan(number++, pieces);
        left_[slot] = pieces.size();
        underWay += pieces.size();
        for (const Piece& piece : pieces) {
          bytes += piece.bytes;
          begin(verb, targets[slot % targets.size()], piece, slot);
        }
      }
    } else if (ended_.size() == left_.size()) {
      return static_cast<double>(bytes) / elapsed;
    }
    pollAll();
  }
}

void Station::attend() {
  for (size_t c = 0; c < cards_.size(); ++c) {
    if (!inboxes_[c]) continue;
    for (size_t i = 0; i < kReceives / cards_.size() && !isReceiving_; ++i) postReceive(c, i);
  }
  isReceiving_ = true;
  std::atomic<bool> isOver{false};
  std::thread waiter([&] {
    crew_.barrier();
    isOver = true;
  });
  while (!isOver) pollAll();
  waiter.join();
}

Station::FirstSubmits Station::firstSubmits(int target) {
  FirstSubmits times;
  const auto micros = [](Clock::time_point since) { return secondsSince(since) * 1e6; };
  peers_.assign(cards_.size(), std::vector<NicPeer>(static_cast<size_t>(crew_.size())));
  const auto& remote = remotes_[static_cast<size_t>(target)];
  const auto write = [&](size_t card, NicPeer to, size_t remoteCard) {
    left_.assign(1, 1);
    const NicBuffer buffer{memory_.first(1 << 20), registered_[card].get()};
    while (cards_[card]->write(to, buffer, remote.keys[remoteCard], 0, nullptr).code() ==
           ErrorCode::kExhausted)
      pollAll();
    while (left_[0] != 0) pollAll();
  };
  auto start = Clock::now();
  const NicPeer one = orDie(cards_[0]->insert(remote.addresses[0]));
  write(0, one, 0);
  times.first = micros(start);
  start = Clock::now();
  std::vector<std::vector<NicPeer>> all(cards_.size());
  for (size_t c = 0; c < cards_.size(); ++c) {
    for (const Bytes& address : remote.addresses)
      all[c].push_back(orDie(cards_[c]->insert(address)));
  }
  times.insertAll = micros(start);
  // All pairs at once, as in a warm-up.
  left_.assign(1, all.size() * remote.addresses.size());
  const NicBuffer none{memory_.first(1), nullptr};
  start = Clock::now();
  for (size_t c = 0; c < cards_.size(); ++c) {
    for (size_t r = 0; r < all[c].size(); ++r) {
      const NicBuffer buffer{none.bytes, registered_[c].get()};
      while (cards_[c]->write(all[c][r], buffer, remote.keys[r], 0, nullptr).code() ==
             ErrorCode::kExhausted)
        pollAll();
    }
  }
  while (left_[0] != 0) pollAll();
  times.allFirst = micros(start);
  start = Clock::now();
  write(0, one, 0);
  times.second = micros(start);
  return times;
}

}  // namespace mooncake::bench
