#include "transfer/session_server.h"

#include <cerrno>
#include <chrono>
#include <future>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "base/log.h"

namespace mooncake::transfer {
namespace {

constexpr auto kPatience = std::chrono::seconds(10);  // from a peer's handshake to the end
constexpr size_t kLengthBytes = sizeof(uint32_t);
constexpr size_t kMostStrangers = 16;

}  // namespace

// The connection of one authenticated peer. Used by the loop's thread only.
class SessionServer::Conversation : public std::enable_shared_from_this<Conversation> {
 public:
  Conversation(SessionServer& server, Fd socket) : server_(server), socket_(std::move(socket)) {}

  void begin() {
    auto& loop = server_.context_.loop;
    timer_ = loop.runAt(Deadline::after(kPatience), [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->end();
    });
    const Status added = loop.add(socket_.get(), EPOLLIN, [this](uint32_t) { onReady(); });
    if (!added.ok()) end();
  }

  // Drops this object, unless a caller on the stack still holds it.
  void end() {
    const auto self = shared_from_this();
    server_.context_.loop.remove(socket_.get());
    server_.context_.loop.cancel(timer_);
    socket_.reset();
    server_.drop(this);
  }

 private:
  void onReady() {
    const auto self = shared_from_this();
    const Status status = answer_ ? send() : receive();
    if (!status.ok()) end();
  }

  // Any error ends the conversation, and so does kAborted, which means that the answer was sent.
  Status receive() {
    while (!answer_) {
      std::array<std::byte, 4096> chunk;
      const size_t room = std::min(chunk.size(), wanted() - question_.size());
      const ssize_t got = ::recv(socket_.get(), chunk.data(), room, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
      if (got <= 0) return {ErrorCode::kPeerLost, "gone"};
      question_.insert(question_.end(), chunk.begin(), chunk.begin() + got);
      if (question_.size() == kLengthBytes && wanted() > kLengthBytes + kMostQuestionBytes)
        return {ErrorCode::kProtocol, "too long a question"};
      if (question_.size() < wanted() || question_.size() == kLengthBytes) continue;
      const auto question = Question::decode(ByteView(question_).subspan(kLengthBytes));
      if (!question.ok()) return question.status();
      answer_ = server_.describe_();
      if (!answer_) return {ErrorCode::kAborted, "closing"};
      length_ = static_cast<uint32_t>(answer_->size());
    }
    return send();
  }

  size_t wanted() const {
    if (question_.size() < kLengthBytes) return kLengthBytes;
    return kLengthBytes + ByteReader(question_).get<uint32_t>();
  }

  Status send() {
    while (sent_ < kLengthBytes + answer_->size()) {
      const auto head = std::as_bytes(std::span(&length_, 1));
      iovec parts[2];
      int count = 0;
      if (sent_ < kLengthBytes) parts[count++] = part(head.subspan(sent_));
      parts[count++] =
          part(ByteView(*answer_).subspan(sent_ > kLengthBytes ? sent_ - kLengthBytes : 0));
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = size_t(count);
      const ssize_t gone = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (gone < 0 && errno == EINTR) continue;
      if (gone < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return server_.context_.loop.modify(socket_.get(), EPOLLOUT);
      if (gone < 0) return {ErrorCode::kPeerLost, "gone"};
      sent_ += size_t(gone);
    }
    return {ErrorCode::kAborted, "all is said"};
  }

  static iovec part(ByteView bytes) { return {const_cast<std::byte*>(bytes.data()), bytes.size()}; }

  SessionServer& server_;  // ends all conversations before it goes
  Fd socket_;
  EventLoop::TimerId timer_ = 0;
  Bytes question_;  // with its length in front
  std::shared_ptr<const Bytes> answer_;
  uint32_t length_ = 0;  // of the answer
  size_t sent_ = 0;
};

Result<std::shared_ptr<SessionServer>> SessionServer::start(const TransportContext& context,
                                                            Fd listener, Describe describe) {
  std::shared_ptr<SessionServer> server(new SessionServer(context, std::move(describe)));
  auto listens = HandshakeListener::start(
      context, std::move(listener), [](int) { return true; },
      [weak = server->weak_from_this()](Result<Handshaken> result) {
        if (const auto self = weak.lock()) self->onHandshake(std::move(result));
      });
  if (!listens.ok()) return listens.error();
  server->listener_ = std::move(*listens);
  return server;
}

void SessionServer::stop() {
  listener_->stop();
  std::promise<void> ended;
  context_.loop.post([&] {
    isStopped_ = true;
    while (!conversations_.empty()) {
      const auto last = conversations_.begin()->second;
      last->end();
    }
    ended.set_value();
  });
  ended.get_future().wait();
}

void SessionServer::onHandshake(Result<Handshaken> result) {
  if (!result.ok()) {
    // A port scanner must not fill the log, so each kind of error is logged once.
    const std::string& what = result.error().message;
    const bool isNews = strangers_.size() < kMostStrangers && strangers_.insert(what).second;
    log(isNews ? LogLevel::kInfo : LogLevel::kDebug, "transfer",
        "a connection to the session port is rejected: ", what);
    return;
  }
  if (isStopped_ || conversations_.size() >= kMostConversations) return;
  const auto conversation = std::make_shared<Conversation>(*this, std::move(result->socket));
  conversations_.emplace(conversation.get(), conversation);
  conversation->begin();
}

void SessionServer::drop(Conversation* conversation) { conversations_.erase(conversation); }

}  // namespace mooncake::transfer
