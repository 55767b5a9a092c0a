#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "base/bytes.h"
#include "base/wait.h"

// The frames of a stream connection, version 5. Every frame starts with 56 bytes, little-endian;
// fields that a kind does not use are zero, and a decoder refuses other values.
//
//    0      2         3      4        8         16    24       32       40              48
//   +------+---------+------+--------+---------+-----+--------+--------+---------------+-------+
//   | mark | version | kind | status | request | key | offset | length | signal offset | stamp |
//   | u16  | u8      | u8   | u32    | u64     | u64 | u64    | u64    | u64           | u64   |
//   +------+---------+------+--------+---------+-----+--------+--------+---------------+-------+
//
//   PUT      key, offset, length, signal offset, stamp; then `length` bytes for the region. The
//            signal's word is in the region with key `request` or, if that is 0, in the same one
//   GET      request, key, offset, length
//   PIECE    request, offset, length; then `length` bytes of the answer. `offset` counts from the
//            start of the get; pieces of one answer come in order
//   ANSWER   request, status: ends a get, a write or a pull. Ok only if all its bytes came before
//   WRITE    a piece of write `request`: key, offset and whole length (in `stamp`) of its range,
//            the piece's position in it (in `signal offset`) and length; then `length` bytes.
//            Pieces of one write come in order, without pieces of another write in between. After
//            the last piece the receiver sends the ANSWER. With status aborted and no bytes: the
//            write ends here
//   PULL     request, key, offset, length of a range that the receiver shall fill by itself from
//            memory of the sender: address (in `signal offset`) and key (in `stamp`)
//   MESSAGE  length; then `length` bytes for the user of the receiving engine
//   GOODBYE  no fields: the sender leaves in peace
//   BEAT     no fields: the sender lives
//   LANES    no fields: the sender wants more connections, which the receiver makes
//   RETIRE   no fields: the sender has nothing under way on this connection and begins nothing
//            more. It asks for the same: the receiver sends GOODBYE when its transfers have ended
//
// An answer is cut into pieces for two reasons. A put never waits behind more than one piece. And
// the status comes after the bytes: if memory is revoked half-way, the get ends with an error and
// not with wrong bytes.
namespace mooncake::wire {

inline constexpr uint16_t kMark = 0x4d4b;  // "KM" on the wire
inline constexpr uint8_t kVersion = 5;
inline constexpr size_t kHeaderBytes = 56;
inline constexpr uint64_t kMaxPutBytes = uint64_t(64) << 20;
inline constexpr uint64_t kMaxPieceBytes = uint64_t(256) << 10;
inline constexpr uint64_t kMaxMessageBytes = uint64_t(64) << 10;
// Most transfers that one side may have under way on one connection: gets, and as many writes.
inline constexpr uint64_t kMaxTransfers = 8192;

enum class Kind : uint8_t {
  kPut = 1,
  kGet,
  kPiece,
  kAnswer,
  kGoodbye,
  kMessage,
  kBeat,
  kLanes,
  kWrite,
  kPull,
  kRetire,
};
// kUnsupported: the receiver of a PULL cannot reach that memory; the bytes must be sent.
// kDeviceFailed: the device that owns the memory could not copy.
enum class AnswerStatus : uint32_t {
  kOk = 0,
  kRefused = 1,
  kAborted = 2,
  kUnsupported = 3,
  kDeviceFailed = 4,
};

struct Header {
  Kind kind = Kind::kGoodbye;
  AnswerStatus status = AnswerStatus::kOk;
  uint64_t request = 0;
  uint64_t key = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t signalOffset = 0;
  uint64_t stamp = 0;
};

inline AnswerStatus statusOf(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk:
      return AnswerStatus::kOk;
    case ErrorCode::kRefused:
      return AnswerStatus::kRefused;
    case ErrorCode::kUnsupported:
      return AnswerStatus::kUnsupported;
    default:
      return AnswerStatus::kAborted;
  }
}

using HeaderBytes = std::array<std::byte, kHeaderBytes>;

inline HeaderBytes encode(const Header& header) {
  HeaderBytes out;
  auto put = [&, at = size_t(0)](auto value) mutable {
    std::memcpy(out.data() + at, &value, sizeof(value));
    at += sizeof(value);
  };
  put(kMark), put(kVersion), put(static_cast<uint8_t>(header.kind)),
      put(static_cast<uint32_t>(header.status));
  put(header.request), put(header.key), put(header.offset), put(header.length);
  put(header.signalOffset), put(header.stamp);
  return out;
}

// Returns the key of the region that holds a put's word.
inline uint64_t signalKey(const Header& put) { return put.request != 0 ? put.request : put.key; }

// Returns whether `length` bytes follow the header.
inline bool hasPayload(Kind kind) {
  return kind == Kind::kPut || kind == Kind::kPiece || kind == Kind::kMessage ||
         kind == Kind::kWrite;
}

// Returns whether a signal's word is aligned and not inside the doorbell of a window part.
inline bool isSignalOffset(uint64_t offset) {
  return offset % 8 == 0 && offset >= sizeof(Doorbell);
}

// Returns whether the fields make sense for the kind. It does not check regions and rights;
// RegionTable does.
inline bool isWellFormed(const Header& h) {
  const bool noSignal = h.signalOffset == 0 && h.stamp == 0;
  const bool noStatus = h.status == AnswerStatus::kOk;
  switch (h.kind) {
    case Kind::kPut:
      return noStatus && h.length <= kMaxPutBytes && isSignalOffset(h.signalOffset);
    case Kind::kGet:
      return noStatus && noSignal;
    case Kind::kPiece:
      return noStatus && noSignal && h.key == 0 && h.length > 0 && h.length <= kMaxPieceBytes;
    case Kind::kAnswer:
      return noSignal && h.key == 0 && h.offset == 0 && h.length == 0 &&
             h.status <= AnswerStatus::kDeviceFailed;
    case Kind::kWrite: {
      const uint64_t position = h.signalOffset, whole = h.stamp;
      if (position > whole) return false;
      if (h.status == AnswerStatus::kAborted) return h.length == 0;
      return noStatus && h.length <= kMaxPieceBytes && h.length <= whole - position &&
             (h.length > 0 || whole == 0);
    }
    case Kind::kPull:
      return noStatus;
    case Kind::kMessage:
      return noStatus && noSignal && h.request == 0 && h.key == 0 && h.offset == 0 &&
             h.length > 0 && h.length <= kMaxMessageBytes;
    case Kind::kGoodbye:
    case Kind::kBeat:
    case Kind::kLanes:
    case Kind::kRetire:
      return noStatus && noSignal && h.request == 0 && h.key == 0 && h.offset == 0 && h.length == 0;
  }
  return false;
}

// kProtocol: encode() does not write such a header.
inline Result<Header> decode(ByteView bytes) {
  ByteReader in(bytes);
  const auto mark = in.get<uint16_t>();
  const auto version = in.get<uint8_t>();
  Header header;
  header.kind = static_cast<Kind>(in.get<uint8_t>());
  header.status = static_cast<AnswerStatus>(in.get<uint32_t>());
  header.request = in.get<uint64_t>();
  header.key = in.get<uint64_t>();
  header.offset = in.get<uint64_t>();
  header.length = in.get<uint64_t>();
  header.signalOffset = in.get<uint64_t>();
  header.stamp = in.get<uint64_t>();
  MOONCAKE_TRY(in.finish("frame"));
  if (mark != kMark || version != kVersion || !isWellFormed(header)) {
    return Error{ErrorCode::kProtocol, "a frame does not decode"};
  }
  return header;
}

}  // namespace mooncake::wire
