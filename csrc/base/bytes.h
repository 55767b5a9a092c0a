#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/result.h"

namespace mooncake {

using Bytes = std::vector<std::byte>;
using ByteView = std::span<const std::byte>;

// Copies a large block that is not read again soon. Bypasses the cache where the processor can, so
// that the cache keeps the data needed next. `to` must not overlap `from`.
void copyPastCache(std::byte* to, ByteView from);

// Writes little-endian integers and length-prefixed strings. All targets of this project are
// little-endian; bytes.cc refuses to compile elsewhere.
class ByteWriter {
 public:
  template <typename T>
  requires std::is_integral_v<T> ByteWriter& put(T value) {
    return putRaw(std::as_bytes(std::span(&value, 1)));
  }
  ByteWriter& putBytes(ByteView bytes);  // u32 length, then the bytes
  ByteWriter& putString(std::string_view text);
  ByteWriter& putRaw(ByteView bytes);  // without a length: fixed-size fields

  Bytes take() { return std::move(out_); }
  const Bytes& bytes() const { return out_; }

 private:
  Bytes out_;
};

// The one reader of every wire format. It never reads past the end and never allocates more than
// the input holds. It remembers the first failure, so a decoder reads all fields and checks once.
// After a failure nothing is left and every field reads as zero or empty.
class ByteReader {
 public:
  explicit ByteReader(ByteView in) : in_(in) {}

  template <typename T>
  requires std::is_integral_v<T> T get() {
    if constexpr (std::is_same_v<T, bool>) {
      const auto value = get<uint8_t>();  // a bool object that holds 2 would be undefined behaviour
      if (value > 1) fail();
      return value == 1;
    } else {
      T value{};
      if (const auto raw = getRaw(sizeof(T)); !raw.empty())
        std::memcpy(&value, raw.data(), sizeof(T));
      return value;
    }
  }
  ByteView getRaw(size_t length);       // empty view and failed() if fewer bytes are left
  ByteView getBytes(size_t maxLength);  // u32 length, then the bytes
  std::string getString(size_t maxLength);

  bool failed() const { return failed_; }
  size_t left() const { return in_.size(); }
  // ok if every field was there and no bytes are left over. `what` names the message in the error.
  Status finish(std::string_view what) const;

 private:
  void fail() {
    failed_ = true;
    in_ = {};
  }

  ByteView in_;
  bool failed_ = false;
};

}  // namespace mooncake
