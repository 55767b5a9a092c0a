#include "base/bytes.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace mooncake {

static_assert(std::endian::native == std::endian::little, "wire formats are written in host order");

void copyPastCache(std::byte* to, ByteView from) {
#ifdef __SSE2__
  constexpr size_t kLine = 64;
  const size_t untilLine = std::min(-reinterpret_cast<uintptr_t>(to) % kLine, from.size());
  if (untilLine > 0) std::memcpy(to, from.data(), untilLine);
  to += untilLine;
  from = from.subspan(untilLine);
  for (; from.size() >= kLine; to += kLine, from = from.subspan(kLine)) {
    const auto* source = reinterpret_cast<const __m128i*>(from.data());
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();  // streaming stores are not ordered: the copy must be visible before it is
                 // announced
#endif
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}

ByteWriter& ByteWriter::putBytes(ByteView bytes) {
  // No reader accepts a longer field, and a truncated length would corrupt the rest of the message.
  if (bytes.size() > std::numeric_limits<uint32_t>::max()) {
    throw std::length_error("ByteWriter::putBytes: more than 4 GiB");
  }
  put(static_cast<uint32_t>(bytes.size()));
  return putRaw(bytes);
}

ByteWriter& ByteWriter::putString(std::string_view text) {
  return putBytes(std::as_bytes(std::span(text)));
}

ByteWriter& ByteWriter::putRaw(ByteView bytes) {
  out_.insert(out_.end(), bytes.begin(), bytes.end());
  return *this;
}

ByteView ByteReader::getRaw(size_t length) {
  if (length > in_.size()) {
    fail();
    return {};
  }
  const ByteView raw = in_.first(length);
  in_ = in_.subspan(length);
  return raw;
}

ByteView ByteReader::getBytes(size_t maxLength) {
  const auto length = get<uint32_t>();
  if (length > maxLength) {
    fail();
    return {};
  }
  return getRaw(length);
}

std::string ByteReader::getString(size_t maxLength) {
  const ByteView raw = getBytes(maxLength);
  return {reinterpret_cast<const char*>(raw.data()), raw.size()};
}

Status ByteReader::finish(std::string_view what) const {
  if (failed_)
    return {ErrorCode::kProtocol, std::string(what) + ": cut short, or a field is out of bounds"};
  if (!in_.empty()) {
    return {ErrorCode::kProtocol,
            std::string(what) + ": " + std::to_string(in_.size()) + " bytes too many"};
  }
  return {};
}

}  // namespace mooncake
