#include "membership/topics.h"

#include <span>
#include <string_view>

#include "base/bytes.h"
#include "base/crypto.h"

namespace mooncake {

Result<std::pair<uint64_t, uint64_t>> topicsOf(const std::string& identity) {
  const auto crypto = Crypto::load();
  if (!crypto.ok()) return crypto.error();
  const Mac digest = (*crypto)->hmac(std::as_bytes(std::span(std::string_view("topics"))),
                                     std::as_bytes(std::span(identity)));
  ByteReader in(digest);
  const auto first = in.get<uint64_t>();
  return std::pair(first, in.get<uint64_t>());
}

}  // namespace mooncake
