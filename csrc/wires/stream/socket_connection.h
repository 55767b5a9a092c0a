#pragma once

#include <optional>
#include <vector>

#include "base/mutex.h"
#include "wires/stream/copy_watch.h"
#include "wires/stream/frame_receiver.h"
#include "wires/stream/send_queue.h"
#include "wires/stream/socket_watch.h"
#include "wires/stream/stream_connection.h"
#include "wires/stream/transfer_table.h"
#include "wires/stream/withdrawn_transfers.h"

namespace mooncake {

// Locks, always taken in this order: receiveMutex_, sendMutex_, the TransferTable's own. No
// callback of the owner runs under one of them.
class SocketConnection final : public StreamConnection {
 public:
  SocketConnection(Fd socket, EventLoop& loop, RegionTable& regions, Events events)
      : loop_(loop),
        socket_(std::move(socket)),
        regions_(regions),
        queue_(regions, transfers_),
        watch_(loop),
        events_(std::move(events)),
        receiver_(regions, transfers_, receiving()),
        copyWatch_(loop, [this] { return look(); }) {}
  ~SocketConnection() override { transfers_.cancelAll(ErrorCode::kAborted); }

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
  // Not checked: the count is an atomic.
  uint64_t lifeSigns() const override NOT_CHECKED { return receiver_.receivedBytes(); }
  void beat() override;
  void askForLanes() override;
  bool retire() override;
  bool endIfIdle() override;
  size_t unansweredBytes() const override { return transfers_.unansweredBytes(); }

 private:
  // Most bytes of its first turn after its queue was empty; doubled in each further turn. Written
  // bytes go into queues below us, where no frame overtakes them. If two ranks fetch from each other,
  // one asks a moment later than the other. Its request would wait behind 1 MiB of its own answer,
  // 8 ms at 1 Gbit/s.
  static constexpr size_t kBytesInFirstTurn = size_t(64) << 10;

  void listen() REQUIRES(sendMutex_);
  void onEvents() EXCLUDES(receiveMutex_);
  FrameReceiver::Events receiving();
  void answer(uint64_t request, wire::AnswerStatus how) REQUIRES(sendMutex_);
  void sendPulled(uint64_t request) EXCLUDES(sendMutex_);
  Status usable() const REQUIRES(sendMutex_);
  template <typename Request, typename Begin>
  Status beginAll(std::span<const Request> requests, Begin&& begin) REQUIRES(sendMutex_);
  void flush() REQUIRES(sendMutex_);
  void sendWaiting() EXCLUDES(sendMutex_);
  void awaitMore() REQUIRES(sendMutex_);
  void lookSoon() { copyWatch_.lookSoon(shared_from_this()); }
  uint64_t look() EXCLUDES(receiveMutex_);
  template <typename... Which>
  bool copies(Which... which) EXCLUDES(receiveMutex_);
  template <typename... Which>
  void awaitCopies(Which... which);
  void sendFailed(const Error& error) REQUIRES(sendMutex_);
  template <typename Send>
  Status sendFrame(Send&& send) REQUIRES(sendMutex_);
  Status sendFrame(const wire::Header& header, ByteView payload) REQUIRES(sendMutex_);
  void endByItself(Status cause) EXCLUDES(sendMutex_);
  void endNow(const Status& cause) EXCLUDES(sendMutex_);
  void stopReceiving() EXCLUDES(receiveMutex_);
  void closeSocket(ErrorCode forTransfers) EXCLUDES(receiveMutex_);
  void finish(uint64_t life) EXCLUDES(sendMutex_);

  EventLoop& loop_;

  Mutex sendMutex_;
  Fd socket_;  // written and closed under sendMutex_
  RegionTable& regions_;
  TransferTable transfers_;
  SendQueue queue_ GUARDED_BY(sendMutex_);
  SocketWatch watch_ GUARDED_BY(sendMutex_);
  // The first one; the loop reports it when it has read the rest.
  std::optional<Error> sendError_ GUARDED_BY(sendMutex_);
  std::optional<Error> ended_ GUARDED_BY(sendMutex_);  // why nothing can be sent any more
  bool fenced_ GUARDED_BY(sendMutex_) = false;
  bool retired_ GUARDED_BY(sendMutex_) = false;
  bool hasSent_ GUARDED_BY(sendMutex_) = false;  // since the last beat()
  // Set by the first thread that ends the connection. Only that thread takes the socket out of the
  // loop and closes it: later its number may belong to another connection.
  bool ending_ GUARDED_BY(sendMutex_) = false;
  bool isOver_ GUARDED_BY(sendMutex_) = false;  // the end is complete, onClosed included
  // Set when the connection ended by itself while copies of devices were under way: the cause. The
  // loop ends it after them.
  std::optional<Status> endsAfterCopies_ GUARDED_BY(sendMutex_);
  uint64_t life_ GUARDED_BY(sendMutex_) = 1;  // number of the current socket
  Condition over_;

  const Events events_;
  size_t mostInTurn_ = kBytesInFirstTurn;  // of sendWaiting(), on the loop's thread only

  Mutex receiveMutex_;  // also held while targets are written
  FrameReceiver receiver_ GUARDED_BY(receiveMutex_);
  std::vector<PullRequest> pulls_ GUARDED_BY(receiveMutex_);  // that have just arrived
  bool stopped_ GUARDED_BY(receiveMutex_) = false;
  // By copies to a device, so that the peer's bytes wait in the socket.
  bool isBlocked_ GUARDED_BY(receiveMutex_) = false;

  // Each thread's, until it has ended them.
  WithdrawnTransfers withdrawn_;
  CopyWatch copyWatch_;
};

}  // namespace mooncake
