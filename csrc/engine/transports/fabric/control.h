#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"

// What the two ends of a fabric channel tell each other over the TCP channel beneath: one byte that
// says what it is, then the fields. Version 1, in HELLO.
//
//   MESSAGE   a whole message for whoever runs the engine over there
//   BEGIN     the first part of one that does not fit beside the byte; END is behind it
//   END
//   HELLO     u8 version  u64 incarnation  bool fenced  u32 most bytes of a packet  u8 rails  rails
//   x { string name, string
//             provider, bytes address }: the first that is told over a connection
//   FENCED    u32 count  count x u64: you are out; of what you have written, these have landed
//   PACKET    a packet that did not leave before the end
//   ASK       u64 question: which of my packets have come?
//   STATE     u64 question  u64 below  u32 count  count x u64: these, and all below
//   CARRIED   of cards that are simulated: what one of them would have sent by itself
namespace mooncake::control {

enum class Kind : uint8_t {
  kMessage = 1,
  kBegin,
  kEnd,
  kHello,
  kFenced,
  kPacket,
  kAsk,
  kState,
  kCarried,
};

inline constexpr uint8_t kVersion = 1;
inline constexpr size_t kMostRails = 64;
inline constexpr size_t kMostNumbers = 4096;  // in one list

struct Hello {
  struct Rail {
    std::string name;
    std::string provider;
    Bytes address;
  };
  uint64_t incarnation = 0;
  bool isFenced = false;     // you are out
  uint32_t packetBytes = 0;  // that our buffers hold
  std::vector<Rail> rails;

  Bytes encode() const;
  static Result<Hello> decode(ByteView bytes);
};

struct Fenced {
  std::vector<uint64_t> written;

  Bytes encode() const;
  static Result<Fenced> decode(ByteView bytes);
};

struct State {
  uint64_t question = 0;
  uint64_t below = 0;
  std::vector<uint64_t> above;

  Bytes encode() const;
  static Result<State> decode(ByteView bytes);
};

Bytes encodeAsk(uint64_t question);
Result<uint64_t> decodeAsk(ByteView bytes);

// Of those without fields of their own.
Bytes withKind(Kind kind, ByteView bytes);

}  // namespace mooncake::control
