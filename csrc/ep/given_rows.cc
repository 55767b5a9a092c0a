#include "ep/given_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ep/participants.h"
#include "ep/route_index.h"

namespace mooncake::ep {

GivenRows::GivenRows(const Memory& memory, const DispatchCall& call)
    : memory_(memory),
      call_(call),
      handle_(*call.handle),
      shape_(handle_.shape),
      experts_(*handle_.experts),
      rowBytes_(call.rowBytes()) {}

Status GivenRows::stage(Operation& op) {
  size_t offset = handle_.tokens * rowBytes_;  // behind the own and packed rows
  MOONCAKE_TRY(checkEnd(op, offset, memory_.layout.sendBytes()));
  std::byte* const staging = memory_.send(op.number());
  const CopyHint hint = stagingHint(op, handle_.tokens * rowBytes_);
  for (size_t t = 0; t < handle_.tokens; ++t) {
    if (isChosen(t)) writeRow(t, staging + t * rowBytes_, hint);
  }
  packed_.assign(size_t(op.size()), {});
  mostInTable_ = 0;
  shared_.reset();
  if (op.unmapped() == 0) return {};
  shared_.emplace(memory_.hosts, op.ranks(), shape_.maxTokens * rowBytes_,
                  mostInlineBytes(memory_.group) / rowBytes_);
  MOONCAKE_TRY(checkEnd(op, offset, shared_->ownEnd()));
  const HostTable& hosts = shared_->table();
  byHost_ = TokenLists(handle_.chosen, handle_.topk, hostsOfExperts(experts_, hosts), hosts.size());
  byRank_ = TokenLists(handle_.chosen, handle_.topk, experts_.owners(), size_t(op.size()));
  for (size_t h = 0; h < hosts.size(); ++h) {
    if (int(h) == hosts.indexOf(op.rank())) continue;
    const auto& host = hosts.hosts()[h];
    const auto tokens = byHost_.of(h);
    if (shared_->isShared(host, tokens.size())) {
      Packed packed{tokens, offset};
      MOONCAKE_TRY(pack(op, packed, offset));
      packed.pushedTo = placeFor(op, host, packed);
      for (const int r : host) packed_[size_t(r)] = packed;
      continue;
    }
    for (const int r : host) {
      Packed& packed = packed_[size_t(r)];
      packed = {byRank_.of(size_t(r)), offset};
      const size_t bytes = packed.tokens.size() * rowBytes_;
      if (bytes <= mostInlineBytes(memory_.group)) {
        mostInTable_ = std::max(mostInTable_, bytes);
      } else if (!op.group().window().peerPtr(r)) {
        MOONCAKE_TRY(pack(op, packed, offset));
        if (host.size() == 1) packed.pushedTo = placeFor(op, host, packed);
      }
    }
  }
  for (Packed& packed : packed_)
    packed.isWritten = packed.pushedTo && op.group().window().hasCards(packed.pushedTo->by);
  return {};
}

// The place to which the rows are pushed. None: the host fetches them.
std::optional<SharedRows::Place> GivenRows::placeFor(const Operation& op,
                                                     const std::vector<int>& host,
                                                     const Packed& packed) const {
  auto place = shared_->pushed(op.rank(), host);
  const size_t bytes = bytesOf(packed);
  const Window& window = op.group().window();
  const bool areWanted = std::ranges::any_of(host, [&](int r) { return call_.mask.contains(r); });
  const bool isGood = place && areWanted && bytes <= kMostPushedBytes &&
                      op.hadBegunLast(place->by) && !window.peerPtr(place->by);
  return isGood ? place : std::nullopt;
}

// Pushes one piece to each host in turn, so that all their links are busy.
Status GivenRows::push(Operation& op) {
  std::vector<const Packed*> pushed;
  for (const int r : op.others()) {
    const Packed& packed = packed_[size_t(r)];
    if (packed.pushedTo && packed.pushedTo->by == r) pushed.push_back(&packed);
  }
  const size_t words = op.group().layout().pushes(op.rank());
  for (size_t piece = 0, left = pushed.size(); left > 0; ++piece) {
    left = 0;
    MOONCAKE_TRY(op.goOn());
    for (const Packed* one : pushed) {
      const size_t bytes = bytesOf(*one);
      const size_t step = pushBytes(bytes, rowBytes_, one->isWritten), at = piece * step;
      if (at >= bytes) continue;
      const auto& [by, offset] = *one->pushedTo;
      const auto& there = memory_.hosts.memory(by);
      const std::span rows(memory_.send(op.number()) + one->offset + at,
                           std::min(step, bytes - at));
      const size_t to = (op.number() & 1) * there.sendBytes + offset + at;
      const size_t word = words + piece * sizeof(uint64_t);
      if (one->isWritten) {
        if (!writes_) writes_.emplace(op);
        MOONCAKE_TRY(writes_->start(by, there.region, to, rows, word));
      } else {
        MOONCAKE_TRY(op.put(by, there.region, to, rows, word));
      }
      left += at + step < bytes;
    }
  }
  return {};
}

// Own and packed rows must end where the rows of other ranks begin: see SharedRows.
Status GivenRows::checkEnd(const Operation& op, size_t end, size_t limit) const {
  if (end <= limit) return {};
  return {ErrorCode::kExhausted,
          op.group().nameRank(op.rank()) + ": dispatch: the rows that this rank gives need " +
              std::to_string(end) + " bytes of its send memory, there is room for " +
              std::to_string(limit) + ": make the buffer as large as the size hint says"};
}

// Packs the rows, unless nearly all are wanted: sending the few other rows, too, costs less than
// copying the wanted ones. All rows are sent also if there is no room for a copy.
Status GivenRows::pack(const Operation& op, Packed& packed, size_t& offset) const {
  const size_t end = offset + packed.tokens.size() * rowBytes_;
  const bool hasRoom = shared_->isPackingBounded() || end <= shared_->ownEnd();
  if (!hasRoom || 16 * packed.tokens.size() >= 15 * handle_.tokens) {
    packed.areAll = true;
    packed.offset = 0;
    return {};
  }
  MOONCAKE_TRY(checkEnd(op, end, shared_->ownEnd()));
  std::byte* const staging = memory_.send(op.number());
  for (const uint32_t t : packed.tokens) {
    std::memcpy(staging + offset, staging + t * rowBytes_, rowBytes_);
    offset += rowBytes_;
  }
  return {};
}

size_t GivenRows::write(const Operation& op, int to, ByteView table, std::byte* payload) const {
  const Packed& packed = packed_[size_t(to)];
  const size_t bytes = packed.tokens.size() * rowBytes_;
  const RowsAt rowsAt = bytes <= mostInlineBytes(memory_.group) ? RowsAt::kPayload
                        : packed.isWritten                      ? RowsAt::kWritten
                        : packed.pushedTo                       ? RowsAt::kPushed
                                                                : RowsAt::kStaging;
  std::byte* at = std::ranges::copy(table, payload).out;
  DispatchTable::setRows({payload, table.size()}, rowsAt, uint32_t(packed.rows(handle_.tokens)),
                         memory_.layout.send(op.number()) + packed.offset);
  if (rowsAt != RowsAt::kPayload) return table.size();
  for (const uint32_t t : packed.tokens) {
    std::memcpy(at, memory_.send(op.number()) + t * rowBytes_, rowBytes_);
    at += rowBytes_;
  }
  return table.size() + bytes;
}

bool GivenRows::isChosen(size_t token) const {
  const auto chosen = std::span(handle_.chosen).subspan(token * handle_.topk, handle_.topk);
  return std::ranges::any_of(chosen, [](int32_t expert) { return expert != kNoExpert; });
}

void GivenRows::writeRow(size_t token, std::byte* to, CopyHint hint) const {
  if (call_.format == RowFormat::kFields) {
    for (const Field& field : call_.fields) {
      const bool isLarge = field.bytes >= kLeastStreamedBytes;
      copyRow(to, field.from + token * field.bytes, field.bytes,
              isLarge ? hint : CopyHint::kCached);
      to += sentBytes(field);
    }
    return;
  }
  const uint16_t* row = call_.x + token * shape_.hidden;
  if (call_.format == RowFormat::kBf16) {
    copyRow(to, row, bf16Bytes(shape_.hidden), hint);
  } else {
    castRowToFp8(row, shape_.hidden, call_.format == RowFormat::kFp8Rounded,
                 reinterpret_cast<uint8_t*>(to + scaleBytes(shape_.hidden)),
                 reinterpret_cast<float*>(to));
  }
}

}  // namespace mooncake::ep
