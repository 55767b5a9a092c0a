#pragma once

#include <array>
#include <memory>
#include <string>

#include "base/bytes.h"

namespace mooncake {

// HMAC-SHA256 and constant-time comparison from the system's OpenSSL. libcrypto is loaded at run
// time. Python's own ssl module needs the same library, so it is present wherever pip works. Random
// bytes come from getrandom(2).
using Mac = std::array<std::byte, 32>;
using Nonce = std::array<std::byte, 32>;

class Crypto {
 public:
  // kUnsupported names the libraries that were tried and the package to install.
  static Result<std::shared_ptr<const Crypto>> load();

  // If libcrypto refuses (FIPS, out of memory), returns an unguessable code, so that checks fail.
  Mac hmac(ByteView key, ByteView message) const;
  static bool equal(ByteView a, ByteView b);  // its time does not depend on where the two differ
  static Nonce randomNonce();
  static std::string randomHex(size_t bytes);

 private:
  struct Functions;
  Crypto() = default;
  std::shared_ptr<const Functions> functions_;
};

}  // namespace mooncake
