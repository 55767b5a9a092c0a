#include "engine/stream/stream_connection.h"

#include <condition_variable>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "engine/stream/frame_receiver.h"
#include "engine/stream/get_table.h"
#include "engine/stream/send_queue.h"

namespace mooncake {
namespace {

// What one connection may do per event before the others on the loop have their turn.
constexpr size_t kBytesPerEvent = size_t(1) << 20;

// Locks, always taken in this order: receiveMutex_, sendMutex_, the GetTable's own. No callback
// runs under one.
class Connection final : public StreamConnection {
 public:
  Connection(Fd socket, EventLoop& loop, RegionTable& regions, Events events)
      : loop_(loop),
        socket_(std::move(socket)),
        queue_(regions),
        receiver_(regions, gets_, [this](const wire::Header& get) { return enqueueAnswer(get); }),
        events_(std::move(events)) {}
  ~Connection() override { gets_.cancelAll(ErrorCode::kAborted); }

  void begin();
  Status put(const PutRequest& request) override;
  Status get(const GetRequest& request) override;
  Status send(ByteView message) override;
  void cancelGets(const Completion* completion) override;
  void close(const Error& why) override;
  void reconnect(Fd socket) override;
  void fence() override;
  uint64_t lifeSigns() const override { return receiver_.receivedBytes(); }
  void beat() override;
  void askForLanes() override;
  size_t unansweredBytes() const override { return gets_.unansweredBytes(); }

 private:
  void listen();
  void onEvents();
  bool enqueueAnswer(const wire::Header& get);
  void sendWaiting();
  void watchForRoom();
  void sendFailed(const Error& error);
  Status sendFrame(const wire::Header& header, ByteView payload);
  void endByItself(Status cause);
  void finish();
  void stopReceiving(ErrorCode forGets);

  EventLoop& loop_;

  std::mutex sendMutex_;  // guards socket_ (writing, closing) down to isOver_
  Fd socket_;
  SendQueue queue_;
  bool watchesForRoom_ = false;
  std::optional<Error> sendError_;  // the first; the loop reports it when it has read what is left
  std::optional<Error> ended_;      // why nothing can be sent any more
  bool fenced_ = false;
  bool hasSent_ = false;  // since the last beat()
  // Only who comes first takes the socket out of the loop and closes it: for anybody else its
  // number may already be another connection's.
  bool ending_ = false;
  bool isOver_ = false;  // that is done, onClosed included
  uint64_t life_ = 1;    // which socket it is
  std::condition_variable over_;

  GetTable gets_;

