#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/stream/copy_watch.h"
#include "engine/stream/frame_receiver.h"
#include "engine/stream/send_queue.h"
#include "engine/stream/socket_watch.h"
#include "engine/stream/stream_connection.h"
#include "engine/stream/transfer_table.h"
#include "engine/stream/withdrawn_transfers.h"

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
  uint64_t lifeSigns() const override { return receiver_.receivedBytes(); }
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
  void awaitMore();
  void lookSoon() { copyWatch_.lookSoon(shared_from_this()); }
  uint64_t look();
  template <typename... Which>
  bool copies(Which... which);
  template <typename... Which>
  void awaitCopies(Which... which);
  void sendFailed(const Error& error);
  template <typename Send>
  Status sendFrame(Send&& send);
  Status sendFrame(const wire::Header& header, ByteView payload);
  void endByItself(Status cause);
  void endNow(const Status& cause);
  void stopReceiving();
  void closeSocket(ErrorCode forTransfers);
  void finish(uint64_t life);

  EventLoop& loop_;

  std::mutex sendMutex_;  // guards socket_ (writing, closing) down to isOver_
  Fd socket_;
  RegionTable& regions_;
  TransferTable transfers_;
  SendQueue queue_;
  SocketWatch watch_;
  std::optional<Error> sendError_;  // the first one; the loop reports it when it has read the rest
  std::optional<Error> ended_;      // why nothing can be sent any more
  bool fenced_ = false;
  bool retired_ = false;
  bool hasSent_ = false;  // since the last beat()
  // Set by the first thread that ends the connection. Only that thread takes the socket out of the
  // loop and closes it: later its number may belong to another connection.
  bool ending_ = false;
  bool isOver_ = false;  // the end is complete, onClosed included
  // Set when the connection ended by itself while copies of devices were under way: the cause. The
  // loop ends it after them.
  std::optional<Status> endsAfterCopies_;
  uint64_t life_ = 1;  // number of the current socket
  std::condition_variable over_;

  const Events events_;
  size_t mostInTurn_ = kBytesInFirstTurn;  // of sendWaiting(), on the loop's thread only

  std::mutex receiveMutex_;  // guards the fields below; held while targets are written
  FrameReceiver receiver_;
  std::vector<PullRequest> pulls_;  // that have just arrived
  bool stopped_ = false;
  bool isBlocked_ = false;  // by copies to a device, so that the peer's bytes wait in the socket

  WithdrawnTransfers withdrawn_;  // each thread's, until it has ended them
  CopyWatch copyWatch_;
};

}  // namespace mooncake
