#include <arpa/inet.h>
#include <cstdlib>
#include <netinet/in.h>
#include <random>
#include <sys/socket.h>

#include "wire_end.h"
#include "wires/stream/wire.h"
#include "wires/tcp/tcp_transport.h"

// A live listener receives random frames; half of the peers hold the key. No byte outside of the
// writable memory changes, and an honest peer is not disturbed.
// MOONCAKE_FUZZ_FRAMES=1000000 is the long run.
namespace mooncake::testing {
namespace {

size_t framesToSend() {
  const char* asked = std::getenv("MOONCAKE_FUZZ_FRAMES");
  return asked ? std::strtoull(asked, nullptr, 10) : 20000;
}

// Most frames of one connection. About one frame in ten ends it, and later ones are not read.
constexpr size_t kMostFrames = 8;

class Fuzzer {
 public:
  Fuzzer(const WireEnd& target, std::vector<RemoteRegion> regions)
      : target_(target), regions_(std::move(regions)) {}

  // Sends frames until the connection is closed. Returns the number of frames that were sent.
  size_t attack(const TransportContext& context, bool holdsKey, size_t most) {
    Fd socket = connect();
    if (!socket) return 0;
    if (holdsKey) {
      TransportContext self(context);
      for (auto& byte : self.id) byte = std::byte(random_());
      auto shaken = handshakeNow(std::move(socket), self,
                                 {.peer = target_.id(),
                                  .lanes = 3,
                                  .deadline = Deadline::after(kPatience),
                                  .behindProof = {}});
      if (!shaken.ok()) return 0;
      socket = std::move(shaken->socket);
    }
    size_t sent = 0;
    while (sent < most && sendAll(socket.get(), holdsKey ? frame() : garbage())) ++sent;
    return sent;
  }

 private:
  Fd connect() {
    const Bytes endpoint = target_.transport->endpoint();
    ByteReader in(endpoint);
    (void)in.get<uint16_t>();
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(in.get<uint16_t>());
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const timeval limit{.tv_sec = 5, .tv_usec = 0};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0)
      return Fd();
    return socket;
  }

  // The test reads no answers, so the target's unsent answers must not hold it up.
  static bool sendAll(int socket, ByteView bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes = bytes.subspan(sent);
    }
    return true;
  }

  template <typename T>
  T oneOf(std::initializer_list<T> values) {
    return *(values.begin() + random_() % values.size());
  }
  uint64_t number(uint64_t size) {
    return oneOf<uint64_t>({0, 8, 64, random_() % size, size - 8, size, size + 1, ~uint64_t(0),
                            ~uint64_t(0) - 10, uint64_t(1) << 63, random_()});
  }

  Bytes frame() {
    const RemoteRegion& region = regions_[random_() % regions_.size()];
    wire::Header header;
    header.kind = static_cast<wire::Kind>(1 + random_() % 10);
    if (random_() % 3 == 0) header.kind = oneOf({wire::Kind::kPut, wire::Kind::kWrite});
    const uint64_t bytes = random_() % 3000;
    switch (header.kind) {
      case wire::Kind::kPut:
        header.request = oneOf<uint64_t>({0, 0, region.key, region.key + 1, random_()});
        header.key = region.key + (random_() % 4 == 0 ? random_() % 3 : 0);
        header.offset = number(region.bytes);
        header.length = bytes;
        header.signalOffset = 64 + 8 * (random_() % 600);
        header.stamp = random_();
        break;
      case wire::Kind::kWrite:
        header.request = random_();
        header.key = region.key + (random_() % 4 == 0 ? random_() % 3 : 0);
        header.offset = number(region.bytes);
        header.length = bytes;
        header.stamp = oneOf<uint64_t>({bytes, bytes, bytes, bytes + random_() % 100, random_()});
        break;
      case wire::Kind::kGet:
        header.request = random_();
        header.key = region.key;
        header.offset = number(region.bytes);
        header.length = bytes;
        break;
      case wire::Kind::kMessage:
        header.length = 1 + bytes;
        break;
      case wire::Kind::kBeat:
      case wire::Kind::kLanes:
      case wire::Kind::kRetire:
      case wire::Kind::kGoodbye:
        if (random_() % 20 != 0) header.kind = wire::Kind::kBeat;
        break;
      default:  // an answer to some request
        header.request = random_() % 20;
        header.length = random_() % 10 ? 0 : bytes;
        if (random_() % 10 != 0)
          header.kind = wire::Kind::kBeat, header.request = header.length = 0;
    }
    const wire::HeaderBytes head = wire::encode(header);
    Bytes out(head.begin(), head.end());
    if (wire::hasPayload(header.kind)) out.resize(out.size() + header.length, std::byte{0xaa});
    if (random_() % 50 == 0) out[random_() % wire::kHeaderBytes] = std::byte(random_());
    return out;
  }

