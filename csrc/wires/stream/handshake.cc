#include "wires/stream/handshake.h"

#include <cerrno>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

// Wire form, version 1. Every message: magic u32, version u16, kind u16, then its body:
//   HELLO 1      lane u16, lanes u16, attempt u64, connector id [16], acceptor id [16], nonce [32]
//   CHALLENGE 2  nonce [32], HMAC [32]
//   PROOF 3      HMAC [32]
//   WELCOME 4    nothing
//   REFUSED 5    reason u16
// The two HMACs differ in their first word, so neither can be answered with the other; both cover
// HELLO, so neither lane nor engine can be swapped on the way.
namespace mooncake {
namespace {

constexpr uint32_t kMagic = 0x4b4e4f4d;  // "MONK"
constexpr uint16_t kVersion = 1;
constexpr size_t kHeadBytes = 8;

enum class Kind : uint16_t { kHello = 1, kChallenge, kProof, kWelcome, kRefused };
enum class Reason : uint16_t { kVersion = 1, kEngine, kKey, kCrossed };

struct Hello {
  uint16_t lane;
  uint16_t lanes;
  uint64_t attempt;
  EngineId connector;
  EngineId acceptor;
};

size_t bodyBytes(Kind kind) {
  switch (kind) {
    case Kind::kHello:
      return 2 + 2 + 8 + sizeof(EngineId) * 2 + sizeof(Nonce);
    case Kind::kChallenge:
      return sizeof(Nonce) + sizeof(Mac);
    case Kind::kProof:
      return sizeof(Mac);
    case Kind::kWelcome:
      return 0;
    case Kind::kRefused:
      return 2;
  }
  return 0;
}

ByteWriter begin(Kind kind) {
  ByteWriter out;
  out.put(kMagic).put(kVersion).put(static_cast<uint16_t>(kind));
  return out;
}

Bytes encodeHello(const Hello& hello) {
  ByteWriter out = begin(Kind::kHello);
  out.put(hello.lane)
      .put(hello.lanes)
      .put(hello.attempt)
      .putRaw(hello.connector)
      .putRaw(hello.acceptor);
  out.putRaw(Crypto::randomNonce());
  return out.take();
}

template <size_t N>
std::array<std::byte, N> getArray(ByteReader& in) {
  std::array<std::byte, N> out{};
  const ByteView raw = in.getRaw(N);
  std::copy(raw.begin(), raw.end(), out.begin());
  return out;
}

Result<Hello> decodeHello(ByteView message) {
  ByteReader in(message);
  in.getRaw(kHeadBytes);
  Hello hello;
  hello.lane = in.get<uint16_t>();
  hello.lanes = in.get<uint16_t>();
  hello.attempt = in.get<uint64_t>();
  hello.connector = getArray<sizeof(EngineId)>(in);
  hello.acceptor = getArray<sizeof(EngineId)>(in);
  in.getRaw(sizeof(Nonce));
  MOONCAKE_TRY(in.finish("HELLO"));
  if (hello.lanes == 0 || hello.lanes > kMaxLanes || hello.lane >= hello.lanes) {
    return Error{ErrorCode::kProtocol, "HELLO: no such lane"};
  }
  return hello;
}

// Describes the first eight bytes of a foreign client, for the log of a call to the wrong port.
const char* whoseBytes(ByteView head) {
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  for (const char* verb : {"GET ", "HEAD ", "POST ", "PUT ", "DELETE ", "OPTIONS ", "CONNECT "}) {
    if (text.starts_with(std::string_view(verb).substr(0, text.size())))
      return "an HTTP request is no handshake";
  }
  if (text.starts_with("PRI * HT")) return "an HTTP/2 request is no handshake";
  if (text.starts_with(std::string_view("\x16\x03", 2))) return "a TLS hello is no handshake";
  if (text.starts_with("SSH-")) return "an SSH hello is no handshake";
  return "these are not the bytes of a handshake";
}

// kProtocol: not a message of ours. kRefused: another version. The first eight bytes have the same
// layout in all versions.
Result<Kind> decodeHead(ByteView head) {
  ByteReader in(head);
  const auto magic = in.get<uint32_t>();
  const auto version = in.get<uint16_t>();
  const auto kind = in.get<uint16_t>();
  MOONCAKE_TRY(in.finish("handshake"));
  if (magic != kMagic) return Error{ErrorCode::kProtocol, whoseBytes(head)};
  if (version != kVersion) {
    return Error{ErrorCode::kRefused, "the peer speaks version " + std::to_string(version) +
                                          " of the handshake, we speak " +
                                          std::to_string(kVersion)};
  }
  if (kind < 1 || kind > 5) return Error{ErrorCode::kProtocol, "handshake: no such message"};
  return static_cast<Kind>(kind);
}

Mac macOf(const TransportContext& context, std::string_view role, ByteView hello, ByteView rest) {
  ByteWriter text;
  text.putString(role).putRaw(hello).putRaw(rest);
  return context.crypto->hmac(context.jobKey, text.bytes());
}

Error refusal(Reason reason) {
  switch (reason) {
    case Reason::kVersion:
      return {ErrorCode::kRefused, "the peer refused: it speaks another version"};
    case Reason::kEngine:
      return {ErrorCode::kRefused,
              "the peer refused: it is another engine. Its address may come from an earlier "
              "attempt"};
    case Reason::kKey:
      return {ErrorCode::kRefused, "the peer refused: it has another job key"};
    case Reason::kCrossed:
      return {ErrorCode::kInterrupted, "the peer has called us, or still sees its last channel"};
  }
  return {ErrorCode::kRefused, "the peer refused for an unknown reason"};
}

void makeNonBlocking(int socket) {
  ::fcntl(socket, F_SETFL, ::fcntl(socket, F_GETFL) | O_NONBLOCK);
}

// Messages are tiny and the socket is fresh: either the whole message fits or something is wrong.
Status sendMessage(int socket, ByteView message) {
  const ssize_t sent = ::send(socket, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent == static_cast<ssize_t>(message.size())) return {};
  return {ErrorCode::kPeerLost, "the peer went away during the handshake"};
}

// Appends the bytes that have arrived, up to `wanted` bytes in all. False: not yet complete.
Result<bool> receive(int socket, Bytes& message, size_t wanted) {
  while (message.size() < wanted) {
    std::array<std::byte, 256> chunk;
    const size_t room = std::min(chunk.size(), wanted - message.size());
    const ssize_t got = ::recv(socket, chunk.data(), room, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (got < 0)
      return Error{ErrorCode::kPeerLost, "handshake: " + systemError("recv", errno).message};
    if (got == 0)
      return Error{ErrorCode::kPeerLost, "the peer closed the connection during the handshake"};
    message.insert(message.end(), chunk.begin(), chunk.begin() + got);
  }
  return true;
}

// Reads the available bytes of one message, and none of the next. False: not yet complete.
Result<bool> receiveMessage(int socket, Bytes& message) {
  const auto head = receive(socket, message, kHeadBytes);
  if (!head.ok() || !*head) return head;
  const auto kind = decodeHead(ByteView(message).first(kHeadBytes));
  if (!kind.ok()) return kind.error();
  return receive(socket, message, kHeadBytes + bodyBytes(*kind));
}

Kind kindOf(ByteView message) { return *decodeHead(message.first(kHeadBytes)); }

// ---- acceptor ----

class Accept : public std::enable_shared_from_this<Accept> {
 public:
  using Done = std::function<void(Result<Handshaken>)>;

  Accept(Fd socket, const TransportContext& context, Done done)
      : socket_(std::move(socket)), context_(context), done_(std::move(done)) {}

  void begin(Deadline deadline);

 private:
  void onReadable();
  Status takeHello();
  Status takeProof();
  Status refuse(Reason reason);
  void finish(Status status);

  Fd socket_;
  EventLoop::TimerId timer_ = 0;
  const TransportContext& context_;  // outlives the loop's handlers, which keep this object
  Done done_;
  Kind due_ = Kind::kHello;
  Bytes message_;  // being received
  Bytes helloBytes_;
  Hello hello_;
  Bytes challenge_;
};

void Accept::begin(Deadline deadline) {
  makeNonBlocking(socket_.get());
  timer_ = context_.loop.runAt(deadline, [self = shared_from_this()] {
    self->finish({ErrorCode::kTimeout, "the peer did not finish the handshake in time"});
  });
  const Status added = context_.loop.add(
      socket_.get(), EPOLLIN, [self = shared_from_this()](uint32_t) { self->onReadable(); });
  if (added.ok()) return;
  context_.loop.post([self = shared_from_this(), added] { self->finish(added); });
}

void Accept::onReadable() {
  for (;;) {
    const auto complete = receiveMessage(socket_.get(), message_);
    if (!complete.ok() && complete.error().code == ErrorCode::kRefused)
      return finish(refuse(Reason::kVersion));
    if (!complete.ok()) return finish(complete.status());
    if (!*complete) return;
    if (kindOf(message_) != due_)
      return finish({ErrorCode::kProtocol, "handshake: a message out of turn"});
    const bool last = due_ == Kind::kProof;
    Status taken = last ? takeProof() : takeHello();
    if (!taken.ok() || last) return finish(std::move(taken));
    message_.clear();
  }
}

Status Accept::takeHello() {
  const auto hello = decodeHello(message_);
  if (!hello.ok()) return hello.status();
  hello_ = *hello;
  if (hello_.acceptor != context_.id) return refuse(Reason::kEngine);
  helloBytes_ = message_;
  const Nonce nonce = Crypto::randomNonce();
  ByteWriter challenge = mooncake::begin(Kind::kChallenge);
  challenge.putRaw(nonce).putRaw(macOf(context_, "acceptor", helloBytes_, nonce));
  challenge_ = challenge.take();
  due_ = Kind::kProof;
  return sendMessage(socket_.get(), challenge_);
}

Status Accept::takeProof() {
  const Mac expected = macOf(context_, "connector", helloBytes_, challenge_);
  if (!Crypto::equal(expected, ByteView(message_).subspan(kHeadBytes))) return refuse(Reason::kKey);
  if (hello_.lane == 0 && context_.admits && !context_.admits(hello_.connector))
    return refuse(Reason::kCrossed);
  return sendMessage(socket_.get(), mooncake::begin(Kind::kWelcome).take());
}

Status Accept::refuse(Reason reason) {
  ByteWriter refused = mooncake::begin(Kind::kRefused);
  refused.put(static_cast<uint16_t>(reason));
  (void)sendMessage(socket_.get(), refused.bytes());
  switch (reason) {
    case Reason::kVersion:
      return {ErrorCode::kRefused, "refused a peer that speaks another version"};
    case Reason::kEngine:
      return {ErrorCode::kRefused, "refused a peer that looks for another engine"};
    case Reason::kCrossed:
      return {ErrorCode::kInterrupted, "a call crossed another one"};
    case Reason::kKey:
      break;
  }
  return {ErrorCode::kRefused, "refused a peer that does not know the job's key"};
}

void Accept::finish(Status status) {
  if (!done_) return;
  const auto self = shared_from_this();  // the handlers kept us alive, and are removed now
  const Done done = std::exchange(done_, nullptr);
  context_.loop.remove(socket_.get());
  context_.loop.cancel(timer_);
  if (!status.ok()) {
    socket_.reset();
    return done(status.error());
  }
  done(Handshaken{std::move(socket_), hello_.connector, hello_.lane, hello_.lanes, hello_.attempt});
}

}  // namespace

HandshakeConnector::HandshakeConnector(Fd socket, const TransportContext& context, Options options)
    : socket_(std::move(socket)), context_(context), options_(std::move(options)) {}

Result<bool> HandshakeConnector::advance() {
  if (hello_.empty()) {
    makeNonBlocking(socket_.get());
    hello_ =
        encodeHello({options_.lane, options_.lanes, options_.attempt, context_.id, options_.peer});
    MOONCAKE_TRY(sendMessage(socket_.get(), hello_));
  }
  for (;;) {
    const auto complete = receiveMessage(socket_.get(), message_);
    if (!complete.ok()) return complete.error();
    if (!*complete) {
      if (!options_.deadline.passed()) return false;
      return Error{ErrorCode::kTimeout, "the peer did not answer the handshake in time"};
    }
    const bool last = proved_;
    MOONCAKE_TRY(answer());
    if (last) return true;
    message_.clear();
  }
}

// Handles a complete message.
Status HandshakeConnector::answer() {
  const Kind kind = kindOf(message_);
  if (kind == Kind::kRefused) {
    ByteReader in(ByteView(message_).subspan(kHeadBytes));
    return refusal(static_cast<Reason>(in.get<uint16_t>()));
  }
  if (kind != (proved_ ? Kind::kWelcome : Kind::kChallenge))
    return {ErrorCode::kProtocol, "handshake: a message out of turn"};
  return proved_ ? behindProof_ : takeChallenge();
}

Status HandshakeConnector::takeChallenge() {
  ByteReader in(ByteView(message_).subspan(kHeadBytes));
  const auto nonce = getArray<sizeof(Nonce)>(in);
  // Checked before we send our own proof: a peer that does not know the key gets nothing from us
  // that is derived from the key.
  if (!Crypto::equal(macOf(context_, "acceptor", hello_, nonce), in.getRaw(sizeof(Mac))))
    return {ErrorCode::kRefused,
            "the peer does not know the job's key: is MOONCAKE_JOB_KEY the same on all ranks? The "
            "peer's address may also come from an earlier attempt"};
  ByteWriter proof = begin(Kind::kProof);
  proof.putRaw(macOf(context_, "connector", hello_, message_));
  MOONCAKE_TRY(sendMessage(socket_.get(), proof.bytes()));
  proved_ = true;
  // If the peer refuses us now, its answer says more than a failure here. So the result waits for
  // it.
  if (options_.behindProof) behindProof_ = options_.behindProof(socket_.get());
  return {};
}

Handshaken HandshakeConnector::take() {
  return {std::move(socket_), options_.peer, options_.lane, options_.lanes, options_.attempt};
}

void handshakeAccept(Fd socket, const TransportContext& context, Deadline deadline,
                     std::function<void(Result<Handshaken>)> done) {
  std::make_shared<Accept>(std::move(socket), context, std::move(done))->begin(deadline);
}

}  // namespace mooncake
