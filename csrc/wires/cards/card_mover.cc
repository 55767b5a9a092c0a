#include "wires/cards/card_mover.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace mooncake {
namespace {

constexpr uint64_t kMostPiece = uint64_t(1) << 20;
constexpr uint64_t kLeastPiece = uint64_t(64) << 10;  // of a transfer that is split
constexpr size_t kWindow = 64;                        // pieces under way, for each card
constexpr uint64_t kQuantum = 16;  // pieces of one transfer before the next has its turn
// How long operations may take to end by themselves, before their card is closed.
constexpr auto kGrace = std::chrono::milliseconds(50);
constexpr auto kPatience = std::chrono::seconds(10);
// Longest time that release() takes: keys are taken back, cards are closed, operations end.
constexpr std::chrono::seconds kMostRelease = 3 * kPatience + std::chrono::seconds(1);

}  // namespace

CardMover::CardMover(const char* name, size_t leastByCard, const Parts& parts, control::Tell tell)
    : name_(name),
      leastByCard_(leastByCard),
      parts_(parts),
      tell_(std::move(tell)),
      underWayOn_(parts.rails.count()),
      readBacks_(parts.rails.count()) {}

// ---- beginning

bool CardMover::begin(const Request& request) {
  if (request.memory.size() < leastByCard_ || !parts_.memories || !parts_.stream.isOpen())
    return false;
  if (!request.isWrite && !parts_.rails.limits(0).closeEndsReads) return false;
  auto local = parts_.memories->find(request.memory);
  if (!local) return false;
  const auto grant = parts_.keys.find(request.there.key);
  const uint32_t right = request.isWrite ? kRemoteWrite : kRemoteRead;
  // The owner refuses requests that the grant does not cover, so it gets them as packets.
  if (!grant || (grant->rights & right) == 0 || request.there.offset > grant->bytes ||
      request.memory.size() > grant->bytes - request.there.offset)
    return false;
  if (request.isWrite && !canWrite(*grant)) return false;
  const auto transfer = std::make_shared<CardTransfer>();
  transfer->number = parts_.stream.nextNumber();
  transfer->kind = request.isWrite ? CardTransfer::Kind::kWrite : CardTransfer::Kind::kRead;
  transfer->key = request.there.key;
  transfer->offset = request.there.offset;
  transfer->memory = request.memory;
  transfer->completion = request.completion;
  transfer->announcement = request.announcement;
  transfer->local = std::move(*local);
  transfer->grant = grant;
  transfer->isOneOfFew = request.isOneOfFew;
  transfer->firstRail = parts_.stream.nextRail();
  add(transfer);
  return true;
}

void CardMover::add(const std::shared_ptr<CardTransfer>& transfer) {
  moving_.emplace(transfer->number, transfer);
  if (transfer->kind == CardTransfer::Kind::kServed) ++serving_;
  if (transfer->kind != CardTransfer::Kind::kAsked) unmoved_.push_back(transfer);
}

std::shared_ptr<CardTransfer> CardMover::find(uint64_t number) const {
  const auto found = moving_.find(number);
  return found == moving_.end() ? nullptr : found->second;
}

// ---- pieces

std::optional<CardPiece> CardMover::next(Clock::time_point now) {
  while (!unmoved_.empty() && underWay_ < kWindow * parts_.stream.paths().count()) {
    const auto transfer = unmoved_.front();
    std::optional<CardPiece> piece;
    if (!transfer->hasAllBegun()) {
      const uint64_t all = transfer->memory.size();
      const bool isSplit = all >= parts_.stream.splitBytes(transfer->isOneOfFew);
      const auto way = wayFor(*transfer, isSplit, now);
      if (parts_.stream.paths().up() == 0) return std::nullopt;
      ++transfer->open;
      if (way) {
        piece = cut(transfer, *way, isSplit);
      } else {
        const uint64_t rest = std::exchange(transfer->position, all);
        fallBack(transfer, rest, all - rest);
        endIfOver(transfer);
      }
    }
    if (transfer->hasAllBegun()) {
      unmoved_.pop_front();
    } else if (transfer->pieces % kQuantum == 0 && unmoved_.size() > 1) {
      unmoved_.push_back(transfer);
      unmoved_.pop_front();
    }
    if (piece) return piece;
  }
  return std::nullopt;
}

