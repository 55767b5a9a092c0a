#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "wires/nic/nic.h"

// The messages that the two ends of a fabric channel send each other over the TCP channel below:
// one byte for the kind, then the fields. Version 4, in HELLO. Region keys are the keys of
// the RegionTable.
//
//   MESSAGE   a whole message for the user of the peer's engine
//   BEGIN     the first part of a message that does not fit beside the kind
//   END       the second part of it
//   HELLO     u8 version  u64 incarnation  bool fenced  u32 bytes of a packet buffer  u8 rails
//             rails x { string name  string provider  bytes address }: the first message of a
//             connection
//   FENCED    u32 count  count x u64: you are out. These writes of yours have landed
//   PACKET    a packet of a put that did not leave before the sender's end
//   ASK       u64 question: which of my packets have come?
//   STATE     u64 question  u64 below  u32 count  count x u64: these serials, and all below
//   RESOLVE   u64 region key: which keys may my cards use for this region?
//   GRANT     u64 region key  u32 rights, also kReadBack  u64 bytes  u8 cards
//             cards x { u16 pieces  pieces x { u64 offset  u64 bytes  u64 key  u64 base } }: these.
//             A card without pieces does not reach the region. Also sent without a RESOLVE
//   CHANGED   u64 region key: my GRANT for it is void, or there are more keys. Ask again
//   CARD      u8 card  bytes address: this card was opened anew, and its keys are void
//   RETIRE    u64 ticket  u64 region key  u8 card: my writes there must not land any more
//   RETIRED   u64 ticket: they do not
//   FETCH     u16 count  count x { u64 number  u64 region key  u64 offset  u64 bytes
//             u64 key of my region  u64 offset in it }: let your cards write these bytes there
//   FETCHED   u16 count  count x { u64 number  u8 parts  parts x { u64 position  u64 bytes } }: the
//             bytes are there, except for these parts. A fetch that cards cannot serve at all is
//             answered with packets, as a get
//   CARRIED   bytes that a simulated card sends by itself
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
  kResolve,
  kGrant,
  kChanged,
  kCard,
  kRetire,
  kRetired,
  kFetch,
  kFetched,
};

// Sends an encoded message to the peer's end.
using Tell = std::function<void(const Bytes& message)>;

inline constexpr uint8_t kVersion = 4;
inline constexpr size_t kMostRails = 64;
inline constexpr size_t kMostNumbers = 4096;  // in one list
inline constexpr size_t kMostPieces = 1900;   // in one grant: a message has 64 KiB
inline constexpr size_t kMostOffers = 1024;   // grants that are kept without a RESOLVE
inline constexpr size_t kMostFetches = 512;   // in one message
inline constexpr size_t kMostParts = 4;       // missing ones of one fetch

struct Hello {
  struct Rail {
    std::string name;
    std::string provider;
    Bytes address;
  };
  uint64_t incarnation = 0;
  bool isFenced = false;     // the receiver is out
  uint32_t packetBytes = 0;  // length of the sender's buffers
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

struct Grant {
  struct Piece {
    uint64_t offset = 0;  // into the region
    uint64_t bytes = 0;
    NicKey key;
  };
  uint64_t region = 0;
  uint32_t rights = 0;
  uint64_t bytes = 0;                     // of the region
  std::vector<std::vector<Piece>> cards;  // in order, without gaps, all of the region; or none

  // Makes the keys of one card unusable.
  void voidKeysOf(size_t card) {
    if (card < cards.size()) cards[card].clear();
  }
  Bytes encode() const;
  static Result<Grant> decode(ByteView bytes);
};

struct Card {
  uint8_t index = 0;
  Bytes address;

  Bytes encode() const;
  static Result<Card> decode(ByteView bytes);
};

struct Retire {
  uint64_t ticket = 0;
  uint64_t region = 0;
  uint8_t card = 0;

  Bytes encode() const;
  static Result<Retire> decode(ByteView bytes);
};

struct Fetch {
  struct One {
    uint64_t number = 0;
    uint64_t region = 0, offset = 0, bytes = 0;
    uint64_t target = 0, targetOffset = 0;
  };
  std::vector<One> ones;

  Bytes encode() const;
  static Result<Fetch> decode(ByteView bytes);
};

struct Fetched {
  struct Part {
    uint64_t position = 0, bytes = 0;
  };
  struct One {
    uint64_t number = 0;
    std::vector<Part> missing;
    // Adds a missing part. If there are too many, one part around all of them takes their place.
    void miss(Part part);
  };
  std::vector<One> ones;

  Bytes encode() const;
  static Result<Fetched> decode(ByteView bytes);
};

// Messages of one number: a question, the key of a region, a ticket.
Bytes encodeNumber(Kind kind, uint64_t number);
Result<uint64_t> decodeNumber(ByteView bytes);

// Puts the kind before bytes that are a message without fields.
Bytes withKind(Kind kind, ByteView bytes);

}  // namespace mooncake::control
