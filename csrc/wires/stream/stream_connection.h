#pragma once

#include <functional>
#include <memory>

#include "base/event_loop.h"
#include "engine/contract/transport.h"

namespace mooncake {

struct PullRequest {
  uint64_t number = 0;
  uint64_t key = 0;  // of the range here
  uint64_t offset = 0;
  uint64_t length = 0;
  RemoteRegion source;  // the whole source
};

// Puts, gets and writes over one connected, authenticated stream socket (TCP or unix). Frames in
// wire.h.
//
// Sending: the calling thread writes straight to the socket (scatter-gather, without a copy). Only
// the part that does not fit is queued for the loop: a put's rest is copied. A get's answer points
// into the registered region, which is opened for each system call. A write points into its source.
// Receiving: on the loop's thread, straight into the target.
//
// The owner must call close(); until then the event loop keeps the connection alive. close() waits
// for a running onClosed: do not hold a lock that onClosed takes.
class StreamConnection : public std::enable_shared_from_this<StreamConnection> {
 public:
  struct Events {
    std::function<void(ByteView message)> onMessage;
    std::function<void(const Status& how)> onClosed;
    std::function<void()> onLanesWanted;  // wanted by the peer; may be null
    // The peer asks us to fill a range here from its memory; answerPull() reports the result. Null:
    // this wire has no pulls.
    std::function<void(const PullRequest& request)> onPull;
    std::function<void()> onRetired;  // retired by the peer: see retire(); may be null
  };
  // The events run on the loop's thread, without a lock. `onClosed` runs when the connection ended
  // by itself, with ok after the peer's goodbye, else with the cause. It does not run after
  // close().
  static std::shared_ptr<StreamConnection> start(Fd socket, EventLoop& loop, RegionTable& regions,
                                                 Events events);
  virtual ~StreamConnection() = default;

  virtual Status put(const PutRequest& request) = 0;
  virtual Status get(std::span<const GetRequest> requests) = 0;
  virtual Status write(std::span<const WriteRequest> requests) = 0;
  Status get(const GetRequest& request) { return get({&request, 1}); }
  Status write(const WriteRequest& request) { return write({&request, 1}); }
  // Asks the peer to make a write by itself (a pull). If it cannot, the bytes are sent. The source
  // may be read while the write is under way.
  virtual Status askToPull(const WriteRequest& request) = 0;
  virtual void answerPull(uint64_t number, ErrorCode how) = 0;
  virtual Status send(ByteView message) = 0;
  virtual void cancel(const Completion* completion) = 0;
  // Stops all transfers: transfers under way end with `why`, and later requests fail with it. When
  // this returns, no write of the peer lands here any more.
  virtual void close(const Error& why) = 0;
  // See Channel.
  virtual void fence() = 0;
  virtual uint64_t lifeSigns() const = 0;
  virtual void beat() = 0;
  // Asks the peer for more connections, if the peer made this one.
  virtual void askForLanes() = 0;
  // Retires a connection that is not needed any more. If nothing is under way on it, nothing begins
  // any more (kInterrupted) and the peer is asked for its goodbye. False: a transfer is under way.
  virtual bool retire() = 0;
  // The answer to retire(): nothing begins any more. If nothing of ours is under way, the
  // connection is closed in peace. False: a transfer is still under way.
  virtual bool endIfIdle() = 0;
  // Closes in peace: says goodbye, unless a frame is only half sent.
  void close() { close(Error{ErrorCode::kAborted, "the connection was closed"}); }
  // Goes on over another socket to the same peer, after it has ended or was closed. Data that had
  // not arrived is lost; a fence stays. On the loop's thread, and not while another thread closes
  // it.
  virtual void reconnect(Fd socket) = 0;
  // Number of unanswered bytes of gets and writes. The lane with the fewest takes the next one.
  virtual size_t unansweredBytes() const = 0;
};

}  // namespace mooncake