// Returns whether the cards of both ends on this path know the memory.
bool CardMover::isAble(const CardTransfer& transfer, size_t path) const {
  const auto& on = transfer.local.cards[path];
  const auto& cards = transfer.grant->cards;
  const size_t card = parts_.cards.cardOf(path);
  return on && on->memory() && on->generation() == parts_.rails.generation(path) &&
         card < cards.size() && !cards[card].empty() && parts_.rails.limits(path).mostRmaBytes > 0;
}

// Returns the path with the fewest pieces under way, of the paths that are up and able. So the
// other paths share the part of one that has failed. Of several equal ones the next in turn. None:
// no card can move the transfer.
std::optional<CardMover::Way> CardMover::wayFor(const CardTransfer& transfer, bool isSplit,
                                                Clock::time_point now) {
  const Paths& paths = parts_.stream.paths();
  const uint64_t first = transfer.firstRail + (isSplit ? transfer.pieces : 0);
  std::optional<Way> best;
  for (size_t i = 0; i < paths.count(); ++i) {
    const size_t path = (first + i) % paths.count();
    if (!paths.isUp(path) || !isAble(transfer, path)) continue;
    if (best && underWayOn_[path] >= underWayOn_[best->path]) continue;
    const auto peer = parts_.cards.at(path);
    if (!peer) {
      parts_.stream.leaveOut(path, now, "the peer's card has no address here");
    } else if (peer->generation == transfer.local.cards[path]->generation()) {
      best = {path, *peer};
    }
  }
  return best;
}

// Cuts the next piece, at the limits of the card and of the registrations on both sides.
CardPiece CardMover::cut(const std::shared_ptr<CardTransfer>& transfer, const Way& way,
                         bool isSplit) {
  const uint64_t all = transfer->memory.size();
  const size_t card = parts_.cards.cardOf(way.path);
  const auto& pieces = transfer->grant->cards[card];
  const uint64_t here = transfer->local.offset + transfer->position;
  const uint64_t there = transfer->offset + transfer->position;
  const auto& from = transfer->local.cards[way.path]->memory()->pieceAt(0, here);
  const auto to =
      std::prev(std::upper_bound(pieces.begin(), pieces.end(), there,
                                 [](uint64_t at, const auto& piece) { return at < piece.offset; }));
  uint64_t bytes =
      std::min({all - transfer->position, kMostPiece, parts_.rails.limits(way.path).mostRmaBytes,
                from.offset + from.memory->memory().size() - here, to->offset + to->bytes - there});
  if (isSplit) bytes = std::min(bytes, std::max(kLeastPiece, all / parts_.stream.paths().up() + 1));
  CardPiece piece{.transfer = transfer,
                  .path = way.path,
                  .card = static_cast<uint8_t>(card),
                  .peer = way.peer,
                  .position = transfer->position,
                  .bytes = bytes,
                  .memory = from.memory.get(),
                  .key = to->key,
                  .offset = there - to->offset};
  transfer->position += bytes;
  ++transfer->pieces;
  ++underWay_;
  ++underWayOn_[way.path];
  return piece;
}

// Moves an open piece without our cards: as packets, or not at all if the peer has asked for it.
// The peer then asks once more, for packets.
void CardMover::fallBack(const std::shared_ptr<CardTransfer>& transfer, uint64_t position,
                         uint64_t bytes) {
  if (transfer->kind != CardTransfer::Kind::kServed)
    return moveByPackets(transfer, position, bytes);
  transfer->answer.miss({.position = position, .bytes = bytes});
  --transfer->open;
}

void CardMover::moveByPackets(const std::shared_ptr<CardTransfer>& transfer, uint64_t position,
                              uint64_t bytes) {
  const auto memory = transfer->memory.subspan(position, bytes);
  const PacketStream::Range there{transfer->key, transfer->offset + position};
  parts_.memories->retried.fetch_add(bytes, std::memory_order_relaxed);
  if (transfer->writes()) {
    parts_.stream.write(there, memory,
                        {.completion = transfer->completion, .whole = transfer->number});
  } else {
    parts_.stream.get(
        there, {.target = memory, .completion = transfer->completion, .whole = transfer->number});
  }
}

// Served bytes count at the end that has asked for them.
void CardMover::count(const CardTransfer& transfer, uint64_t bytes) {
  if (transfer.kind == CardTransfer::Kind::kServed) return;
  moved_.fetch_add(bytes, std::memory_order_relaxed);
  (transfer.writes() ? parts_.memories->written : parts_.memories->read)
      .fetch_add(bytes, std::memory_order_relaxed);
}

