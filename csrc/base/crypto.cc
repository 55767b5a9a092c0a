#include "base/crypto.h"

#include <cerrno>
#include <cstdlib>
#include <dlfcn.h>
#include <link.h>
#include <sys/random.h>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"

namespace mooncake {

// The part of OpenSSL's C interface that we use; the same in 1.1 and 3.
struct Crypto::Functions {
  const void* (*sha256)();
  unsigned char* (*hmac)(const void* hash, const void* key, int keyLength,
                         const unsigned char* message, size_t length, unsigned char* out,
                         unsigned int* outLength);
};

namespace {

constexpr std::array<const char*, 3> kSonames = {"libcrypto.so.3", "libcrypto.so.1.1",
                                                 "libcrypto.so"};

int collectLibcrypto(dl_phdr_info* info, size_t, void* found) {
  const std::string_view path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
  if (path.substr(path.rfind('/') + 1).starts_with("libcrypto")) {
    static_cast<std::vector<std::string>*>(found)->emplace_back(path);
  }
  return 0;
}

// Libraries already in the process come first: conda and wheels keep theirs where dlopen does not
// look, and one OpenSSL in a process is enough.
std::vector<std::string> candidates() {
  std::vector<std::string> paths;
  ::dl_iterate_phdr(collectLibcrypto, &paths);
  paths.insert(paths.end(), kSonames.begin(), kSonames.end());
  return paths;
}

void fillRandom(std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
    if (got > 0) {
      out = out.subspan(static_cast<size_t>(got));
    } else if (errno != EINTR) {
      // Every Linux since 3.17 has getrandom(). Without it, an attacker could guess nonces.
      logLine(LogLevel::kError, "crypto", systemError("getrandom", errno).message);
      std::abort();
    }
  }
}

// Never returns null: OpenSSL 3 takes a null key for a missing key, not for an empty one.
const unsigned char* raw(ByteView bytes) {
  static const unsigned char nothing = 0;
  return bytes.empty() ? &nothing : reinterpret_cast<const unsigned char*>(bytes.data());
}

}  // namespace

Result<std::shared_ptr<const Crypto>> Crypto::load() {
  static Mutex mutex;
  // Stays loaded until the process ends.
  static std::shared_ptr<const Crypto> loaded GUARDED_BY(mutex);
  Lock lock(mutex);
  if (loaded) return loaded;
  std::string tried;
  for (const std::string& path : candidates()) {
    // Never closed: OpenSSL registers exit handlers.
    void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      tried += "\n  " + std::string(::dlerror());
      continue;
    }
    auto functions = std::make_shared<Functions>();
    functions->sha256 =
        reinterpret_cast<decltype(functions->sha256)>(::dlsym(library, "EVP_sha256"));
    functions->hmac = reinterpret_cast<decltype(functions->hmac)>(::dlsym(library, "HMAC"));
    if (functions->sha256 == nullptr || functions->hmac == nullptr) {
      tried += "\n  " + path + ": has no HMAC or no EVP_sha256";
      continue;
    }
    std::shared_ptr<Crypto> crypto(new Crypto);
    crypto->functions_ = std::move(functions);
    loaded = std::move(crypto);
    return loaded;
  }
  return {ErrorCode::kUnsupported,
          "no usable libcrypto (install OpenSSL: package libssl3 on Debian and Ubuntu, "
          "openssl-libs on Red Hat). "
          "Tried:" +
              tried};
}

Mac Crypto::hmac(ByteView key, ByteView message) const {
  Mac mac;
  unsigned int length = mac.size();
  const auto* done =
      functions_->hmac(functions_->sha256(), raw(key), static_cast<int>(key.size()), raw(message),
                       message.size(), reinterpret_cast<unsigned char*>(mac.data()), &length);
  // OpenSSL is out of memory, or a FIPS provider finds the key too short. An unguessable code makes
  // the challenge fail, which is the safe way to fail.
  if (done == nullptr) return randomNonce();
  return mac;
}

bool Crypto::equal(ByteView a, ByteView b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char difference = 0;  // volatile: the compiler must not leave the loop early
  for (size_t i = 0; i < a.size(); ++i)
    difference = difference | std::to_integer<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

Nonce Crypto::randomNonce() {
  Nonce nonce;
  fillRandom(nonce);
  return nonce;
}

std::string Crypto::randomHex(size_t bytes) {
  Bytes random(bytes);
  fillRandom(random);
  std::string hex;
  hex.reserve(2 * bytes);
  for (const std::byte byte : random) {
    hex += "0123456789abcdef"[std::to_integer<int>(byte) >> 4];
    hex += "0123456789abcdef"[std::to_integer<int>(byte) & 15];
  }
  return hex;
}

}  // namespace mooncake
