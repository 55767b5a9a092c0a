#include <algorithm>

#include "base/log.h"
#include "engine/transports/fabric/fabric_channel.h"

// What cards move by themselves: how it is cut, what becomes of a piece that fails, and how the
// memory is given back. Packets do the rest, and all that fails.
namespace mooncake {
namespace {

constexpr uint64_t kMostPiece = uint64_t(1) << 20;
constexpr uint64_t kLeastPiece = uint64_t(64) << 10;  // of a transfer that is split
constexpr size_t kWindow = 64;                        // pieces under way, for each card
constexpr uint64_t kQuantum = 16;      // of one transfer before the next has its turn
constexpr size_t kMostGrants = 65536;  // remembered
// Number of RETIRE that wait for resume(). An honest peer sends a few for each region.
constexpr size_t kMostHeldRetires = 4096;
constexpr auto kAskAgain = std::chrono::milliseconds(100);  // where there was nothing to grant
// For operations to end by themselves before the card is closed for it.
constexpr auto kGrace = std::chrono::milliseconds(50);
constexpr auto kPatience = std::chrono::seconds(10);
// Longest time that stop() takes: keys are withdrawn, cards are closed, pieces end.
constexpr std::chrono::seconds kMostStop = 3 * kPatience + std::chrono::seconds(1);

}  // namespace

// One piece. Holds the channel and the transfer until the card is done with it.
class FabricChannel::MovePiece final : public RailOperation {
 public:
  MovePiece(std::shared_ptr<FabricChannel> channel, std::shared_ptr<CardTransfer> transfer,
            const CardPiece& what)
      : channel_(std::move(channel)), transfer_(std::move(transfer)), what_(what) {}

  Status begin(Nic& nic) override {
    if (!transfer_->gate.enter()) return {ErrorCode::kAborted, "the transfer has ended"};
    transfer_->rails.fetch_or(uint64_t(1) << what_.path, std::memory_order_relaxed);
    const NicBuffer here{transfer_->memory.subspan(what_.position, what_.bytes), what_.memory};
    Status begun = transfer_->writes()
                       ? nic.write(what_.peer.number, here, what_.key, what_.offset, this)
                       : nic.read(what_.peer.number, here, what_.key, what_.offset, this);
    hasBegun_ = begun.ok();
    if (!hasBegun_) transfer_->gate.leave();
    return begun;
  }
  void end(const NicCompletion& how) override {
    if (hasBegun_) transfer_->gate.leave();
    channel_->onMoved(transfer_, what_, hasBegun_, how);
  }
  RailShare& share() const override { return channel_->operations_; }
  uint64_t generation() const override { return what_.peer.generation; }
  bool endsWithTheCard() const override { return true; }

