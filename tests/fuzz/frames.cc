// One end of a TCP connection whose other end holds the key and sends anything: no byte outside of
// what was given for writing changes.
#include <algorithm>
#include <array>
#include <sys/socket.h>

#include "base/fd.h"
#include "fuzz.h"
#include "wires/stream/frame_receiver.h"

using mooncake::ByteView;
using mooncake::Fd;
using mooncake::FrameReceiver;

namespace {

constexpr size_t kMost = 32 << 10;  // a socket holds so much

// Lives as long as the process, so keys are the same in every run.
struct Memory {
  alignas(64) std::array<std::byte, 4096> below{}, given{}, above{};
  mooncake::RegionTable regions;
  mooncake::MemoryRegion readOnly, writable, behind;

  Memory() {
    readOnly = add(below, mooncake::kRemoteRead);
    writable = add(given, mooncake::kRemoteRead | mooncake::kRemoteWrite);
    behind = add(above, mooncake::kRemoteRead);
  }
  mooncake::MemoryRegion add(std::span<std::byte> bytes, uint32_t rights) {
    auto added = regions.add(bytes.data(), bytes.size(), rights);
    mooncake::fuzz::require(added.ok());
    return std::move(*added);
  }
  bool isUntouched() const {
    const auto isZero = [](std::byte byte) { return byte == std::byte{}; };
    return std::ranges::all_of(below, isZero) && std::ranges::all_of(above, isZero);
  }
};

Memory& memory() {
  static auto* const made = new Memory;
  return *made;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) return 0;
  Fd ours(ends[0]), theirs(ends[1]);
  const ssize_t sent = ::send(theirs.get(), data, std::min(size, kMost), MSG_NOSIGNAL);
  theirs.reset();
  if (sent < 0) return 0;

  mooncake::TransferTable transfers;
  FrameReceiver receiver(memory().regions, transfers,
                         {.onGet = [](const auto& get) { return get.length % 7 != 0; },
                          .onWritten = [](uint64_t, auto) {},
                          .onPull = [](const auto& pull) { return pull.length % 3 != 0; },
                          .onUnpullable = [](uint64_t) {},
                          .awaitSender = [] {}});
  for (bool isOver = false; !isOver;) {
    const auto stop = receiver.receive(ours.get(), 1 << 10);
    isOver = !stop.ok() || *stop != FrameReceiver::Stop::kBudget;
    for (const mooncake::Bytes& message : receiver.takeMessages())
      mooncake::fuzz::require(message.size() <= mooncake::wire::kMaxMessageBytes);
    if (size % 5 == 0) receiver.refuseWrites();
  }
  mooncake::fuzz::require(memory().isUntouched());
  return 0;
}

void mooncake::fuzz::writeSeeds(const Seeds& seed) {
  using mooncake::wire::Kind;
  const auto frame = [&](const char* name, mooncake::wire::Header header) {
    const auto head = mooncake::wire::encode(header);
    Bytes bytes(head.begin(), head.end());
    if (mooncake::wire::hasPayload(header.kind))
      bytes.resize(bytes.size() + header.length, std::byte{0xaa});
    seed(name, bytes);
  };
  const uint64_t key = memory().writable.remote().key;
  frame("put", {.kind = Kind::kPut,
                .key = key,
                .offset = 128,
                .length = 100,
                .signalOffset = 64,
                .stamp = 7});
  frame("get", {.kind = Kind::kGet, .request = 3, .key = key, .length = 64});
  frame("piece", {.kind = Kind::kPiece, .request = 1, .length = 10});
  frame("answer", {.kind = Kind::kAnswer, .request = 1});
  frame("goodbye", {.kind = Kind::kGoodbye});
  frame("message", {.kind = Kind::kMessage, .length = 20});
  frame("beat", {.kind = Kind::kBeat});
  frame("lanes", {.kind = Kind::kLanes});
  frame("write",
        {.kind = Kind::kWrite, .request = 9, .key = key, .offset = 8, .length = 50, .stamp = 50});
  frame("pull", {.kind = Kind::kPull, .request = 2, .key = key, .offset = 8, .length = 50});
  frame("retire", {.kind = Kind::kRetire});
}