bool CardMover::onMoved(const CardPiece& piece, bool hasBegun, const NicCompletion& how,
                        Clock::time_point now) {
  CardTransfer& transfer = *piece.transfer;
  --underWay_;
  --underWayOn_[piece.path];
  if (!moving_.contains(transfer.number)) return false;
  const bool isMoved = how.error == NicError::kNone;
  if (isMoved && !transfer.error && transfer.isReadBack()) {
    readBacks_.add(piece);
  } else if (isMoved) {
    count(transfer, piece.bytes);
    --transfer.open;
  } else if (transfer.error) {
    --transfer.open;
  } else {
    onFailed(piece, hasBegun, how, now);
  }
  endIfOver(piece.transfer);
  return isMoved;
}

void CardMover::onFailed(const CardPiece& piece, bool hasBegun, const NicCompletion& how,
                         Clock::time_point now) {
  const CardTransfer& transfer = *piece.transfer;
  const bool isRefused = how.error == NicError::kRefused;
  if (hasBegun && !isRefused) {
    parts_.stream.leaveOut(piece.path, now,
                           how.error == NicError::kUnreachable
                               ? "the card could not reach the peer's"
                               : "the card does not work");
  } else if (hasBegun) {
    transfer.grant->voidKeysOf(piece.card);
    parts_.keys.forget(transfer.key);
  }
  // A refused write does not land, and a read that has ended brings no more bytes.
  if (!transfer.writes() || !hasBegun || isRefused)
    return fallBack(piece.transfer, piece.position, piece.bytes);
  fallBackLater(piece);
}

// Moves a piece of a write without our cards, once nothing of it can land late.
void CardMover::fallBackLater(const CardPiece& piece) {
  const CardTransfer& transfer = *piece.transfer;
  if (parts_.retirements.add({piece.transfer, piece.position, piece.bytes}, piece.card)) {
    transfer.grant->voidKeysOf(piece.card);
    parts_.keys.forget(transfer.key);
  }
}

void CardMover::onReadBack(size_t path, bool hasBegun, const NicCompletion& how,
                           Clock::time_point now) {
  const bool isSeen = how.error == NicError::kNone;
  bool isPathToBlame = !isSeen && hasBegun && how.error != NicError::kRefused;
  for (const CardPiece& piece : readBacks_.end(path)) {
    CardTransfer& transfer = *piece.transfer;
    if (!moving_.contains(transfer.number)) continue;
    if (isSeen) count(transfer, piece.bytes);
    if (isSeen || transfer.error) {
      --transfer.open;
    } else {
      if (std::exchange(isPathToBlame, false))
        parts_.stream.leaveOut(path, now, "the card could not read back what it had written");
      fallBackLater(piece);
    }
    endIfOver(piece.transfer);
  }
}

void CardMover::onRetired(uint64_t ticket) {
  for (const LatePiece& piece : parts_.retirements.onRetired(ticket)) {
    if (!piece.transfer->error) {
      fallBack(piece.transfer, piece.position, piece.bytes);
    } else {
      --piece.transfer->open;
    }
    endIfOver(piece.transfer);
  }
}

void CardMover::onPartEnded(uint64_t number, ErrorCode code) {
  const auto transfer = find(number);
  if (!transfer) return;
  --transfer->open;
  if (code != ErrorCode::kOk) giveUp(*transfer, code);
  endIfOver(transfer);
}

void CardMover::voidKeysOf(size_t card) {
  for (const auto& [number, transfer] : moving_) {
    if (transfer->grant) transfer->grant->voidKeysOf(card);
  }
}

// ---- ends

void CardMover::giveUp(CardTransfer& transfer, ErrorCode code) {
  if (!transfer.error) transfer.error = code;
  transfer.gate.shut();
}

void CardMover::endIfOver(const std::shared_ptr<CardTransfer>& transfer) {
  if (transfer->open > 0 || !transfer->hasAllBegun() || moving_.erase(transfer->number) == 0)
    return;
  transfer->local = {};
  if (transfer->kind == CardTransfer::Kind::kServed) {
    --serving_;
    return endServed(*transfer);
  }
  if (!transfer->error) parts_.stream.announce(transfer->announcement);
  transfer->completion->end(transfer->error.value_or(ErrorCode::kOk));
}

// The peer hears once of all fetches of one FETCH. If the connection has ended it hears nothing.
void CardMover::endServed(CardTransfer& transfer) {
  transfer.source = {};
  ServedFetches& served = *transfer.served;
  served.answer.ones.push_back(std::move(transfer.answer));
  if (--served.open == 0 && !transfer.error) tell_(served.answer.encode());
}

