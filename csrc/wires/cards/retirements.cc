#include "wires/cards/retirements.h"

#include <algorithm>
#include <utility>

namespace mooncake {

bool Retirements::add(LatePiece piece, uint8_t card) {
  const auto& transfer = *piece.transfer;
  const auto isSame = [&](const auto& entry) {
    return entry.second.grant == transfer.grant && entry.second.card == card;
  };
  auto asked = std::find_if(late_.begin(), late_.end(), isSame);
  const bool isNew = asked == late_.end();
  if (isNew) {
    const uint64_t ticket = ++lastTicket_;
    asked = late_.emplace(ticket, Late{.grant = transfer.grant, .card = card, .pieces = {}}).first;
    tell_(control::Retire{.ticket = ticket, .region = transfer.key, .card = card}.encode());
  }
  asked->second.pieces.push_back(std::move(piece));
  return isNew;
}

std::vector<LatePiece> Retirements::takeAll() {
  std::vector<LatePiece> pieces;
  for (auto& [ticket, late] : std::exchange(late_, {}))
    std::ranges::move(late.pieces, std::back_inserter(pieces));
  return pieces;
}

uint64_t Retirements::begin(uint64_t region, size_t cards, uint64_t epoch, uint64_t lastSerial) {
  const uint64_t number = ++lastTicket_;
  Call& call = calls_[number];
  call.epoch = epoch;
  call.lastSerial = lastSerial;
  for (size_t card = 0; card < cards; ++card) call.tickets.insert(lastTicket_ + 1 + card);
  ask(region, cards);
  return number;
}

const Retirements::Call* Retirements::find(uint64_t number) const {
  const auto found = calls_.find(number);
  return found == calls_.end() ? nullptr : &found->second;
}

void Retirements::ask(uint64_t region, size_t cards) {
  for (size_t card = 0; card < cards; ++card)
    tell_(control::Retire{
        .ticket = ++lastTicket_, .region = region, .card = static_cast<uint8_t>(card)}
              .encode());
}

std::vector<LatePiece> Retirements::onRetired(uint64_t ticket) {
  for (auto& [number, call] : calls_) call.tickets.erase(ticket);
  auto found = late_.extract(ticket);
  return found ? std::move(found.mapped().pieces) : std::vector<LatePiece>();
}

}  // namespace mooncake
