#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/bytes.h"
#include "engine/transfer.h"

namespace mooncake {

// What one card carries to another one: 104 bytes, little-endian, then the data. Fields that a kind
// does not use are zero, and a decoder refuses anything else.
//
//    0      2         3      4        8             16       24      32       40
//   +------+---------+------+--------+-------------+--------+-------+--------+-----+--
//   | mark | version | kind | status | incarnation | serial | acked | number | key | ..
//   | u16  | u8      | u8   | u32    | u64         | u64    | u64   | u64    | u64 |
//   +------+---------+------+--------+-------------+--------+-------+--------+-----+--
//        48       56       64         72              80      88           96
//       +--------+--------+----------+---------------+-------+------------+-------+
//    .. | offset | length | position | signal offset | stamp | signal key | after |  data
//       | u64    | u64    | u64      | u64           | u64   | u64        | u64   |
//       +--------+--------+----------+---------------+-------+------------+-------+
//
// `incarnation` names the receiver's end of a channel, as that had it told. `serial` numbers the
// packets of one direction of a channel from 1 on: each is dealt with once, however often, in
// whatever order and over whichever card it comes. Of the other direction, all below `acked` have
// come.
//
//   PUT      a piece of put `number`: its data belongs at `position` of the range (key, offset,
//            length). The word, in the region of the signal key or, where that is 0, in the
//            same one, is stamped when `length` bytes have come. Nothing of it lands before
//            put `after` has, if that is not 0
//   GET      number, key, offset, length
//   ANSWER   a piece of what get `number` asked for: position, length; or why there is none
//   WRITE    a piece of write `number`, as PUT, with no word. With status aborted: nothing comes
//            behind the first `position` bytes of it
//   WRITTEN  how write `number` has ended, when all of it has come
//   ACK      no serial. The data: serials beyond `acked` that have come, u64 each
//   PROBE    no serial. Asks for a PROBED with the same number over the same card
//   PROBED
struct Packet {
  enum class Kind : uint8_t { kPut = 1, kGet, kAnswer, kWrite, kWritten, kAck, kProbe, kProbed };
  enum class Status : uint32_t { kOk, kRefused, kAborted };
  static constexpr uint16_t kMark = 0x4d46;  // "FM" on the wire
  static constexpr uint8_t kVersion = 2;
  static constexpr size_t kBytes = 104;

  Kind kind = Kind::kAck;
  Status status = Status::kOk;
  uint64_t incarnation = 0;
  uint64_t serial = 0;
  uint64_t acked = 0;
  uint64_t number = 0;  // counted by who puts, gets or writes, and never used again
  uint64_t key = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t position = 0;
  Signal signal;
  uint64_t signalKey = 0;
  uint64_t after = 0;

  void encode(std::span<std::byte, kBytes> out) const;
  // And leaves `in` at the data. kProtocol for what encode() does not write; says nothing about
  // regions and rights.
  static Result<Packet> decode(ByteReader& in);
};

}  // namespace mooncake
