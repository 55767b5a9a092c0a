#include "wires/stream/socket_connection.h"

#include <sys/socket.h>
#include <thread>

#include "base/failpoint.h"
#include "wires/stream/linger.h"

namespace mooncake {
namespace {

// Most bytes received or sent per event, before other sockets on the loop have their turn.
constexpr size_t kBytesPerEvent = size_t(1) << 20;
// Most bytes that a caller sends by itself before it leaves the rest to the loop: it may have other
// lanes to fill.
constexpr size_t kBytesPerCall = size_t(256) << 10;
// Pause between two looks of a thread that waits for a copy of a device, after so long without one.
constexpr auto kPause = std::chrono::microseconds(200);

}  // namespace

void SocketConnection::begin() {
  Lock lock(sendMutex_);
  listen();
}

void SocketConnection::reconnect(Fd socket) {
  Lock receiving(receiveMutex_);
  Lock sending(sendMutex_);
  socket_ = std::move(socket);
  queue_.clear();
  sendError_.reset();
  ended_.reset();
  ending_ = isOver_ = retired_ = false;
  ++life_;
  transfers_.forget();
  receiver_.restart();
  stopped_ = isBlocked_ = false;
  listen();  // before any other thread can put
}

void SocketConnection::listen() {
  // The handler keeps the connection alive until it is removed.
  const Status added = watch_.begin(socket_.get(), [self = shared_from_this()](uint32_t) {
    static_cast<SocketConnection&>(*self).onEvents();
  });
  if (added.ok()) return;
  loop_.post([self = shared_from_this(), cause = added, life = life_] {
    auto& connection = static_cast<SocketConnection&>(*self);
    {
      Lock lock(connection.sendMutex_);
      if (connection.life_ != life) return;
    }
    connection.endByItself(cause);
  });
}

Status SocketConnection::put(const PutRequest& request) {
  Lock lock(sendMutex_);
  return sendFrame([&]() REQUIRES(sendMutex_) { return queue_.send(socket_.get(), request); });
}

// Returns whether a transfer of ours may begin.
Status SocketConnection::usable() const {
  if (retired_) return {ErrorCode::kInterrupted, "this connection was idle, and ends"};
  if (ended_) return *ended_;
  if (fenced_) return {ErrorCode::kAborted, "the peer is no longer part of the job"};
  return {};
}

// If the socket breaks, begun transfers end with it, like all transfers.
template <typename Request, typename Begin>
Status SocketConnection::beginAll(std::span<const Request> requests, Begin&& begin) {
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

Status SocketConnection::get(std::span<const GetRequest> requests) {
  Lock lock(sendMutex_);
  const Status begun =
      beginAll(requests, [this](uint64_t number, const GetRequest& request) REQUIRES(sendMutex_) {
        queue_.add({.kind = wire::Kind::kGet,
                    .request = number,
                    .key = request.region.key,
                    .offset = request.offset,
                    .length = request.target.size()});
      });
  flush();
  return begun;
}

Status SocketConnection::write(std::span<const WriteRequest> requests) {
  Lock lock(sendMutex_);
  const Status begun =
      beginAll(requests, [this](uint64_t number, const WriteRequest& request)
                             REQUIRES(sendMutex_) { queue_.write(number, request); });
  // If the loop is sending already, it goes on: two threads would only take turns at the lock.
  if (!watch_.isForRoom()) flush();
  return begun;
}

Status SocketConnection::askToPull(const WriteRequest& request) {
  auto* const source = const_cast<std::byte*>(request.source.data());
  auto region = regions_.add(source, request.source.size(), kRemoteRead, request.owner);
  if (!region.ok()) return region.status();
  const RemoteRegion from = region->remote();
  Lock lock(sendMutex_);
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

void SocketConnection::answerPull(uint64_t number, ErrorCode how) {
  Lock lock(sendMutex_);
  if (ended_) return;
  answer(number, wire::statusOf(how));
  flush();
}

Status SocketConnection::send(ByteView message) {
  static_assert(wire::kMaxMessageBytes == Channel::kMaxMessageBytes);
  if (message.empty() || message.size() > wire::kMaxMessageBytes) {
    return {ErrorCode::kInvalidArgument,
            "a message has 1 byte to 64 KiB, not " + std::to_string(message.size())};
  }
  Lock lock(sendMutex_);
  return sendFrame({.kind = wire::Kind::kMessage, .length = message.size()}, message);
}

template <typename Send>
Status SocketConnection::sendFrame(Send&& send) {
  if (ended_) return *ended_;
  hasSent_ = true;
  const Status sent = send();
  if (sent.code() == ErrorCode::kPeerLost) sendFailed(sent.error());
  awaitMore();
  return sent;
}

Status SocketConnection::sendFrame(const wire::Header& header, ByteView payload) {
  return sendFrame(
      [&]() REQUIRES(sendMutex_) { return queue_.send(socket_.get(), header, payload); });
}

// The socket cannot send any more, but a goodbye may still wait to be
// read: the loop finds out. shutdown() makes sure that it wakes up.
void SocketConnection::sendFailed(const Error& error) {
  sendError_ = error;
  ended_ = error;
  queue_.clear();
  ::shutdown(socket_.get(), SHUT_RDWR);
}

// Called when a thread leaves the queue. The loop goes on with it when the socket
// has room, or a copy from a device has ended.
void SocketConnection::awaitMore() {
  if (queue_.copies().isUnderWay()) lookSoon();
  watch_.watchForRoom(!queue_.empty() && !queue_.awaitsCopy());
}

void SocketConnection::flush() {
  for (size_t sent = 0; !queue_.empty() && sent < kBytesPerCall;) {
    const auto some = queue_.sendSome(socket_.get(), kBytesPerCall - sent);
    if (!some.ok()) return sendFailed(some.error());
    if (*some == 0) break;
    hasSent_ = true;
    sent += *some;
  }
  awaitMore();
}

void SocketConnection::answer(uint64_t request, wire::AnswerStatus how) {
  queue_.add({.kind = wire::Kind::kAnswer, .status = how, .request = request});
}

// The receiver's events, which run on the loop's thread, under receiveMutex_. Frames that they
// queue leave when everything has been read.
FrameReceiver::Events SocketConnection::receiving() {
  FrameReceiver::Events events;
  events.onGet = [this](const wire::Header& get) {
    Lock lock(sendMutex_);
    return queue_.answer(get);
  };
  events.onWritten = [this](uint64_t request, wire::AnswerStatus how) {
    Lock lock(sendMutex_);
    if (!ended_) answer(request, how);
  };
  events.awaitSender = [this] { Lock lock(sendMutex_); };
  if (!events_.onPull) return events;
  events.onPull = [this](const wire::Header& pull) REQUIRES(receiveMutex_) {
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

void SocketConnection::sendPulled(uint64_t request) {
  {
    Lock lock(sendMutex_);  // before cancel() could look for it in the queue
    const WriteRequest write = transfers_.sendInstead(request);
    if (write.completion && usable().ok()) return queue_.write(request, write);
  }
  transfers_.finish(request, ErrorCode::kAborted);
}

void SocketConnection::onEvents() {
  // Reading comes first, for any event: bytes that the peer sent before its death still count.
  std::optional<Status> end;
  std::vector<Bytes> messages;
  std::vector<PullRequest> pulls;
  bool lanesWanted = false, retired = false;
  {
    Lock lock(receiveMutex_);
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
    if (receiver_.copies().isUnderWay()) lookSoon();
    if (isBlocked_ != receiver_.isBlocked()) {
      Lock sending(sendMutex_);
      isBlocked_ = !isBlocked_;
      watch_.watchForBytes(!isBlocked_);
    }
  }
  for (const Bytes& message : messages) events_.onMessage(message);
  for (const PullRequest& pull : pulls) events_.onPull(pull);
  if (lanesWanted && events_.onLanesWanted) events_.onLanesWanted();
  if (retired && events_.onRetired) events_.onRetired();
  if (end) return endByItself(*std::move(end));
  sendWaiting();
}

void SocketConnection::sendWaiting() {
  for (size_t sent = 0; sent < mostInTurn_;) {
    Lock lock(sendMutex_);  // per system call, so that a put gets in between
    if (ended_) return;
    if (queue_.empty()) {
      mostInTurn_ = kBytesInFirstTurn;
      return awaitMore();
    }
    const auto some = queue_.sendSome(socket_.get(), mostInTurn_ - sent);
    if (!some.ok()) return sendFailed(some.error());
    if (*some == 0) return awaitMore();
    hasSent_ = true;
    sent += *some;
  }
  {
    Lock lock(sendMutex_);
    if (!ended_) awaitMore();
  }
  if (mostInTurn_ == kBytesPerEvent) return;
  mostInTurn_ = std::min(2 * mostInTurn_, kBytesPerEvent);
  std::this_thread::yield();
}

void SocketConnection::cancel(const Completion* completion) {
  std::vector<Completion*> withdrawn;
  {
    Lock receiving(receiveMutex_);
    {
      Lock sending(sendMutex_);
      queue_.cancelWrites(completion);
    }
    withdrawn = transfers_.withdraw(completion);
    withdrawn_.add(withdrawn);
  }
  awaitCopies(completion);
  withdrawn_.end(withdrawn, ErrorCode::kAborted);
  withdrawn_.await(completion);
}

void SocketConnection::fence() {
  {
    Lock lock(sendMutex_);  // comes first: no later transfer begins uncancelled
    if (std::exchange(fenced_, true)) return;
    queue_.abortAnswers();
    queue_.cancelWrites(nullptr);
  }
  std::vector<Completion*> withdrawn;
  {
    Lock lock(receiveMutex_);
    receiver_.refuseWrites();
    withdrawn = transfers_.withdrawAll();
    withdrawn_.add(withdrawn);
  }
  failpoint("withdrawn");
  awaitCopies();
  withdrawn_.end(withdrawn, ErrorCode::kAborted);
}

// Looks for copies that have ended. Returns whether any are still under way: for this
// completion, or at all.
template <typename... Which>
bool SocketConnection::copies(Which... which) {
  Lock receiving(receiveMutex_);
  receiver_.endLanded();
  Lock sending(sendMutex_);
  queue_.copies().look();
  return receiver_.copies().isUnderWay(which...) || queue_.copies().isUnderWay(which...);
}

// Waits without a lock until no such copy is under way. It cannot be recalled, and takes as long as
// the device needs for 256 KiB and for its work before that.
template <typename... Which>
void SocketConnection::awaitCopies(Which... which) {
  const auto start = Clock::now();
  bool waited = false;
  for (; copies(which...); waited = true) {
    failpoint("await-copy");
    if (Clock::now() - start < kPause) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
  if (waited) lookSoon();  // answers may have become due here
}

// On the loop's thread.
uint64_t SocketConnection::look() {
  const bool isUnderWay = copies();
  std::optional<Status> cause;
  uint64_t ended = 0;
  {
    Lock receiving(receiveMutex_);
    Lock sending(sendMutex_);
    if (!isUnderWay) cause = std::exchange(endsAfterCopies_, std::nullopt);
    ended = receiver_.copies().ended() + queue_.copies().ended();
  }
  if (cause) {
    endNow(*cause);
  } else {
    onEvents();
  }
  if (isUnderWay) lookSoon();
  return ended;
}

// If the lock is held, its holder is sending, so no beat is needed.
void SocketConnection::beat() {
  if (!sendMutex_.try_lock()) return;
  const Lock lock(sendMutex_, std::adopt_lock);
  if (ended_) return;
  if (!hasSent_ && queue_.empty()) (void)sendFrame({.kind = wire::Kind::kBeat}, {});
  hasSent_ = false;
}

void SocketConnection::askForLanes() {
  Lock lock(sendMutex_);
  (void)sendFrame({.kind = wire::Kind::kLanes}, {});
}

bool SocketConnection::retire() {
  Lock lock(sendMutex_);
  if (ended_ || fenced_ || retired_ || !queue_.empty() || !transfers_.isEmpty()) return false;
  retired_ = true;
  return sendFrame({.kind = wire::Kind::kRetire}, {}).ok();
}

bool SocketConnection::endIfIdle() {
  {
    Lock lock(sendMutex_);
    retired_ = true;
    if (!ended_ && (!queue_.empty() || !transfers_.isEmpty())) return false;
  }
  close(Error{ErrorCode::kAborted, "the connection was idle"});
  return true;
}

// From the return of this on nothing is received.
void SocketConnection::stopReceiving() {
  loop_.remove(socket_.get());  // waits for the handler, which takes our locks
  Lock lock(receiveMutex_);
  stopped_ = true;
}

// When this returns, no byte from the peer is written any more.
void SocketConnection::closeSocket(ErrorCode forTransfers) {
  stopReceiving();
  awaitCopies();
  Lock receiving(receiveMutex_);
  transfers_.cancelAll(forTransfers);
  receiver_.freeCopies();
  Lock sending(sendMutex_);
  queue_.copies().free();
  if (ended_->code == ErrorCode::kAborted) linger(loop_, std::move(socket_));
  socket_.reset();
}

void SocketConnection::close(const Error& why) {
  uint64_t life = 0;
  {
    Lock lock(sendMutex_);
    if (std::exchange(ending_, true)) {
      // When the end is complete, the loop may be gone. Before that, the loop's thread must not
      // wait: either onClosed called us, or another close() waits for that thread.
      if (isOver_ || (loop_.onLoopThread() && !endsAfterCopies_)) return;
      if (!loop_.onLoopThread())
        return over_.wait(sendMutex_, [this, ours = life_]() REQUIRES(sendMutex_) {
          return isOver_ || life_ != ours;
        });
      endsAfterCopies_.reset();  // ends here instead
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
void SocketConnection::endByItself(Status cause) {
  {
    Lock lock(sendMutex_);
    // close() came first; the peer may only be answering our goodbye
    if (std::exchange(ending_, true)) return;
    if (sendError_ && cause.code() == ErrorCode::kPeerLost) cause = *sendError_;
    ended_ = cause.ok() ? Error{ErrorCode::kPeerLost, "the peer said goodbye"} : cause.error();
    queue_.clear();
  }
  stopReceiving();
  if (!copies()) return endNow(cause);
  Lock lock(sendMutex_);
  endsAfterCopies_ = std::move(cause);
  lookSoon();
}

// On the loop's thread, without locks.
void SocketConnection::endNow(const Status& cause) {
  uint64_t life = 0;
  {
    Lock lock(sendMutex_);
    life = life_;
  }
  closeSocket(ErrorCode::kPeerLost);
  // Another thread may reconnect it before this returns.
  if (events_.onClosed) events_.onClosed(cause);
  finish(life);
}

void SocketConnection::finish(uint64_t life) {
  Lock lock(sendMutex_);
  if (life_ == life) isOver_ = true;
  over_.notify_all();
}

std::shared_ptr<StreamConnection> StreamConnection::start(Fd socket, EventLoop& loop,
                                                          RegionTable& regions, Events events) {
  auto connection =
      std::make_shared<SocketConnection>(std::move(socket), loop, regions, std::move(events));
  connection->begin();
  return connection;
}

}  // namespace mooncake
