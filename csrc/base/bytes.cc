#include "base/bytes.h"

#include <bit>
#include <limits>
#include <stdexcept>

namespace mooncake {

static_assert(std::endian::native == std::endian::little, "wire formats are written in host order");

ByteWriter& ByteWriter::putBytes(ByteView bytes) {
  // No reader would accept it, and a cut length would make the rest of the message lie.
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
