#include "wires/local/arena_offer.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <utility>

#include "base/unix_socket.h"
#include "engine/contract/life_word.h"
#include "engine/memory/device_exports.h"
#include "engine/memory/region_table.h"

namespace mooncake {
namespace {

// Wire form, always 104 bytes, the descriptor on the first:
//   u32 mark  u32 version  u64 arena address  u64 arena bytes  u64 mirror's offset
//   u64 exports' offset, or 0  u64 life word's offset  u64 fence word's offset  u8 greeting[48]
// No room: no descriptor, and zeros after the version.
constexpr uint32_t kMark = 0x464f434d;  // "MCOF"
constexpr uint32_t kVersion = 8;
constexpr size_t kOfferBytes = 4 + 4 + 8 + 8 + 8 + 8 + 8 + 8 + sizeof(Greeting);

template <typename T>
bool liesIn(uint64_t arenaBytes, uint64_t offset) {
  return offset % alignof(T) == 0 && arenaBytes >= sizeof(T) && offset <= arenaBytes - sizeof(T);
}

// Waits on the loop for the offer or the deadline. Kept alive by the loop's handlers.
class PendingOffer : public std::enable_shared_from_this<PendingOffer> {
 public:
  PendingOffer(Fd socket, EventLoop& loop, OfferHandler done)
      : socket_(std::move(socket)), loop_(loop), done_(std::move(done)) {}

  Status start(Deadline deadline) {
    // In most cases it has arrived together with the end of the handshake.
    if (const auto whole = reader_.advance(socket_.get()); !whole.ok() || *whole) {
      done_(std::move(socket_), whole.ok() ? reader_.take() : Result<ArenaOffer>(whole.error()));
      return {};
    }
    const auto self = shared_from_this();
    timer_ = loop_.runAt(deadline, [self] { self->onDeadline(); });
    const Status added =
        loop_.add(socket_.get(), EPOLLIN, [self](uint32_t) { self->onReadable(); });
    if (!added.ok()) loop_.cancel(timer_);
    return added;
  }

  void fail(const Error& cause) { done_(std::move(socket_), cause); }

 private:
  void onReadable() {
    const auto whole = reader_.advance(socket_.get());
    if (whole.ok() && !*whole) return;
    finish(whole.ok() ? reader_.take() : Result<ArenaOffer>(whole.error()));
  }
  void onDeadline() {
    finish(Error{ErrorCode::kTimeout, "a peer connected but did not offer its arena in time"});
  }
  void finish(Result<ArenaOffer> offer) {
    // Removing the handlers may drop the last other references to this object.
    const auto self = shared_from_this();
    loop_.remove(socket_.get());
    loop_.cancel(timer_);
    done_(std::move(socket_), std::move(offer));
  }

  Fd socket_;
  EventLoop::TimerId timer_ = 0;
  EventLoop& loop_;
  OfferReader reader_;
  OfferHandler done_;
};

}  // namespace

Status sendOffer(int socket, const Arena& arena, const ArenaOffer& offer) {
  const Bytes message = ByteWriter()
                            .put(kMark)
                            .put(kVersion)
                            .put(static_cast<uint64_t>(reinterpret_cast<uintptr_t>(arena.base())))
                            .put(static_cast<uint64_t>(arena.capacity()))
                            .put(offer.mirror)
                            .put(offer.exports)
                            .put(offer.life)
                            .put(offer.fence)
                            .putRaw(offer.greeting)
                            .take();
  return sendWithFd(socket, message, arena.fd());
}

Status sendNoRoom(int socket) {
  Bytes message = ByteWriter().put(kMark).put(kVersion).take();
  message.resize(kOfferBytes);
  const ssize_t sent = ::send(socket, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent == static_cast<ssize_t>(message.size())) return {};
  return systemError("send of an offer", errno);
}

Result<bool> OfferReader::advance(int socket) {
  while (message_.size() < kOfferBytes) {
    const auto got = receiveWithFd(socket, kOfferBytes - message_.size(), message_, memfd_);
    if (!got.ok()) return got.error();
    if (*got == 0) return false;
  }
  return true;
}

Result<ArenaOffer> OfferReader::take() {
  ByteReader in(message_);
  const auto mark = in.get<uint32_t>();
  const auto version = in.get<uint32_t>();
  ArenaOffer offer;
  offer.address = in.get<uint64_t>();
  offer.bytes = in.get<uint64_t>();
  offer.mirror = in.get<uint64_t>();
  offer.exports = in.get<uint64_t>();
  offer.life = in.get<uint64_t>();
  offer.fence = in.get<uint64_t>();
  const auto greeting = in.getRaw(sizeof(Greeting));
  MOONCAKE_TRY(in.finish("arena offer"));
  std::copy(greeting.begin(), greeting.end(), offer.greeting.begin());
  offer.memfd = std::move(memfd_);
  if (mark == kMark && version == kVersion && !offer.memfd && offer.bytes == 0)
    return Error{ErrorCode::kUnsupported, "the peer has no room for another peer of its host"};
  if (mark != kMark || version != kVersion || !offer.memfd ||
      offer.address + offer.bytes < offer.address ||
      !liesIn<RegionMirror>(offer.bytes, offer.mirror) ||
      (offer.exports != 0 && !liesIn<DeviceExports>(offer.bytes, offer.exports)) ||
      !liesIn<LifeWord>(offer.bytes, offer.life) ||
      !liesIn<std::atomic<uint32_t>>(offer.bytes, offer.fence)) {
    return Error{ErrorCode::kProtocol,
                 "a peer's arena offer does not decode: do all ranks run the same version?"};
  }
  return offer;
}

void receiveOffer(Fd socket, EventLoop& loop, Deadline deadline, OfferHandler done) {
  const auto pending = std::make_shared<PendingOffer>(std::move(socket), loop, std::move(done));
  const Status started = pending->start(deadline);
  if (!started.ok()) pending->fail(started.error());
}

}  // namespace mooncake
