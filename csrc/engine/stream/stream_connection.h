#pragma once

#include <functional>
#include <memory>

#include "base/event_loop.h"
#include "engine/transports/transport.h"

namespace mooncake {

// Puts and gets over one connected, authenticated stream socket (TCP or unix). Frames in wire.h.
//
// Sending: the calling thread writes straight to the socket (scatter-gather, no copy of ours) and
// only what does not fit is queued for the loop: a put's rest is copied, a get's answer points into
// the registered region, which is opened anew for each write. Receiving: on the loop's thread,
// straight into the target.
//
// The owner calls close() at the end; until then the event loop keeps the connection alive. close()
// waits for onClosed when that runs at the time: do not hold a lock that onClosed takes.
class StreamConnection : public std::enable_shared_from_this<StreamConnection> {
 public:
  struct Events {
    std::function<void(ByteView message)> onMessage;
    std::function<void(const Status& how)> onClosed;
    std::function<void()> onLanesWanted;  // by the peer; may be none
  };
  // On the loop's thread, all without a lock. `onClosed` runs when the connection ended by itself:
  // ok after the peer's goodbye, else the cause. It does not run after close().
  static std::shared_ptr<StreamConnection> start(Fd socket, EventLoop& loop, RegionTable& regions,
                                                 Events events);
  virtual ~StreamConnection() = default;

  virtual Status put(const PutRequest& request) = 0;
  virtual Status get(const GetRequest& request) = 0;
  virtual Status send(ByteView message) = 0;
  virtual void cancelGets(const Completion* completion) = 0;
  // No transfer starts or goes on: gets under way end with `why`, and what is asked later gets it
  // as its error. When this returns, the peer writes nothing here any more.
  virtual void close(const Error& why) = 0;
  // See Channel.
  virtual void fence() = 0;
  virtual uint64_t lifeSigns() const = 0;
  virtual void beat() = 0;
  // Of the peer, if it made this one: more connections.
  virtual void askForLanes() = 0;
  // In peace: says goodbye, unless a frame is only half sent.
  void close() { close(Error{ErrorCode::kAborted, "the connection was closed"}); }
  // Goes on over another socket to the same peer, once it has ended or was closed. What had not
  // arrived is lost, what is fenced stays fenced. On the loop's thread, and not while another
  // thread closes it.
  virtual void reconnect(Fd socket) = 0;
  virtual size_t unansweredBytes()
      const = 0;  // of gets under way: the least loaded lane takes the next one
};

}  // namespace mooncake
