#include "engine/stream/stream_connection.h"

#include <condition_variable>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <thread>

#include "engine/stream/frame_receiver.h"
#include "engine/stream/linger.h"
#include "engine/stream/send_queue.h"
#include "engine/stream/transfer_table.h"

namespace mooncake {
namespace {

// Most bytes received or sent per event, before others on the loop have their turn.
constexpr size_t kBytesPerEvent = size_t(1) << 20;
// Most bytes of its first turn after its queue was empty; doubled in each further turn. Written
// bytes go into queues below us, where no frame overtakes them. If two ranks fetch from each other,
// one asks a moment later than the other. Its request would wait behind 1 MiB of its own answer,
// 8 ms at 1 Gbit/s.
constexpr size_t kBytesInFirstTurn = size_t(64) << 10;
// Most bytes that a caller sends by itself before it leaves the rest to the loop: it may have other
// lanes to fill.
constexpr size_t kBytesPerCall = size_t(256) << 10;

// Locks, always taken in this order: receiveMutex_, sendMutex_, the TransferTable's own. No
// callback of the owner runs under one of them.
class Connection final : public StreamConnection {
 public:
  Connection(Fd socket, EventLoop& loop, RegionTable& regions, Events events)
      : loop_(loop),
        socket_(std::move(socket)),
        regions_(regions),
        queue_(regions, transfers_),
        events_(std::move(events)),
        receiver_(regions, transfers_, receiving()) {}
  ~Connection() override { transfers_.cancelAll(ErrorCode::kAborted); }

  void begin();
  Status put(const PutRequest& request) override;
  Status get(std::span<const GetRequest> requests) override;
  Status write(std::span<const WriteRequest> requests) override;
  Status askToPull(const WriteRequest& request) override;
  void answerPull(uint64_t number, ErrorCode how) override;
  Status send(ByteView message) override;
  void cancel(const Completion* completion) override;
  void close(const Error& why) override;
  void reconnect(Fd socket) override;
  void fence() override;
  uint64_t lifeSigns() const override { return receiver_.receivedBytes(); }
  void beat() override;
  void askForLanes() override;
  bool retire() override;
  bool endIfIdle() override;
  size_t unansweredBytes() const override { return transfers_.unansweredBytes(); }

 private:
  void listen();
  void onEvents();
  FrameReceiver::Events receiving();
  void answer(uint64_t request, wire::AnswerStatus how);
  void sendPulled(uint64_t request);
  Status usable() const;
  template <typename Request, typename Begin>
  Status beginAll(std::span<const Request> requests, Begin&& begin);
  void flush();
  void sendWaiting();
  void watchForRoom();
  void sendFailed(const Error& error);
  Status sendFrame(const wire::Header& header, ByteView payload);
  void endByItself(Status cause);
  void closeSocket(ErrorCode forTransfers);
  void finish(uint64_t life);

  EventLoop& loop_;

  std::mutex sendMutex_;  // guards socket_ (writing, closing) down to isOver_
  Fd socket_;
  RegionTable& regions_;
  TransferTable transfers_;
  SendQueue queue_;
  bool watchesForRoom_ = false;
  std::optional<Error> sendError_;  // the first one; the loop reports it when it has read the rest
  std::optional<Error> ended_;      // why nothing can be sent any more
  bool fenced_ = false;
  bool retired_ = false;
  bool hasSent_ = false;  // since the last beat()
  // Set by the first thread that ends the connection. Only that thread takes the socket out of the
  // loop and closes it: later its number may belong to another connection.
  bool ending_ = false;
  bool isOver_ = false;  // the end is complete, onClosed included
  uint64_t life_ = 1;    // number of the current socket
  std::condition_variable over_;

  const Events events_;
  size_t mostInTurn_ = kBytesInFirstTurn;  // of sendWaiting(), on the loop's thread only

