#include "wires/cards/control.h"

#include <algorithm>

#include "wires/packets/packet.h"

namespace mooncake::control {
namespace {

constexpr size_t kMostName = 128;
constexpr size_t kMostAddress = 256;

ByteWriter begin(Kind kind) {
  ByteWriter out;
  out.put(static_cast<uint8_t>(kind));
  return out;
}

void putNumbers(ByteWriter& out, const std::vector<uint64_t>& numbers) {
  const size_t count = std::min(numbers.size(), kMostNumbers);
  out.put(static_cast<uint32_t>(count));
  for (size_t i = 0; i < count; ++i) out.put(numbers[i]);
}

std::vector<uint64_t> getNumbers(ByteReader& in) {
  std::vector<uint64_t> numbers;
  for (uint32_t left = in.get<uint32_t>(); left > 0 && !in.failed(); --left)
    numbers.push_back(in.get<uint64_t>());
  return numbers;
}

}  // namespace

Bytes Hello::encode() const {
  ByteWriter out = begin(Kind::kHello);
  out.put(kVersion).put(incarnation).put(isFenced).put(packetBytes);
  out.put(static_cast<uint8_t>(rails.size()));
  for (const Rail& rail : rails)
    out.putString(rail.name).putString(rail.provider).putBytes(rail.address);
  return out.take();
}

Result<Hello> Hello::decode(ByteView bytes) {
  ByteReader in(bytes);
  Hello hello;
  const auto version = in.get<uint8_t>();
  hello.incarnation = in.get<uint64_t>();
  hello.isFenced = in.get<bool>();
  hello.packetBytes = in.get<uint32_t>();
  for (size_t left = in.get<uint8_t>(); left > 0 && !in.failed(); --left) {
    Rail rail{.name = in.getString(kMostName), .provider = in.getString(kMostName), .address = {}};
    const ByteView address = in.getBytes(kMostAddress);
    rail.address.assign(address.begin(), address.end());
    hello.rails.push_back(std::move(rail));
  }
  MOONCAKE_TRY(in.finish("hello of a fabric channel"));
  if (version != kVersion || hello.packetBytes <= Packet::kBytes || hello.rails.empty() ||
      hello.rails.size() > kMostRails)
    return Error{ErrorCode::kProtocol, "a hello of a fabric channel does not decode"};
  return hello;
}

Bytes Fenced::encode() const {
  ByteWriter out = begin(Kind::kFenced);
  putNumbers(out, written);
  return out.take();
}

Result<Fenced> Fenced::decode(ByteView bytes) {
  ByteReader in(bytes);
  Fenced fenced{getNumbers(in)};
  MOONCAKE_TRY(in.finish("fence of a fabric channel"));
  return fenced;
}

Bytes State::encode() const {
  ByteWriter out = begin(Kind::kState);
  out.put(question).put(below);
  putNumbers(out, above);
  return out.take();
}

Result<State> State::decode(ByteView bytes) {
  ByteReader in(bytes);
  State state;
  state.question = in.get<uint64_t>();
  state.below = in.get<uint64_t>();
  state.above = getNumbers(in);
  MOONCAKE_TRY(in.finish("state of a fabric channel"));
  return state;
}

Bytes Grant::encode() const {
  ByteWriter out = begin(Kind::kGrant);
  out.put(region).put(rights).put(bytes).put(static_cast<uint8_t>(cards.size()));
  for (const auto& pieces : cards) {
    out.put(static_cast<uint16_t>(pieces.size()));
    for (const Piece& piece : pieces)
      out.put(piece.offset).put(piece.bytes).put(piece.key.key).put(piece.key.base);
  }
  return out.take();
}

Result<Grant> Grant::decode(ByteView view) {
  ByteReader in(view);
  Grant grant;
  grant.region = in.get<uint64_t>();
  grant.rights = in.get<uint32_t>();
  grant.bytes = in.get<uint64_t>();
  bool isWhole = true;
  size_t all = 0;
  for (size_t cards = in.get<uint8_t>(); cards > 0 && !in.failed(); --cards) {
    auto& pieces = grant.cards.emplace_back();
    uint64_t next = 0;
    for (size_t left = in.get<uint16_t>(); left > 0 && !in.failed(); --left) {
      Piece piece;
      piece.offset = in.get<uint64_t>();
      piece.bytes = in.get<uint64_t>();
      piece.key.key = in.get<uint64_t>();
      piece.key.base = in.get<uint64_t>();
      isWhole = isWhole && piece.offset == next && piece.bytes > 0 &&
                piece.bytes <= grant.bytes - piece.offset && ++all <= kMostPieces;
      next = piece.offset + piece.bytes;
      pieces.push_back(piece);
    }
    isWhole = isWhole && (pieces.empty() || next == grant.bytes);
  }
  MOONCAKE_TRY(in.finish("grant of a fabric channel"));
  if (!isWhole || grant.cards.size() > kMostRails)
    return Error{ErrorCode::kProtocol, "a grant of a fabric channel does not decode"};
  return grant;
}

Bytes Card::encode() const { return begin(Kind::kCard).put(index).putBytes(address).take(); }

Result<Card> Card::decode(ByteView bytes) {
  ByteReader in(bytes);
  Card card{.index = in.get<uint8_t>(), .address = {}};
  const ByteView address = in.getBytes(kMostAddress);
  card.address.assign(address.begin(), address.end());
  MOONCAKE_TRY(in.finish("card of a fabric channel"));
  return card;
}

Bytes Retire::encode() const {
  return begin(Kind::kRetire).put(ticket).put(region).put(card).take();
}

Result<Retire> Retire::decode(ByteView bytes) {
  ByteReader in(bytes);
  Retire retire;
  retire.ticket = in.get<uint64_t>();
  retire.region = in.get<uint64_t>();
  retire.card = in.get<uint8_t>();
  MOONCAKE_TRY(in.finish("retirement of a fabric channel"));
  return retire;
}

Bytes Fetch::encode() const {
  ByteWriter out = begin(Kind::kFetch);
  out.put(static_cast<uint16_t>(ones.size()));
  for (const One& one : ones)
    out.put(one.number)
        .put(one.region)
        .put(one.offset)
        .put(one.bytes)
        .put(one.target)
        .put(one.targetOffset);
  return out.take();
}

Result<Fetch> Fetch::decode(ByteView bytes) {
  ByteReader in(bytes);
  Fetch fetch;
  const size_t count = in.get<uint16_t>();
  for (size_t left = std::min(count, kMostFetches); left > 0 && !in.failed(); --left) {
    One& one = fetch.ones.emplace_back();
    one.number = in.get<uint64_t>();
    one.region = in.get<uint64_t>();
    one.offset = in.get<uint64_t>();
    one.bytes = in.get<uint64_t>();
    one.target = in.get<uint64_t>();
    one.targetOffset = in.get<uint64_t>();
  }
  MOONCAKE_TRY(in.finish("fetch of a fabric channel"));
  if (std::ranges::any_of(fetch.ones, [](const One& one) { return one.number == 0; }))
    return Error{ErrorCode::kProtocol, "a fetch of a fabric channel has no number"};
  return fetch;
}

void Fetched::One::miss(Part part) {
  if (missing.size() < kMostParts) return missing.push_back(part);
  uint64_t begin = part.position, end = part.position + part.bytes;
  for (const Part& other : missing) {
    begin = std::min(begin, other.position);
    end = std::max(end, other.position + other.bytes);
  }
  missing = {{.position = begin, .bytes = end - begin}};
}

Bytes Fetched::encode() const {
  ByteWriter out = begin(Kind::kFetched);
  out.put(static_cast<uint16_t>(ones.size()));
  for (const One& one : ones) {
    out.put(one.number).put(static_cast<uint8_t>(one.missing.size()));
    for (const Part& part : one.missing) out.put(part.position).put(part.bytes);
  }
  return out.take();
}

Result<Fetched> Fetched::decode(ByteView bytes) {
  ByteReader in(bytes);
  Fetched fetched;
  bool isWhole = true;
  const size_t count = in.get<uint16_t>();
  for (size_t left = std::min(count, kMostFetches); left > 0 && !in.failed(); --left) {
    One& one = fetched.ones.emplace_back();
    one.number = in.get<uint64_t>();
    const size_t parts = in.get<uint8_t>();
    isWhole = isWhole && parts <= kMostParts;
    for (size_t i = 0; i < std::min(parts, kMostParts) && !in.failed(); ++i) {
      const auto position = in.get<uint64_t>();
      one.missing.push_back({.position = position, .bytes = in.get<uint64_t>()});
    }
  }
  MOONCAKE_TRY(in.finish("end of a fetch of a fabric channel"));
  if (!isWhole)
    return Error{ErrorCode::kProtocol, "an end of a fetch of a fabric channel does not decode"};
  return fetched;
}

Bytes encodeNumber(Kind kind, uint64_t number) { return begin(kind).put(number).take(); }

Result<uint64_t> decodeNumber(ByteView bytes) {
  ByteReader in(bytes);
  const auto number = in.get<uint64_t>();
  MOONCAKE_TRY(in.finish("number of a fabric channel"));
  return number;
}

Bytes withKind(Kind kind, ByteView bytes) { return begin(kind).putRaw(bytes).take(); }

}  // namespace mooncake::control