void CardMover::endAsked(const std::shared_ptr<CardTransfer>& transfer) {
  if (!std::exchange(transfer->awaitsPeer, false)) return;
  --transfer->open;
  endIfOver(transfer);
}

std::vector<std::shared_ptr<CardTransfer>> CardMover::giveUpAll(
    ErrorCode code, const std::vector<uint64_t>& lostParts) {
  for (const uint64_t number : lostParts) {
    if (const auto transfer = find(number)) --transfer->open;
  }
  for (const LatePiece& piece : parts_.retirements.takeAll()) --piece.transfer->open;
  for (const CardPiece& piece : readBacks_.takeReported()) --piece.transfer->open;
  parts_.keys.forgetAll();
  unmoved_.clear();
  std::vector<std::shared_ptr<CardTransfer>> asked;
  for (const auto& [number, transfer] : std::map(moving_)) {
    giveUp(*transfer, code);
    if (transfer->awaitsPeer) asked.push_back(transfer);
    endIfOver(transfer);
  }
  if (!asked.empty()) parts_.keys.forgetOffers();
  return asked;
}

CardMover::Taken CardMover::take(const Completion* completion) {
  Taken taken{.grace = Deadline::after(kGrace)};
  for (size_t i = 0; i < parts_.rails.count(); ++i)
    taken.generations.push_back(parts_.rails.generation(i));
  for (auto at = moving_.begin(); at != moving_.end();) {
    const auto transfer = at->second;
    if (completion && transfer->completion != completion) {
      ++at;
      continue;
    }
    giveUp(*transfer, ErrorCode::kAborted);
    if (transfer->kind == CardTransfer::Kind::kServed) --serving_;
    if (transfer->awaitsPeer) {
      parts_.keys.forgetOffers();
      taken.awaitPeer = true;
    }
    transfer->isTaken = true;
    taken.transfers.push_back(transfer);
    taken_.push_back(transfer);
    at = moving_.erase(at);
  }
  const auto isTaken = [](const auto& transfer) { return transfer->isTaken; };
  std::erase_if(unmoved_, isTaken);
  const auto isOfTaken = [&](const auto& piece) { return isTaken(piece.transfer); };
  parts_.retirements.dropPieces(isOfTaken);
  readBacks_.dropReported(isOfTaken);
  return taken;
}

void CardMover::release(const Taken& taken, const KeyHolder* holder) {
  if (taken.awaitPeer) parts_.memories->withdraw(holder);  // the peer's cards stop, as ours do
  uint64_t busy = 0;
  for (const auto& transfer : taken.transfers) {
    if (!transfer->gate.close(taken.grace)) busy |= transfer->rails.load(std::memory_order_relaxed);
  }
  if (busy == 0) return;
  std::vector<Rails::Retired> retire;
  for (size_t i = 0; i < parts_.rails.count(); ++i) {
    if ((busy >> i & 1) != 0) retire.push_back({i, taken.generations[i]});
  }
  parts_.rails.retireNow(retire);
  const auto closed = Deadline::after(kPatience);
  for (const auto& transfer : taken.transfers) {
    if (!transfer->gate.close(closed))
      log(LogLevel::kError, name_, "a card does not end operations that are under way");
  }
}

void CardMover::end(const Taken& taken, ErrorCode code) {
  for (const auto& transfer : taken.transfers) {
    transfer->isTaken = false;
    transfer->local = {};
    transfer->source = {};
    if (Completion* completion = std::exchange(transfer->completion, nullptr))
      completion->end(code);
  }
  std::erase_if(taken_, [](const auto& transfer) { return !transfer->isTaken; });
  ended_.notify_all();
}

void CardMover::awaitTaken(Mutex& mutex, const Completion* completion) {
  const auto isAwaited = [&](const auto& transfer) {
    return completion == nullptr || transfer->completion == completion;
  };
  const bool isOver = ended_.wait_until(mutex, Deadline::after(kMostRelease).when(),
                                        [&]() { return std::ranges::none_of(taken_, isAwaited); });
  if (isOver) return;
  log(LogLevel::kError, name_, "transfers are given up that a card may still carry out: ",
      "another thread has not ended them within ", kMostRelease.count(), " s");
  for (const auto& transfer : taken_) {
    if (!isAwaited(transfer)) continue;
    if (Completion* given = std::exchange(transfer->completion, nullptr))
      given->end(ErrorCode::kAborted);
  }
}

}  // namespace mooncake