  Bytes garbage() {
    if (random_() % 4 == 0) return bytesOf("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    if (random_() % 4 == 0) return bytesOf("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03");
    Bytes out(1 + random_() % 300);
    for (auto& byte : out) byte = std::byte(random_());
    if (random_() % 2) {  // nearly a HELLO
      const Bytes head =
          ByteWriter().put(uint32_t(0x4b4e4f4d)).put(uint16_t(1)).put(uint16_t(1)).take();
      std::copy_n(head.begin(), std::min(head.size(), out.size()), out.begin());
    }
    return out;
  }

  const WireEnd& target_;
  const std::vector<RemoteRegion> regions_;
  std::mt19937_64 random_{20261122};
};

TEST(StreamFuzz, NothingOutsideOfWhatWasGivenChanges) {
  const auto make = [](std::string_view key) {
    return std::make_unique<WireEnd>(onLoopback(), TcpTransport::create, key);
  };
  auto b = make("the job's key"), honest = make("the job's key"), attacker = make("the job's key");
  constexpr size_t kBytes = 8192;
  // Keys count up, so the keys that attackers guess are larger than those that they know.
  auto honestPart = b->part(kBytes), guardBelow = b->part(kBytes, kRemoteRead),
       given = b->part(kBytes), guardAbove = b->part(kBytes, kRemoteRead);
  const Bytes before = pattern(kBytes, 3);
  for (const Part* part : {&guardBelow, &guardAbove})
    std::copy(before.begin(), before.end(), part->bytes().begin());
  auto connected = connectNow(*honest, *b);
  ASSERT_TRUE(connected.ok());
  Fuzzer fuzzer(*b, {guardBelow.remote(), given.remote(), guardAbove.remote()});
  const size_t all = framesToSend();
  uint64_t number = 0;
  size_t withKey = 0, without = 0;
  for (size_t calls = 0; withKey + without < all; ++calls) {
    const bool holdsKey = withKey <= without;
    (holdsKey ? withKey : without) += fuzzer.attack(attacker->context(), holdsKey, kMostFrames) + 1;
    if (calls % 16 == 0) expectPutArrives(**connected, honestPart, ++number);
    if (::testing::Test::HasFailure()) break;
  }
  Doorbell bell;
  Completion completion(&bell);
  Bytes back(100);
  const Bytes data = pattern(100, 9);
  ASSERT_TRUE((*connected)->write({honestPart.remote(), 4000, data, &completion}).ok());
  EXPECT_EQ(endOf(completion), ErrorCode::kOk);
  ASSERT_TRUE((*connected)->get({honestPart.remote(), 4000, back, &completion}).ok());
  EXPECT_EQ(endOf(completion), ErrorCode::kOk);
  EXPECT_TRUE(back == data);
  EXPECT_TRUE(guardBelow.holds(0, before));
  EXPECT_TRUE(guardAbove.holds(0, before));
  EXPECT_EQ(honest->endedCount(), 0u);
  EXPECT_GT(b->regions().refusals(), 0u) << "much of it was refused";
  EXPECT_FALSE(given.isZero(0, kBytes)) << "and some of it was none of that";
  (*connected)->close();
}

}  // namespace
}  // namespace mooncake::testing