  std::mutex receiveMutex_;  // guards receiver_ and stopped_, and keeps targets from being written
  FrameReceiver receiver_;
  bool stopped_ = false;
  const Events events_;
};

void Connection::begin() {
  std::lock_guard lock(sendMutex_);
  listen();
}

void Connection::reconnect(Fd socket) {
  std::lock_guard receiving(receiveMutex_);
  std::lock_guard sending(sendMutex_);
  socket_ = std::move(socket);
  queue_.clear();
  watchesForRoom_ = false;
  sendError_.reset();
  ended_.reset();
  ending_ = isOver_ = false;
  ++life_;
  gets_.forget();
  receiver_.restart();
  stopped_ = false;
  listen();  // before anybody else can put
}

// Under sendMutex_.
void Connection::listen() {
  // The handler keeps the connection alive until it is removed.
  const Status added = loop_.add(socket_.get(), EPOLLIN, [self = shared_from_this()](uint32_t) {
    static_cast<Connection&>(*self).onEvents();
  });
  if (added.ok()) return;
  loop_.post([self = shared_from_this(), cause = added, life = life_] {
    auto& connection = static_cast<Connection&>(*self);
    {
      std::lock_guard lock(connection.sendMutex_);
      if (connection.life_ != life) return;
    }
    connection.endByItself(cause);
  });
}

Status Connection::put(const PutRequest& request) {
  if (request.data.size() > wire::kMaxPutBytes) {
    return {ErrorCode::kInvalidArgument,
            "a put takes at most 64 MiB, not " + std::to_string(request.data.size())};
  }
  if (!wire::isSignalOffset(request.signal.offset)) {
    return {ErrorCode::kInvalidArgument,
            "a signal's word is 8-aligned and behind the doorbell, not at " +
                std::to_string(request.signal.offset)};
  }
  wire::Header header;
  header.kind = wire::Kind::kPut;
  header.key = request.region.key;
  header.offset = request.offset;
  header.length = request.data.size();
  header.signalOffset = request.signal.offset;
  header.stamp = request.signal.stamp;
  std::lock_guard lock(sendMutex_);
  return sendFrame(header, request.data);
}

Status Connection::get(const GetRequest& request) {
  std::lock_guard lock(sendMutex_);
  if (ended_) return *ended_;
  if (fenced_) return {ErrorCode::kAborted, "the peer is no longer part of the job"};
  const auto number = gets_.add(request);
  if (!number.ok()) return number.error();
  wire::Header header;
  header.kind = wire::Kind::kGet;
  header.request = *number;
  header.key = request.region.key;
  header.offset = request.offset;
  header.length = request.target.size();
  // The get has begun: should the socket break now, the loop ends it like all the others.
  (void)sendFrame(header, {});
  return {};
}

Status Connection::send(ByteView message) {
  static_assert(wire::kMaxMessageBytes == Channel::kMaxMessageBytes);
  if (message.empty() || message.size() > wire::kMaxMessageBytes) {
    return {ErrorCode::kInvalidArgument,
            "a message has 1 byte to 64 KiB, not " + std::to_string(message.size())};
  }
  std::lock_guard lock(sendMutex_);
  return sendFrame({.kind = wire::Kind::kMessage, .length = message.size()}, message);
}

// Under sendMutex_.
Status Connection::sendFrame(const wire::Header& header, ByteView payload) {
  if (ended_) return *ended_;
  hasSent_ = true;
  const Status sent = queue_.send(socket_.get(), header, payload);
  if (sent.code() == ErrorCode::kPeerLost) sendFailed(sent.error());
  if (!queue_.empty()) watchForRoom();
  return sent;
}

// Under sendMutex_. The socket is dead for sending, but a goodbye may still wait to be read: the
// loop finds out what happened. shutdown() makes sure that it wakes up.
void Connection::sendFailed(const Error& error) {
  sendError_ = error;
  ended_ = error;
  queue_.clear();
  ::shutdown(socket_.get(), SHUT_RDWR);
}

void Connection::watchForRoom() {
  if (watchesForRoom_) return;
  watchesForRoom_ = loop_.modify(socket_.get(), EPOLLIN | EPOLLOUT).ok();
}

// On the loop's thread, under receiveMutex_.
bool Connection::enqueueAnswer(const wire::Header& get) {
  std::lock_guard lock(sendMutex_);
  return queue_.answer(get);
}

void Connection::onEvents() {
  // Reading comes first whatever the event: what the peer sent before it died still counts.
  std::optional<Status> end;
  std::vector<Bytes> messages;
  bool lanesWanted = false;
  {
    std::lock_guard lock(receiveMutex_);
    if (stopped_) return;
    const auto stop = receiver_.receive(socket_.get(), kBytesPerEvent);
    if (!stop.ok()) {
      end = stop.status();
    } else if (*stop == FrameReceiver::Stop::kGoodbye) {
      end = Status();
    }
    messages = receiver_.takeMessages();
    lanesWanted = receiver_.takeLanesWanted();
  }
  for (const Bytes& message : messages) events_.onMessage(message);
  if (lanesWanted && events_.onLanesWanted) events_.onLanesWanted();
  if (end) return endByItself(*std::move(end));
  sendWaiting();
}

void Connection::sendWaiting() {
  for (size_t sent = 0; sent < kBytesPerEvent;) {
    std::lock_guard lock(sendMutex_);  // per system call, so that a put gets in between
    if (ended_) return;
    if (queue_.empty()) {
      if (watchesForRoom_) watchesForRoom_ = !loop_.modify(socket_.get(), EPOLLIN).ok();
      return;
    }
    const auto some = queue_.sendSome(socket_.get());
    if (!some.ok()) return sendFailed(some.error());
    if (*some == 0) return watchForRoom();
    hasSent_ = true;
    sent += *some;
  }
  std::lock_guard lock(sendMutex_);
  if (!ended_ && !queue_.empty()) watchForRoom();
}

void Connection::cancelGets(const Completion* completion) {
  std::lock_guard lock(receiveMutex_);
  gets_.cancel(completion, ErrorCode::kAborted);
}

void Connection::fence() {
  {
    std::lock_guard lock(sendMutex_);  // first: no get begins any more that nobody would cancel
    if (std::exchange(fenced_, true)) return;
    queue_.abortAnswers();
  }
  std::lock_guard lock(receiveMutex_);
  receiver_.refusePuts();
  gets_.cancelAll(ErrorCode::kAborted);
}

// Whoever holds the lock is sending.
void Connection::beat() {
  const std::unique_lock lock(sendMutex_, std::try_to_lock);
  if (!lock || ended_) return;
  if (!hasSent_ && queue_.empty()) (void)sendFrame({.kind = wire::Kind::kBeat}, {});
  hasSent_ = false;
}

void Connection::askForLanes() {
  std::lock_guard lock(sendMutex_);
  (void)sendFrame({.kind = wire::Kind::kLanes}, {});
}

// When this returns, no byte from the peer is written anywhere any more.
void Connection::stopReceiving(ErrorCode forGets) {
  std::lock_guard lock(receiveMutex_);
  stopped_ = true;
  gets_.cancelAll(forGets);
}

void Connection::close(const Error& why) {
  {
    std::unique_lock lock(sendMutex_);
    if (std::exchange(ending_, true)) {
      // The loop may be gone when it is over. Until then its thread must not wait: either onClosed
      // called us, or another close() waits for that thread.
      if (!isOver_ && !loop_.onLoopThread()) over_.wait(lock, [&] { return isOver_; });
      return;
    }
    if (!ended_) {
      ended_ = why;
      const bool inPeace = why.code == ErrorCode::kAborted;
      if (inPeace && queue_.betweenFrames())
        (void)queue_.send(socket_.get(), wire::Header{.kind = wire::Kind::kGoodbye}, {});
      queue_.clear();
      ::shutdown(socket_.get(), SHUT_WR);
    }
  }
  loop_.remove(socket_.get());  // waits for the handler, which takes our locks
  stopReceiving(why.code);
  finish();
}

// On the loop's thread, without locks.
void Connection::endByItself(Status cause) {
  {
    std::lock_guard lock(sendMutex_);
    // close() was faster; the peer may only be answering our goodbye
    if (std::exchange(ending_, true)) return;
    if (sendError_ && cause.code() == ErrorCode::kPeerLost) cause = *sendError_;
    ended_ = cause.ok() ? Error{ErrorCode::kPeerLost, "the peer said goodbye"} : cause.error();
    queue_.clear();
  }
  loop_.remove(socket_.get());
  stopReceiving(ErrorCode::kPeerLost);
  if (events_.onClosed) events_.onClosed(cause);
  finish();
}

void Connection::finish() {
  std::lock_guard lock(sendMutex_);
  socket_.reset();
  isOver_ = true;
  over_.notify_all();
}

}  // namespace

std::shared_ptr<StreamConnection> StreamConnection::start(Fd socket, EventLoop& loop,
                                                          RegionTable& regions, Events events) {
  auto connection =
      std::make_shared<Connection>(std::move(socket), loop, regions, std::move(events));
  connection->begin();
  return connection;
}

}  // namespace mooncake
