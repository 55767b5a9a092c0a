#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/bytes.h"
#include "engine/contract/transfer.h"

namespace mooncake {

// One packet from card to card: 104 bytes, little-endian, then the data. Fields that a kind does
// not use are zero; a decoder refuses other values.
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
// `incarnation` names the receiver's end of a channel, as the receiver had announced it. `serial`
// numbers the packets of one direction of a channel from 1 on. A packet may come several times, in
// any order and over any card, and is handled once. In the other direction, all packets below
// `acked` have come.
//
//   PUT      a piece of put `number`: its data belongs at `position` of the range (key, offset,
//            length). When `length` bytes have come, the word is stamped. It is in the region of
//            the signal key or, if that is 0, of `key`. If `after` is not 0, no byte of the put
//            lands before put `after` has landed
//   GET      number, key, offset, length
//   ANSWER   a piece of the data of get `number`: position, length; or why there is none
//   WRITE    a piece of write `number`, as PUT, with no word. With status aborted: only the
//            first `position` bytes of the write come
//   WRITTEN  how write `number` has ended, after all of it has come
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
  uint64_t number = 0;  // assigned by the requester, never used again
  uint64_t key = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t position = 0;
  Signal signal;
  uint64_t signalKey = 0;
  uint64_t after = 0;

  void encode(std::span<std::byte, kBytes> out) const;
  // Leaves `in` at the data. kProtocol: encode() does not write such a packet. It does not check
  // regions and rights.
  static Result<Packet> decode(ByteReader& in);
};

}  // namespace mooncake
