#include "engine/transports/fabric/control.h"

#include <algorithm>

#include "engine/packets/packet.h"

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

Bytes encodeAsk(uint64_t question) { return begin(Kind::kAsk).put(question).take(); }

Result<uint64_t> decodeAsk(ByteView bytes) {
  ByteReader in(bytes);
  const auto question = in.get<uint64_t>();
  MOONCAKE_TRY(in.finish("question of a fabric channel"));
  return question;
}

Bytes withKind(Kind kind, ByteView bytes) { return begin(kind).putRaw(bytes).take(); }

}  // namespace mooncake::control
