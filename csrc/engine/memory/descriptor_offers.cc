#include "engine/memory/descriptor_offers.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <span>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <utility>
#include <vector>

#include "base/crypto.h"
#include "base/unix_socket.h"

namespace mooncake {
namespace {

constexpr size_t kSecret = 32;
constexpr size_t kRequest = kSecret + sizeof(uint64_t);
// How long no connection is accepted after descriptors ran out.
constexpr auto kPause = std::chrono::milliseconds(200);
// Longest wait for a place in the owner's queue of connections: the caller is the loop's thread.
constexpr auto kConnect = std::chrono::milliseconds(1);

ByteView secretOf(const std::string& handle) {
  return std::as_bytes(std::span(handle)).first(kSecret);
}

// One request under way. On the loop's thread only.
class Request : public std::enable_shared_from_this<Request> {
 public:
  Request(EventLoop& loop, std::function<void(Result<Fd>)> done)
      : loop_(loop), done_(std::move(done)) {}

  void start(const ExportedMemory& memory, Deadline deadline) {
    if (memory.handle.size() <= kSecret)
      return end(Error{ErrorCode::kProtocol, "the handle of offered memory is too short"});
    auto socket = connectAbstract(memory.handle.substr(kSecret), Deadline::after(kConnect));
    if (!socket.ok()) return end(socket.error());
    socket_ = std::move(*socket);
    ByteWriter request;
    const ByteView secret = secretOf(memory.handle);
    for (const std::byte one : secret) request.put(static_cast<uint8_t>(one));
    const Bytes bytes = request.put(memory.allocation).take();
    if (::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) !=
        ssize_t(bytes.size()))
      return end(systemError("send to a unix socket", errno));
    const Status added =
        loop_.add(socket_.get(), EPOLLIN, [self = shared_from_this()](uint32_t) { self->look(); });
    if (!added.ok()) return end(added.error());
    timer_ = loop_.runAt(deadline, [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self)
        self->end(Error{ErrorCode::kTimeout,
                        "the owner of the memory does not hand it over; is "
                        "its process stopped?"});
    });
  }

 private:
  void look() {
    Bytes answer;
    Fd descriptor;
    const auto got = receiveWithFd(socket_.get(), 1, answer, descriptor);
    if (!got.ok()) return end(got.error());
    if (*got == 0) return;
    if (!descriptor) return end(Error{ErrorCode::kProtocol, "the answer has no descriptor"});
    end(std::move(descriptor));
  }

  void end(Result<Fd> how) {
    if (!done_) return;
    if (timer_ != 0) {
      loop_.cancel(timer_);
      loop_.remove(socket_.get());
    }
    socket_.reset();
    std::exchange(done_, nullptr)(std::move(how));
  }

  EventLoop& loop_;
  std::function<void(Result<Fd>)> done_;
  Fd socket_;
  EventLoop::TimerId timer_ = 0;
};

}  // namespace

Result<std::unique_ptr<DescriptorOffers>> DescriptorOffers::start(EventLoop& loop) {
  std::unique_ptr<DescriptorOffers> offers(new DescriptorOffers(loop));
  const std::string name = "mooncake-memory-" + Crypto::randomHex(8);
  auto listener = listenAbstract(name);
  if (!listener.ok()) return listener.error();
  offers->listener_ = std::move(*listener);
  offers->handle_ = Crypto::randomHex(kSecret / 2) + name;
  MOONCAKE_TRY(loop.add(offers->listener_.get(), EPOLLIN,
                        [self = offers.get()](uint32_t) { self->onConnection(); }));
  return offers;
}

DescriptorOffers::~DescriptorOffers() {
  if (listener_) loop_.remove(listener_.get());
  for (const auto& [number, guest] : guests_) loop_.remove(guest.socket.get());
}

uint64_t DescriptorOffers::add(Fd descriptor) {
  Lock lock(mutex_);
  offers_.emplace(++lastOffer_, std::move(descriptor));
  return lastOffer_;
}

void DescriptorOffers::onConnection() {
  for (;;) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE) return pause();
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return;
    }
    if (guests_.size() == kMostGuests) drop(guests_.begin()->first);
    const uint64_t number = ++lastGuest_;
    const int descriptor = socket.get();
    guests_[number].socket = std::move(socket);
    if (!loop_.add(descriptor, EPOLLIN, [this, number](uint32_t) { onGuest(number); }).ok())
      guests_.erase(number);
  }
}

// Otherwise a waiting connection would keep the event loop busy.
void DescriptorOffers::pause() {
  (void)loop_.modify(listener_.get(), 0);
  loop_.runAt(Deadline::after(kPause), [this] { (void)loop_.modify(listener_.get(), EPOLLIN); });
}

void DescriptorOffers::onGuest(uint64_t number) {
  const auto guest = guests_.find(number);
  if (guest != guests_.end() && answer(guest->second)) drop(number);
}

// Returns true when the guest is to go.
bool DescriptorOffers::answer(Guest& guest) {
  Fd ignored;
  const auto got =
      receiveWithFd(guest.socket.get(), kRequest - guest.request.size(), guest.request, ignored);
  if (!got.ok()) return true;
  if (guest.request.size() < kRequest) return false;
  if (!Crypto::equal(ByteView(guest.request).first(kSecret), secretOf(handle_))) return true;
  ByteReader in(ByteView(guest.request).subspan(kSecret));
  Lock lock(mutex_);
  const auto offer = offers_.find(in.get<uint64_t>());
  if (offer == offers_.end()) return true;
  const std::byte one{1};
  (void)sendWithFd(guest.socket.get(), ByteView(&one, 1), offer->second.get());
  return true;
}

void DescriptorOffers::drop(uint64_t number) {
  const auto guest = guests_.find(number);
  loop_.remove(guest->second.socket.get());
  guests_.erase(guest);
}

void requestDescriptor(EventLoop& loop, const ExportedMemory& memory, Deadline deadline,
                       std::function<void(Result<Fd>)> done) {
  std::make_shared<Request>(loop, std::move(done))->start(memory, deadline);
}

}  // namespace mooncake
