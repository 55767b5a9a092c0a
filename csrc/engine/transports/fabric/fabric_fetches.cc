#include "engine/stream/wire.h"
#include "engine/transports/fabric/fabric_channel.h"

// Gets that the owner's cards write: what whoever wants the bytes asks for, and what their owner
// does. What these cards cannot do is asked for again, as packets.
namespace mooncake {
namespace {

constexpr size_t kMostOffered = 65536;  // remembered

}  // namespace

// ---- whoever wants them

// A get into memory that lasts, where our cards do not read: the peer's write it here, under keys
// that it is told once. Whether they can is for the peer to know, which otherwise answers with
// packets.
bool FabricChannel::askForWrite(const GetRequest& request, control::Fetch& asked) {
  if (request.target.size() < options_.leastByCard || !memories_ || !theirs_ || lost_) return false;
  if (rails_->limits(0).closeEndsReads) return false;
  const auto landing = memories_->landing(request.target);
  if (!landing) return false;
  offer(landing->key);
  const auto transfer = std::make_shared<CardTransfer>();
  transfer->number = stream_.nextNumber();
  transfer->kind = CardTransfer::Kind::kAsked;
  transfer->key = request.region.key;
  transfer->offset = request.offset;
  transfer->memory = request.target;
  transfer->completion = request.completion;
  transfer->position = request.target.size();
  transfer->open = 1;
  transfer->awaitsPeer = true;
  moving_.emplace(transfer->number, transfer);
  asked.ones.push_back({.number = transfer->number,
                        .region = request.region.key,
                        .offset = request.offset,
                        .bytes = request.target.size(),
                        .target = landing->key,
                        .targetOffset = landing->offset});
  if (asked.ones.size() == control::kMostFetches) sendFetch(asked);
  return true;
}

void FabricChannel::sendFetch(control::Fetch& asked) {
  if (!asked.ones.empty()) tell(std::exchange(asked, {}).encode());
}

// The keys of a region of ours, ahead of what needs them.
void FabricChannel::offer(uint64_t key) {
  if (offered_.size() >= kMostOffered) offered_.clear();
  if (offered_.insert(key).second)
    tell(memories_->grant(key, shared_from_this(), /*isAsked=*/true).encode());
}

void FabricChannel::onFetched(const control::Fetched& fetched) {
  std::lock_guard lock(mutex_);
  perhapsBreak();  // the completion is lost, the data has come
  for (const auto& one : fetched.ones) {
    const auto found = moving_.find(one.number);
    if (found == moving_.end() || !found->second->awaitsPeer) continue;
    const auto transfer = found->second;
    const uint64_t all = transfer->memory.size();
    uint64_t missing = 0;
    for (const auto& [position, bytes] : one.missing) {
      if (transfer->end) break;
      if (bytes == 0 || position > all || bytes > all - position) {
        giveUp(*transfer, ErrorCode::kProtocol);
        break;
      }
      missing += bytes;
      ++transfer->open;
      moveByPackets(transfer, position, bytes);
    }
    if (!transfer->end) count(*transfer, all - std::min(all, missing));
    endAsked(transfer);
  }
  pump(Clock::now());
  activate();
}

// What the peer's cards were asked to write is there, or will not be.
void FabricChannel::endAsked(const std::shared_ptr<CardTransfer>& transfer) {
  if (!std::exchange(transfer->awaitsPeer, false)) return;
  --transfer->open;
  endIfOver(transfer);
}

// The peer's cards were asked to write the bytes, and cannot: they come as packets. Returns false if
// that was not asked for.
bool FabricChannel::awaitPackets(uint64_t number) {
  const auto asked = moving_.find(number);
  if (asked == moving_.end() || asked->second->end) return false;
  CardTransfer& transfer = *asked->second;
  if (!std::exchange(transfer.awaitsPeer, false)) return false;
  stream_.expectAnswer(
      number, {.target = transfer.memory, .completion = transfer.completion, .whole = number});
  return true;
}

// ---- their owner

// What the peer wants written into its memory, of ours. By packets where cards cannot: then also a
// refusal comes from where all of them come from.
void FabricChannel::onFetch(const control::Fetch& fetch) {
  std::lock_guard lock(mutex_);
  if (closed_ || fenced_ || lost_) return;
  const auto served = std::make_shared<ServedFetches>();
  for (const auto& one : fetch.ones) {
    if (serving_ >= wire::kMaxTransfers) {  // of some that it has given up: packets do it
      served->answer.ones.push_back(
          {.number = one.number, .missing = {{.position = 0, .bytes = one.bytes}}});
      continue;
    }
    if (serveByCards(one, fetch.ones.size() < stream_.paths().count(), served)) continue;
    stream_.answer(one.number, {one.region, one.offset}, one.bytes);
  }
  if (served->open == 0 && !served->answer.ones.empty()) tell(served->answer.encode());
  pump(Clock::now());
  activate();
}

bool FabricChannel::serveByCards(const control::Fetch::One& one, bool isOneOfFew,
                                 const std::shared_ptr<ServedFetches>& served) {
  if (!memories_ || !theirs_ || one.bytes == 0) return false;
  auto source = context_.regions.open(one.region, one.offset, one.bytes, kRemoteRead);
  if (!source) return false;
  const std::span memory(source.data(), one.bytes);
  auto local = memories_->find(memory);
  if (!local) return false;
  const auto grant = grantOf(one.target);
  if (!grant || (grant->rights & (kRemoteWrite | kLanding)) == 0 ||
      one.targetOffset > grant->bytes || one.bytes > grant->bytes - one.targetOffset)
    return false;
  const auto transfer = std::make_shared<CardTransfer>();
  transfer->number = stream_.nextNumber();
  transfer->kind = CardTransfer::Kind::kServed;
  transfer->key = one.target;
  transfer->offset = one.targetOffset;
  transfer->memory = memory;
  transfer->local = std::move(*local);
  transfer->grant = grant;
  transfer->isOneOfFew = isOneOfFew;
  transfer->turn = stream_.nextRail();
  transfer->served = served;
  transfer->source = std::move(source);
  transfer->told.number = one.number;
  ++served->open;
  ++serving_;
  moving_.emplace(transfer->number, transfer);
  unmoved_.push_back(transfer);
  return true;
}

// Whoever has asked is told when all is over that it has asked for at once; where the connection
// has ended nobody is.
void FabricChannel::endServed(CardTransfer& transfer) {
  transfer.source = {};
  --serving_;
  ServedFetches& served = *transfer.served;
  served.answer.ones.push_back(std::move(transfer.told));
  if (--served.open == 0 && !transfer.end) tell(served.answer.encode());
}

// Whether the peer has not said a word of something that holds memory here, for too long.
bool FabricChannel::isHeldUp(Clock::time_point now) {
  const bool waits = serving_ > 0 && (!retirements_.empty() || stream_.paths().up() == 0);
  const uint64_t oldest = retirements_.empty() ? 0 : retirements_.begin()->first;
  if (!waits || oldest != std::exchange(heldUpBy_, oldest)) heldUpSince_.reset();
  if (waits && !heldUpSince_) heldUpSince_ = now;
  return heldUpSince_ && now - *heldUpSince_ > options_.servedLimit;
}

}  // namespace mooncake
