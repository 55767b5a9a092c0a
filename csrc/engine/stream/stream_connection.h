#pragma once

#include <functional>
#include <memory>

#include "base/event_loop.h"
#include "engine/transports/transport.h"

namespace mooncake {

struct PullRequest {
  uint64_t number = 0;
  uint64_t key = 0;  // of the range here
  uint64_t offset = 0;
  uint64_t length = 0;
  RemoteRegion source;  // all of it
};

// Puts, gets and writes over one connected, authenticated stream socket (TCP or unix). Frames in
// wire.h.
//
// Sending: the calling thread writes straight to the socket (scatter-gather, no copy of ours) and
// only what does not fit is queued for the loop: a put's rest is copied, a get's answer points into
// the registered region, which is opened anew for each system call, a write into its source.
// Receiving: on the loop's thread, straight into the target.
//
// The owner calls close() at the end; until then the event loop keeps the connection alive. close()
// waits for onClosed when that runs at the time: do not hold a lock that onClosed takes.
class StreamConnection : public std::enable_shared_from_this<StreamConnection> {
 public:
  struct Events {
    std::function<void(ByteView message)> onMessage;
    std::function<void(const Status& how)> onClosed;
    std::function<void()> onLanesWanted;  // by the peer; may be none
    // The peer would have us fill a range of ours from its memory; answerPull() tells it how that
    // went. None: this wire has no pulls.
    std::function<void(const PullRequest& request)> onPull;
    std::function<void()> onRetired;  // by the peer: see retire(); may be none
  };
  // On the loop's thread, all without a lock. `onClosed` runs when the connection ended by itself:
  // ok after the peer's goodbye, else the cause. It does not run after close().
  static std::shared_ptr<StreamConnection> start(Fd socket, EventLoop& loop, RegionTable& regions,
                                                 Events events);
  virtual ~StreamConnection() = default;

  virtual Status put(const PutRequest& request) = 0;
  virtual Status get(std::span<const GetRequest> requests) = 0;
  virtual Status write(std::span<const WriteRequest> requests) = 0;
  Status get(const GetRequest& request) { return get({&request, 1}); }
  Status write(const WriteRequest& request) { return write({&request, 1}); }
  // A write that the peer makes by itself; where it cannot, the bytes are sent. The source may be
  // read as long as the write is under way.
  virtual Status askToPull(const WriteRequest& request) = 0;
  virtual void answerPull(uint64_t number, ErrorCode how) = 0;
  virtual Status send(ByteView message) = 0;
  virtual void cancel(const Completion* completion) = 0;
  // No transfer starts or goes on: transfers under way end with `why`, and what is asked later gets
  // it as its error. When this returns, the peer writes nothing here any more.
  virtual void close(const Error& why) = 0;
  // See Channel.
  virtual void fence() = 0;
  virtual uint64_t lifeSigns() const = 0;
  virtual void beat() = 0;
  // Of the peer, if it made this one: more connections.
  virtual void askForLanes() = 0;
  // For a connection that may go because others stand: unless something is under way on it, nothing
  // begins any more (kInterrupted) and the peer is asked for its goodbye. False: something is.
  virtual bool retire() = 0;
  // The answer to that: nothing begins any more, and when nothing of ours is under way it is closed
  // in peace. False: something still is.
  virtual bool endIfIdle() = 0;
  // In peace: says goodbye, unless a frame is only half sent.
  void close() { close(Error{ErrorCode::kAborted, "the connection was closed"}); }
  // Goes on over another socket to the same peer, once it has ended or was closed. What had not
  // arrived is lost, what is fenced stays fenced. On the loop's thread, and not while another
  // thread closes it.
  virtual void reconnect(Fd socket) = 0;
  // Of gets and writes under way: the least loaded lane takes the next one.
  virtual size_t unansweredBytes() const = 0;
};

}  // namespace mooncake
