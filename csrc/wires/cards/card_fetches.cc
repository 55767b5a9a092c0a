#include "wires/cards/card_fetches.h"

#include <utility>

#include "wires/stream/wire.h"

namespace mooncake {

// ---- the asking end

bool CardFetches::ask(const GetRequest& request) {
  if (request.target.size() < leastByCard_ || !parts_.memories || !parts_.stream.isOpen())
    return false;
  if (parts_.rails.limits(0).closeEndsReads) return false;
  const auto landing = parts_.memories->landing(request.target);
  if (!landing) return false;
  parts_.keys.offer(landing->key);
  const auto transfer = std::make_shared<CardTransfer>();
  transfer->number = parts_.stream.nextNumber();
  transfer->kind = CardTransfer::Kind::kAsked;
  transfer->key = request.region.key;
  transfer->offset = request.offset;
  transfer->memory = request.target;
  transfer->completion = request.completion;
  transfer->position = request.target.size();
  transfer->open = 1;
  transfer->awaitsPeer = true;
  mover_.add(transfer);
  next_.ones.push_back({.number = transfer->number,
                        .region = request.region.key,
                        .offset = request.offset,
                        .bytes = request.target.size(),
                        .target = landing->key,
                        .targetOffset = landing->offset});
  if (next_.ones.size() == control::kMostFetches) send();
  return true;
}

void CardFetches::send() {
  if (!next_.ones.empty()) tell_(std::exchange(next_, {}).encode());
}

void CardFetches::onFetched(const control::Fetched& fetched) {
  for (const auto& one : fetched.ones) {
    const auto transfer = mover_.find(one.number);
    if (!transfer || !transfer->awaitsPeer) continue;
    const uint64_t all = transfer->memory.size();
    uint64_t missing = 0;
    for (const auto& [position, bytes] : one.missing) {
      if (transfer->error) break;
      if (bytes == 0 || position > all || bytes > all - position) {
        mover_.giveUp(*transfer, ErrorCode::kProtocol);
        break;
      }
      missing += bytes;
      ++transfer->open;
      mover_.moveByPackets(transfer, position, bytes);
    }
    if (!transfer->error) mover_.count(*transfer, all - std::min(all, missing));
    mover_.endAsked(transfer);
  }
}

bool CardFetches::awaitPackets(uint64_t number) {
  const auto transfer = mover_.find(number);
  if (!transfer || transfer->error || !std::exchange(transfer->awaitsPeer, false)) return false;
  parts_.stream.expectAnswer(
      number, {.target = transfer->memory, .completion = transfer->completion, .whole = number});
  return true;
}

// ---- the owner

// A fetch that our cards cannot serve is answered with packets. So is one that is refused: then
// every refusal comes the same way.
void CardFetches::onFetch(const control::Fetch& fetch) {
  const auto served = std::make_shared<ServedFetches>();
  for (const auto& one : fetch.ones) {
    if (mover_.serving() >= wire::kMaxTransfers) {
      // The peer has given up some of them. It asks for this one once more, as packets.
      served->answer.ones.push_back(
          {.number = one.number, .missing = {{.position = 0, .bytes = one.bytes}}});
      continue;
    }
    if (serve(one, fetch.ones.size() < parts_.stream.paths().count(), served)) continue;
    parts_.stream.answer(one.number, {one.region, one.offset}, one.bytes);
  }
  if (served->open == 0 && !served->answer.ones.empty()) tell_(served->answer.encode());
}

bool CardFetches::serve(const control::Fetch::One& one, bool isOneOfFew,
                        const std::shared_ptr<ServedFetches>& served) {
  if (!parts_.memories || !parts_.stream.isOpen() || one.bytes == 0) return false;
  auto source = regions_.open(one.region, one.offset, one.bytes, kRemoteRead);
  if (!source) return false;
  const std::span memory(source.data(), one.bytes);
  auto local = parts_.memories->find(memory);
  if (!local) return false;
  const auto grant = parts_.keys.find(one.target);
  if (!grant || (grant->rights & (kRemoteWrite | kLanding)) == 0 ||
      one.targetOffset > grant->bytes || one.bytes > grant->bytes - one.targetOffset ||
      !mover_.canWrite(*grant))
    return false;
  const auto transfer = std::make_shared<CardTransfer>();
  transfer->number = parts_.stream.nextNumber();
  transfer->kind = CardTransfer::Kind::kServed;
  transfer->key = one.target;
  transfer->offset = one.targetOffset;
  transfer->memory = memory;
  transfer->local = std::move(*local);
  transfer->grant = grant;
  transfer->isOneOfFew = isOneOfFew;
  transfer->firstRail = parts_.stream.nextRail();
  transfer->served = served;
  transfer->source = std::move(source);
  transfer->answer.number = one.number;
  ++served->open;
  mover_.add(transfer);
  return true;
}

bool CardFetches::isHeldUp(Clock::time_point now) {
  const uint64_t oldest = parts_.retirements.oldest();
  const bool waits = mover_.serving() > 0 && (oldest != 0 || parts_.stream.paths().up() == 0);
  if (!waits || oldest != std::exchange(heldUpBy_, oldest)) heldUpSince_.reset();
  if (waits && !heldUpSince_) heldUpSince_ = now;
  return heldUpSince_ && now - *heldUpSince_ > servedLimit_;
}

}  // namespace mooncake