  std::mutex receiveMutex_;  // guards the fields below; held while targets are written
  FrameReceiver receiver_;
  std::vector<PullRequest> pulls_;  // that have just arrived
  bool stopped_ = false;
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
  ending_ = isOver_ = retired_ = false;
  ++life_;
  transfers_.forget();
  receiver_.restart();
  stopped_ = false;
  listen();  // before any other thread can put
}

// Called under sendMutex_.
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
  header.request = request.signalRegion.key;
  header.key = request.region.key;
  header.offset = request.offset;
  header.length = request.data.size();
  header.signalOffset = request.signal.offset;
  header.stamp = request.signal.stamp;
  std::lock_guard lock(sendMutex_);
  return sendFrame(header, request.data);
}

// Called under sendMutex_. Returns whether a transfer of ours may begin.
Status Connection::usable() const {
  if (retired_) return {ErrorCode::kInterrupted, "this connection was idle, and ends"};
  if (ended_) return *ended_;
  if (fenced_) return {ErrorCode::kAborted, "the peer is no longer part of the job"};
  return {};
}

// Called under sendMutex_. If the socket breaks, begun transfers end with it, like all others.
template <typename Request, typename Begin>
Status Connection::beginAll(std::span<const Request> requests, Begin&& begin) {
  MOONCAKE_TRY(usable());
  for (const Request& request : requests) {
    const auto number = transfers_.add(request);
    if (number.ok()) {
      begin(*number, request);
      continue;
    }
    if (&request == &requests.front()) return number.status();
    request.completion->begin();
    request.completion->end(number.error().code);
  }
  return {};
}

Status Connection::get(std::span<const GetRequest> requests) {
  std::lock_guard lock(sendMutex_);
  const Status begun = beginAll(requests, [this](uint64_t number, const GetRequest& request) {
    queue_.add({.kind = wire::Kind::kGet,
                .request = number,
                .key = request.region.key,
                .offset = request.offset,
                .length = request.target.size()});
  });
  flush();
  return begun;
}

Status Connection::write(std::span<const WriteRequest> requests) {
  std::lock_guard lock(sendMutex_);
  const Status begun = beginAll(requests, [this](uint64_t number, const WriteRequest& request) {
    queue_.write(number, request);
  });
  // If the loop is sending already, it goes on: two threads would only take turns at the lock.
  if (!watchesForRoom_) flush();
  return begun;
}

Status Connection::askToPull(const WriteRequest& request) {
  auto* const source = const_cast<std::byte*>(request.source.data());
  auto region = regions_.add(source, request.source.size(), kRemoteRead);
  if (!region.ok()) return region.status();
  const RemoteRegion from = region->remote();
  std::lock_guard lock(sendMutex_);
  MOONCAKE_TRY(usable());
  const auto number = transfers_.addPull(request, std::move(*region));
  if (!number.ok()) return number.status();
  queue_.add({.kind = wire::Kind::kPull,
              .request = *number,
              .key = request.region.key,
              .offset = request.offset,
              .length = from.bytes,
              .signalOffset = from.address,
              .stamp = from.key});
  flush();
  return {};
}

void Connection::answerPull(uint64_t number, ErrorCode how) {
  std::lock_guard lock(sendMutex_);
  if (ended_) return;
  answer(number, how == ErrorCode::kOk            ? wire::AnswerStatus::kOk
                 : how == ErrorCode::kRefused     ? wire::AnswerStatus::kRefused
                 : how == ErrorCode::kUnsupported ? wire::AnswerStatus::kUnsupported
                                                  : wire::AnswerStatus::kAborted);
  flush();
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

// Called under sendMutex_.
Status Connection::sendFrame(const wire::Header& header, ByteView payload) {
  if (ended_) return *ended_;
  hasSent_ = true;
  const Status sent = queue_.send(socket_.get(), header, payload);
  if (sent.code() == ErrorCode::kPeerLost) sendFailed(sent.error());
  if (!queue_.empty()) watchForRoom();
  return sent;
}

// Called under sendMutex_. The socket cannot send any more, but a goodbye may still wait to be
// read: the loop finds out. shutdown() makes sure that it wakes up.
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

// Called under sendMutex_.
void Connection::flush() {
  for (size_t sent = 0; !queue_.empty() && sent < kBytesPerCall;) {
    const auto some = queue_.sendSome(socket_.get(), kBytesPerCall - sent);
    if (!some.ok()) return sendFailed(some.error());
    if (*some == 0) break;
    hasSent_ = true;
    sent += *some;
  }
  if (!queue_.empty()) watchForRoom();
}

// Called under sendMutex_.
void Connection::answer(uint64_t request, wire::AnswerStatus how) {
  queue_.add({.kind = wire::Kind::kAnswer, .status = how, .request = request});
}

// The receiver's events, which run on the loop's thread, under receiveMutex_. Frames that they
// queue leave when everything has been read.
FrameReceiver::Events Connection::receiving() {
  FrameReceiver::Events events;
  events.onGet = [this](const wire::Header& get) {
    std::lock_guard lock(sendMutex_);
    return queue_.answer(get);
  };
  events.onWritten = [this](uint64_t request, wire::AnswerStatus how) {
    std::lock_guard lock(sendMutex_);
    if (!ended_) answer(request, how);
  };
  events.awaitSender = [this] { std::lock_guard lock(sendMutex_); };
  if (!events_.onPull) return events;
  events.onPull = [this](const wire::Header& pull) {
    pulls_.push_back({.number = pull.request,
                      .key = pull.key,
                      .offset = pull.offset,
                      .length = pull.length,
                      .source = {pull.signalOffset, pull.length, pull.stamp}});
    return true;
  };
  events.onUnpullable = [this](uint64_t request) { sendPulled(request); };
  return events;
}

void Connection::sendPulled(uint64_t request) {
  {
    std::lock_guard lock(sendMutex_);  // before cancel() could look for it in the queue
    const WriteRequest write = transfers_.sendInstead(request);
    if (write.completion && usable().ok()) return queue_.write(request, write);
  }
  transfers_.finish(request, ErrorCode::kAborted);
}

void Connection::onEvents() {
  // Reading comes first, for any event: bytes that the peer sent before its death still count.
  std::optional<Status> end;
  std::vector<Bytes> messages;
  std::vector<PullRequest> pulls;
  bool lanesWanted = false, retired = false;
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
    pulls.swap(pulls_);
    lanesWanted = receiver_.takeLanesWanted();
    retired = receiver_.takeRetired();
  }
  for (const Bytes& message : messages) events_.onMessage(message);
  for (const PullRequest& pull : pulls) events_.onPull(pull);
  if (lanesWanted && events_.onLanesWanted) events_.onLanesWanted();
  if (retired && events_.onRetired) events_.onRetired();
  if (end) return endByItself(*std::move(end));
  sendWaiting();
}

void Connection::sendWaiting() {
  for (size_t sent = 0; sent < mostInTurn_;) {
    std::lock_guard lock(sendMutex_);  // per system call, so that a put gets in between
    if (ended_) return;
    if (queue_.empty()) {
      mostInTurn_ = kBytesInFirstTurn;
      if (watchesForRoom_) watchesForRoom_ = !loop_.modify(socket_.get(), EPOLLIN).ok();
      return;
    }
    const auto some = queue_.sendSome(socket_.get(), mostInTurn_ - sent);
    if (!some.ok()) return sendFailed(some.error());
    if (*some == 0) return watchForRoom();
    hasSent_ = true;
    sent += *some;
  }
  {
    std::lock_guard lock(sendMutex_);
    if (!ended_ && !queue_.empty()) watchForRoom();
  }
  if (mostInTurn_ == kBytesPerEvent) return;
  mostInTurn_ = std::min(2 * mostInTurn_, kBytesPerEvent);
  std::this_thread::yield();
}

void Connection::cancel(const Completion* completion) {
  std::lock_guard receiving(receiveMutex_);
  {
    std::lock_guard sending(sendMutex_);
    queue_.cancelWrites(completion);
  }
  transfers_.cancel(completion, ErrorCode::kAborted);
}

void Connection::fence() {
  {
    std::lock_guard lock(sendMutex_);  // comes first: no later transfer begins uncancelled
    if (std::exchange(fenced_, true)) return;
    queue_.abortAnswers();
    queue_.cancelWrites(nullptr);
  }
  std::lock_guard lock(receiveMutex_);
  receiver_.refuseWrites();
  transfers_.cancelAll(ErrorCode::kAborted);
}

// If the lock is held, its holder is sending, so no beat is needed.
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

bool Connection::retire() {
  std::lock_guard lock(sendMutex_);
  if (ended_ || fenced_ || retired_ || !queue_.empty() || !transfers_.isEmpty()) return false;
  retired_ = true;
  return sendFrame({.kind = wire::Kind::kRetire}, {}).ok();
}

bool Connection::endIfIdle() {
  {
    std::lock_guard lock(sendMutex_);
    retired_ = true;
    if (!ended_ && (!queue_.empty() || !transfers_.isEmpty())) return false;
  }
  close(Error{ErrorCode::kAborted, "the connection was idle"});
  return true;
}

// When this returns, no byte from the peer is written any more.
void Connection::closeSocket(ErrorCode forTransfers) {
  loop_.remove(socket_.get());  // waits for the handler, which takes our locks
  std::lock_guard receiving(receiveMutex_);
  stopped_ = true;
  transfers_.cancelAll(forTransfers);
  std::lock_guard sending(sendMutex_);
  if (ended_->code == ErrorCode::kAborted) linger(loop_, std::move(socket_));
  socket_.reset();
}

void Connection::close(const Error& why) {
  uint64_t life = 0;
  {
    std::unique_lock lock(sendMutex_);
    if (std::exchange(ending_, true)) {
      // When the end is complete, the loop may be gone. Before that, the loop's thread must not
      // wait: either onClosed called us, or another close() waits for that thread.
      if (isOver_ || loop_.onLoopThread()) return;
      return over_.wait(lock, [this, ours = life_] { return isOver_ || life_ != ours; });
    }
    life = life_;
    if (!ended_) {
      ended_ = why;
      if (why.code == ErrorCode::kAborted && queue_.betweenFrames())
        (void)queue_.send(socket_.get(), wire::Header{.kind = wire::Kind::kGoodbye}, {});
      queue_.clear();
      ::shutdown(socket_.get(), SHUT_WR);
    }
  }
  closeSocket(why.code);
  finish(life);
}

// On the loop's thread, without locks.
void Connection::endByItself(Status cause) {
  uint64_t life = 0;
  {
    std::lock_guard lock(sendMutex_);
    // close() came first; the peer may only be answering our goodbye
    if (std::exchange(ending_, true)) return;
    if (sendError_ && cause.code() == ErrorCode::kPeerLost) cause = *sendError_;
    ended_ = cause.ok() ? Error{ErrorCode::kPeerLost, "the peer said goodbye"} : cause.error();
    queue_.clear();
    life = life_;
  }
  closeSocket(ErrorCode::kPeerLost);
  // Another thread may reconnect it before this returns.
  if (events_.onClosed) events_.onClosed(cause);
  finish(life);
}

void Connection::finish(uint64_t life) {
  std::lock_guard lock(sendMutex_);
  if (life_ == life) isOver_ = true;
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
