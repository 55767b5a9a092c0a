#pragma once

#include <cstdint>

#include "base/bytes.h"
#include "engine/transfer.h"

namespace mooncake {

// What a simulated wire carries: each packet is one message of the wire below. 64 bytes,
// little-endian, then the data.
//
//    0         1      2       3      4        8
//   +---------+------+-------+------+--------+--------+-----+--------+--------+----------+--
//   | version | kind | first | last | status | number | key | offset | length | position | ..
//   | u8      | u8   | u8    | u8   | u32    | u64    | u64 | u64    | u64    | u64      |
//   +---------+------+-------+------+--------+--------+-----+--------+--------+----------+--
//      .. signal offset u64, stamp u64
//
//   PUT      a piece of put `number`: its data belongs at `position` of the range (key, offset,
//            length). The word is stamped when `length` bytes have come
//   GET      number, key, offset, length
//   ANSWER   a piece of what get `number` asked for, as PUT; or why there is none
//   MESSAGE  a piece of a message: they come in order
//   WRITE    a piece of write `number`, as PUT, with no word
//   WRITTEN  how write `number` has ended, when all of it has come
struct SimPacket {
  enum class Kind : uint8_t { kPut = 1, kGet, kAnswer, kMessage, kWrite, kWritten };
  enum class Status : uint32_t { kOk, kRefused, kAborted };
  static constexpr uint8_t kVersion = 2;
  static constexpr size_t kBytes = 64;

  Kind kind = Kind::kMessage;
  bool first = false;
  bool last = false;
  Status status = Status::kOk;
  uint64_t number = 0;  // counted by who puts, gets or writes, and never used again
  uint64_t key = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t position = 0;
  Signal signal;

  Bytes encode(ByteView data) const;
  // And leaves `in` at the data. kProtocol for what encode() does not write; says nothing about
  // regions and rights.
  static Result<SimPacket> decode(ByteReader& in);
};

}  // namespace mooncake