 private:
  const std::shared_ptr<FabricChannel> channel_;
  const std::shared_ptr<CardTransfer> transfer_;
  const CardPiece what_;
  bool hasBegun_ = false;
};

// ---- how it begins

// Null: it is for packets, or for the peer's cards. Small ones, what is not registered at both
// ends, what the peer has not granted yet, and reads of cards that do not close in peace while some
// are under way.
std::shared_ptr<CardTransfer> FabricChannel::moveByCards(bool isWrite, bool isOneOfFew,
                                                         const RemoteRegion& region,
                                                         uint64_t offset,
                                                         std::span<std::byte> memory,
                                                         Completion* completion) {
  if (memory.size() < options_.leastByCard || !memories_ || !theirs_ || lost_) return nullptr;
  if (!isWrite && !rails_->limits(0).closeEndsReads) return nullptr;
  auto local = memories_->find(memory);
  if (!local) return nullptr;
  const auto grant = grantOf(region.key);
  const uint32_t right = isWrite ? kRemoteWrite : kRemoteRead;
  // What the owner would refuse is for it to refuse.
  if (!grant || (grant->rights & right) == 0 || offset > grant->bytes ||
      memory.size() > grant->bytes - offset)
    return nullptr;
  const auto transfer = std::make_shared<CardTransfer>();
  transfer->number = stream_.nextNumber();
  transfer->kind = isWrite ? CardTransfer::Kind::kWrite : CardTransfer::Kind::kRead;
  transfer->key = region.key;
  transfer->offset = offset;
  transfer->memory = memory;
  transfer->completion = completion;
  transfer->local = std::move(*local);
  transfer->grant = grant;
  transfer->isOneOfFew = isOneOfFew;
  transfer->turn = stream_.nextRail();
  moving_.emplace(transfer->number, transfer);
  unmoved_.push_back(transfer);
  return transfer;
}

// Null: the peer is asked, unless it was just now.
std::shared_ptr<control::Grant> FabricChannel::grantOf(uint64_t key) {
  const auto now = Clock::now();
  if (grants_.size() >= kMostGrants) grants_.clear();
  Granted& granted = grants_[key];
  if (!granted.grant && now >= granted.askAt) {
    granted.askAt = now + kAskAgain;
    tell(control::encodeNumber(control::Kind::kResolve, key));
  }
  return granted.grant;
}

void FabricChannel::moveOn(Clock::time_point now) {
  while (!unmoved_.empty() && underWay_ < kWindow * stream_.paths().count()) {
    const auto transfer = unmoved_.front();
    const bool isOver = transfer->end || transfer->position == transfer->memory.size();
    if (!isOver && !movePiece(transfer, now)) return;
    if (transfer->end || transfer->position == transfer->memory.size()) {
      unmoved_.pop_front();
    } else if (transfer->pieces % kQuantum == 0 && unmoved_.size() > 1) {
      unmoved_.push_back(transfer);
      unmoved_.pop_front();
    }
  }
}

// Whether both ends' cards on it know the memory.
bool FabricChannel::isAble(const CardTransfer& transfer, size_t path) const {
  const auto& on = transfer.local.cards[path];
  const auto& cards = transfer.grant->cards;
  const size_t card = path % theirs_->rails.size();
  return on && on->memory() && on->generation() == rails_->generation(path) &&
         card < cards.size() && !cards[card].empty() && rails_->limits(path).mostRmaBytes > 0;
}

// Of the paths that are up and can the one with the fewest pieces under way: where one has failed
// the others share its part. Of several the next in turn. None: no card can.
std::optional<FabricChannel::Way> FabricChannel::wayFor(const CardTransfer& transfer, bool isSplit,
                                                        Clock::time_point now) {
  const uint64_t first = transfer.turn + (isSplit ? transfer.pieces : 0);
  std::optional<Way> best;
  for (size_t i = 0; i < stream_.paths().count(); ++i) {
    const size_t path = (first + i) % stream_.paths().count();
    if (!stream_.paths().isUp(path) || !isAble(transfer, path)) continue;
    if (best && movingOn_[path] >= movingOn_[best->path]) continue;
    const auto peer = peerAt(path);
    if (!peer) {
      stream_.leaveOut(path, now, "the peer's card has no address here");
    } else if (peer->generation == transfer.local.cards[path]->generation()) {
      best = {path, *peer};
    }
  }
  return best;
}

// The next one. False: no path is up.
bool FabricChannel::movePiece(const std::shared_ptr<CardTransfer>& transfer,
                              Clock::time_point now) {
  const uint64_t all = transfer->memory.size();
  const bool isSplit = all >= stream_.splitBytes(transfer->isOneOfFew);
  const auto way = wayFor(*transfer, isSplit, now);
  if (stream_.paths().up() == 0) return false;
  ++transfer->open;
  if (!way) {  // the rest of it
    const uint64_t rest = std::exchange(transfer->position, all);
    moveOtherwise(transfer, rest, all - rest);
    endIfOver(transfer);
    return true;
  }
  const size_t card = way->path % theirs_->rails.size();
  const auto& pieces = transfer->grant->cards[card];
  const uint64_t here = transfer->local.offset + transfer->position;
  const uint64_t there = transfer->offset + transfer->position;
  const auto& from = transfer->local.cards[way->path]->memory()->pieceAt(0, here);
  const auto to =
      std::prev(std::upper_bound(pieces.begin(), pieces.end(), there,
                                 [](uint64_t at, const auto& piece) { return at < piece.offset; }));
  uint64_t bytes =
      std::min({all - transfer->position, kMostPiece, rails_->limits(way->path).mostRmaBytes,
                from.offset + from.memory->memory().size() - here, to->offset + to->bytes - there});
  if (isSplit) bytes = std::min(bytes, std::max(kLeastPiece, all / stream_.paths().up() + 1));
  const CardPiece what{.path = way->path,
                       .card = static_cast<uint8_t>(card),
                       .peer = way->peer,
                       .position = transfer->position,
                       .bytes = bytes,
                       .memory = from.memory.get(),
                       .key = to->key,
                       .offset = there - to->offset};
  transfer->position += bytes;
  ++transfer->pieces;
  ++underWay_;
  ++movingOn_[way->path];
  rails_->submit(way->path, std::make_unique<MovePiece>(shared_from_this(), transfer, what));
  return true;
}

// A piece that is open. Who has asked for it asks once more, for packets.
void FabricChannel::moveOtherwise(const std::shared_ptr<CardTransfer>& transfer, uint64_t position,
                                  uint64_t bytes) {
  if (transfer->kind != CardTransfer::Kind::kServed)
    return moveByPackets(transfer, position, bytes);
  transfer->told.miss({.position = position, .bytes = bytes});
  --transfer->open;
}

void FabricChannel::moveByPackets(const std::shared_ptr<CardTransfer>& transfer, uint64_t position,
                                  uint64_t bytes) {
  const auto memory = transfer->memory.subspan(position, bytes);
  const PacketStream::Range there{transfer->key, transfer->offset + position};
  memories_->retried.fetch_add(bytes, std::memory_order_relaxed);
  if (transfer->writes()) {
    stream_.write(there, memory, {.completion = transfer->completion, .whole = transfer->number});
  } else {
    stream_.get(there,
                {.target = memory, .completion = transfer->completion, .whole = transfer->number});
  }
}

// ---- what becomes of it

// What is served counts for who has asked.
void FabricChannel::count(const CardTransfer& transfer, uint64_t bytes) {
  if (transfer.kind == CardTransfer::Kind::kServed) return;
  moved_.fetch_add(bytes, std::memory_order_relaxed);
  (transfer.writes() ? memories_->written : memories_->read)
      .fetch_add(bytes, std::memory_order_relaxed);
}

void FabricChannel::onMoved(const std::shared_ptr<CardTransfer>& transfer, const CardPiece& what,
                            bool hasBegun, const NicCompletion& how) {
  std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  --underWay_;
  --movingOn_[what.path];
  if (moving_.contains(transfer->number)) {
    if (how.error == NicError::kNone) {
      count(*transfer, what.bytes);
      received_.fetch_add(1, std::memory_order_relaxed);
      --transfer->open;
    } else if (transfer->end) {
      --transfer->open;
    } else {
      onPieceFailed(transfer, what, hasBegun, how, now);
    }
    endIfOver(transfer);
  }
  pump(now);
}

void FabricChannel::onPieceFailed(const std::shared_ptr<CardTransfer>& transfer,
                                  const CardPiece& what, bool hasBegun, const NicCompletion& how,
                                  Clock::time_point now) {
  if (hasBegun && how.error != NicError::kRefused) {
    stream_.leaveOut(what.path, now,
                     how.error == NicError::kUnreachable ? "the card could not reach the peer's"
                                                         : "the card does not work");
  } else if (hasBegun) {
    voidKeys(*transfer->grant, what.card);
    grants_.erase(transfer->key);
  }
  // What the peer's card has refused does not land. Of what was read nothing comes after its end.
  if (!transfer->writes() || !hasBegun || how.error == NicError::kRefused)
    return moveOtherwise(transfer, what.position, what.bytes);
  const auto isSame = [&](const auto& entry) {
    return entry.second.grant == transfer->grant && entry.second.card == what.card;
  };
  auto asked = std::find_if(retirements_.begin(), retirements_.end(), isSame);
  if (asked == retirements_.end()) {
    const uint64_t ticket = ++lastTicket_;
    asked =
        retirements_
            .emplace(ticket, Retirement{.grant = transfer->grant, .card = what.card, .pieces = {}})
            .first;
    voidKeys(*transfer->grant, what.card);
    grants_.erase(transfer->key);
    tell(control::Retire{.ticket = ticket, .region = transfer->key, .card = what.card}.encode());
  }
  asked->second.pieces.push_back({transfer, what.position, what.bytes});
}

void FabricChannel::voidKeys(control::Grant& grant, size_t card) {
  if (card < grant.cards.size()) grant.cards[card].clear();
}

void FabricChannel::onRetired(uint64_t ticket) {
  std::lock_guard lock(mutex_);
  for (auto& [number, retiring] : retiring_) retiring.tickets.erase(ticket);
  const auto found = retirements_.extract(ticket);
  if (!found) return;
  for (const LatePiece& piece : found.mapped().pieces) {
    if (!piece.transfer->end) {
      moveOtherwise(piece.transfer, piece.position, piece.bytes);
    } else {
      --piece.transfer->open;
    }
    endIfOver(piece.transfer);
  }
  pump(Clock::now());
  activate();
}

// A piece that packets have carried.
void FabricChannel::onPartEnded(uint64_t number, ErrorCode code) {
  const auto found = moving_.find(number);
  if (found == moving_.end()) return;
  const auto transfer = found->second;
  --transfer->open;
  if (code != ErrorCode::kOk) giveUp(*transfer, code);
  endIfOver(transfer);
}

// No piece of it begins any more; those that cards have end by themselves.
void FabricChannel::giveUp(CardTransfer& transfer, ErrorCode code) {
  if (!transfer.end) transfer.end = code;
  transfer.gate.shut();
}

void FabricChannel::endIfOver(const std::shared_ptr<CardTransfer>& transfer) {
  const bool isAllBegun = transfer->end || transfer->position == transfer->memory.size();
  if (transfer->open > 0 || !isAllBegun || moving_.erase(transfer->number) == 0) return;
  transfer->local = {};
  if (transfer->kind == CardTransfer::Kind::kServed) return endServed(*transfer);
  if (!transfer->end) stream_.announce(transfer->announcement);
  transfer->completion->end(transfer->end.value_or(ErrorCode::kOk));
}

// All of them, where packets are dropped as well. Memory that a card still touches is given back
// when it does not any more.
void FabricChannel::giveUpAll(ErrorCode code) {
  for (auto& [ticket, retirement] : std::exchange(retirements_, {})) {
    for (const LatePiece& piece : retirement.pieces) --piece.transfer->open;
  }
  grants_.clear();
  unmoved_.clear();
  std::vector<std::shared_ptr<CardTransfer>> asked;
  for (const auto& [number, transfer] : std::map(moving_)) {
    giveUp(*transfer, code);
    if (transfer->awaitsPeer) asked.push_back(transfer);
    endIfOver(transfer);
  }
  if (asked.empty()) return;
  offered_.clear();
  memories_->withdrawLater(this, [weak = weak_from_this(), asked = std::move(asked)] {
    const auto self = weak.lock();
    if (!self) return;  // closed: they have ended
    std::lock_guard lock(self->mutex_);
    for (const auto& transfer : asked) self->endAsked(transfer);
  });
}

// Under the lock: those that count at this completion, or all. They end with stop(), without it.
FabricChannel::Stopped FabricChannel::takeMoving(const Completion* completion) {
  Stopped taken{.grace = Deadline::after(kGrace)};
  for (size_t i = 0; i < rails_->count(); ++i) taken.generations.push_back(rails_->generation(i));
  for (auto at = moving_.begin(); at != moving_.end();) {
    if (completion && at->second->completion != completion) {
      ++at;
      continue;
    }
    giveUp(*at->second, ErrorCode::kAborted);
    if (at->second->kind == CardTransfer::Kind::kServed) --serving_;
    if (at->second->awaitsPeer) {
      offered_.clear();
      taken.awaitPeer = true;
    }
    at->second->isTaken = true;
    taken.transfers.push_back(at->second);
    stopping_.push_back(at->second);
    at = moving_.erase(at);
  }
  const auto isTaken = [](const auto& transfer) { return transfer->isTaken; };
  std::erase_if(unmoved_, isTaken);
  for (auto& [ticket, retirement] : retirements_)
    std::erase_if(retirement.pieces, [&](const auto& piece) { return isTaken(piece.transfer); });
  return taken;
}

// When it returns no card touches their memory any more.
void FabricChannel::stop(const Stopped& stopped, ErrorCode code) {
  if (stopped.transfers.empty()) return;
  if (stopped.awaitPeer) memories_->withdraw(this);  // the peer's card as little as ours
  uint64_t busy = 0;
  for (const auto& transfer : stopped.transfers) {
    if (!transfer->gate.close(stopped.grace))
      busy |= transfer->rails.load(std::memory_order_relaxed);
  }
  if (busy != 0) {
    std::vector<Rails::Retired> retire;
    for (size_t i = 0; i < rails_->count(); ++i) {
      if ((busy >> i & 1) != 0) retire.push_back({i, stopped.generations[i]});
    }
    rails_->retireNow(retire);
    const auto closed = Deadline::after(kPatience);
    for (const auto& transfer : stopped.transfers) {
      if (!transfer->gate.close(closed))
        log(LogLevel::kError, options_.name, "a card does not end what is under way");
    }
  }
  std::lock_guard lock(mutex_);
  for (const auto& transfer : stopped.transfers) {
    transfer->isTaken = false;
    transfer->local = {};
    transfer->source = {};
    if (Completion* completion = std::exchange(transfer->completion, nullptr))
      completion->end(code);
  }
  std::erase_if(stopping_, [](const auto& transfer) { return !transfer->isTaken; });
  stopped_.notify_all();
}

// A thread that hangs in stop() must not keep the completions of others: they end here then.
void FabricChannel::awaitStopped(const Completion* completion) {
  const auto isAwaited = [&](const auto& transfer) {
    return completion == nullptr || transfer->completion == completion;
  };
  std::unique_lock lock(mutex_);
  const bool isOver = stopped_.wait_until(lock, Deadline::after(kMostStop).when(), [&] {
    return std::ranges::none_of(stopping_, isAwaited);
  });
  if (isOver) return;
  log(LogLevel::kError, options_.name, "transfers are given up that a card may still carry out: ",
      "another thread has not ended them within ", kMostStop.count(), " s");
  for (const auto& transfer : stopping_) {
    if (!isAwaited(transfer)) continue;
    if (Completion* given = std::exchange(transfer->completion, nullptr))
      given->end(ErrorCode::kAborted);
  }
}

// ---- what the peer's end says of it, and ours to it

void FabricChannel::onResolve(uint64_t key) {
  std::lock_guard lock(mutex_);
  if (closed_ || fenced_ || lost_) return;
  // Only a peer that was asked to write there gets keys with that right.
  const bool isAsked = offered_.contains(key);
  const auto grant =
      memories_ ? memories_->grant(key, shared_from_this(), isAsked) : control::Grant{key};
  tell(grant.encode());
}

void FabricChannel::onGrant(control::Grant grant) {
  std::lock_guard lock(mutex_);
  if (closed_ || fenced_ || !theirs_) return;
  auto found = grants_.find(grant.region);
  if (found == grants_.end()) {  // not asked for
    if (grants_.size() >= control::kMostOffers) return;
    found = grants_.emplace(grant.region, Granted()).first;
  }
  found->second.isAnswered = true;
  const bool isAny = std::any_of(grant.cards.begin(), grant.cards.end(),
                                 [](const auto& one) { return !one.empty(); });
  if (!isAny) return;
  if (!std::exchange(hasToldUse_, true))
    log(LogLevel::kInfo, options_.name, "cards move bytes of a peer by themselves");
  found->second.grant = std::make_shared<control::Grant>(std::move(grant));
}

void FabricChannel::onChanged(uint64_t key) {
  std::lock_guard lock(mutex_);
  grants_.erase(key);
}

// Its address is another one, and none of the keys that it gave counts.
void FabricChannel::onCard(const control::Card& card) {
  std::lock_guard lock(mutex_);
  if (!theirs_ || card.index >= theirs_->rails.size()) return;
  theirs_->rails[card.index].address = card.address;
  grants_.clear();
  for (const auto& [number, transfer] : moving_) {
    if (transfer->grant) voidKeys(*transfer->grant, card.index);
  }
  const auto now = Clock::now();
  for (size_t path = 0; path < stream_.paths().count(); ++path) {
    if (path % theirs_->rails.size() != card.index) continue;
    if (peers_[path]) (*rails_)[path].release(*peers_[path]);
    peers_[path].reset();
    stream_.leaveOut(path, now, "the peer's was opened anew", /*isAnew=*/true);
  }
  pump(now);
}

void FabricChannel::onRetire(const control::Retire& retire) {
  uint64_t epoch = 0;
  {
    std::lock_guard lock(mutex_);
    if (closed_ || fenced_) return;
    // Packets that are held were acknowledged, and land at resume(). The answer comes after them.
    if (stream_.isHeld()) {
      if (heldRetires_.size() < kMostHeldRetires) heldRetires_.push_back(retire);
      return;
    }
    if (!memories_) return tell(control::encodeNumber(control::Kind::kRetired, retire.ticket));
    epoch = epoch_;
  }
  memories_->takeBackLater(retire.region, retire.card, this,
                           [weak = weak_from_this(), ticket = retire.ticket, epoch] {
                             const auto self = weak.lock();
                             if (!self) return;
                             std::lock_guard lock(self->mutex_);
                             if (self->epoch_ == epoch && !self->closed_)
                               self->tell(control::encodeNumber(control::Kind::kRetired, ticket));
                           });
}

void FabricChannel::onKeysChanged(uint64_t region) {
  std::lock_guard lock(mutex_);
  offered_.erase(region);
  if (!closed_) tell(control::encodeNumber(control::Kind::kChanged, region));
}

void FabricChannel::onRenewed(size_t rail) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  offered_.clear();
  tell(control::Card{.index = static_cast<uint8_t>(rail), .address = rails_->address(rail)}
           .encode());
  if (rail >= peers_.size() || !theirs_) return;
  peers_[rail].reset();
  const auto now = Clock::now();
  stream_.leaveOut(rail, now, "it was opened anew", /*isAnew=*/true);
  pump(now);
}

}  // namespace mooncake
