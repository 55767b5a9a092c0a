#include "base/crypto.h"

#include <gtest/gtest.h>
#include <set>

namespace mooncake {
namespace {

Bytes repeat(unsigned value, size_t count) { return Bytes(count, std::byte(value)); }

Bytes text(std::string_view characters) {
  const auto bytes = std::as_bytes(std::span(characters));
  return {bytes.begin(), bytes.end()};
}

std::string hex(ByteView bytes) {
  std::string out;
  for (const std::byte byte : bytes) {
    out += "0123456789abcdef"[std::to_integer<int>(byte) >> 4];
    out += "0123456789abcdef"[std::to_integer<int>(byte) & 15];
  }
  return out;
}

std::shared_ptr<const Crypto> crypto() {
  auto loaded = Crypto::load();
  EXPECT_TRUE(loaded.ok()) << loaded.error().message;
  return *loaded;
}

TEST(Crypto, Rfc4231) {
  struct Vector {
    Bytes key, message;
    std::string mac;
  };
  Bytes counting;
  for (int i = 1; i <= 25; ++i) counting.push_back(std::byte(i));
  const std::vector<Vector> vectors = {
      {repeat(0x0b, 20), text("Hi There"),
       "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {text("Jefe"), text("what do ya want for nothing?"),
       "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {repeat(0xaa, 20), repeat(0xdd, 50),
       "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {counting, repeat(0xcd, 50),
       "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {repeat(0xaa, 131), text("Test Using Larger Than Block-Size Key - Hash Key First"),
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {repeat(0xaa, 131),
       text("This is a test using a larger than block-size key and a larger than block-size data. "
            "The key needs to "
            "be hashed before being used by the HMAC algorithm."),
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
  };
  const auto loaded = crypto();
  for (const auto& vector : vectors)
    EXPECT_EQ(hex(loaded->hmac(vector.key, vector.message)), vector.mac);
}

TEST(Crypto, AnEmptyKeyAndMessageAreFine) {
  EXPECT_EQ(hex(crypto()->hmac({}, {})),
            "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

TEST(Crypto, EqualLooksAtLengthAndEveryByte) {
  const Bytes a = repeat(7, 32);
  EXPECT_TRUE(Crypto::equal(a, a));
  EXPECT_TRUE(Crypto::equal({}, {}));
  EXPECT_FALSE(Crypto::equal(a, repeat(7, 31)));
  for (size_t i = 0; i < a.size(); ++i) {
    Bytes b = a;
    b[i] ^= std::byte(0x80);
    EXPECT_FALSE(Crypto::equal(a, b));
  }
}

TEST(Crypto, RandomIsNeverTheSame) {
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(seen.insert(hex(Crypto::randomNonce())).second);
    const std::string random = Crypto::randomHex(16);
    EXPECT_EQ(random.size(), 32u);
    EXPECT_EQ(random.find_first_not_of("0123456789abcdef"), std::string::npos);
    EXPECT_TRUE(seen.insert(random).second);
  }
}

}  // namespace
}  // namespace mooncake
