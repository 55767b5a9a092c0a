#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <vector>

#include "base/mutex.h"
#include "wires/stream/handshake.h"
#include "wires/stream/stream_connection.h"

namespace mooncake {

// One to several connections to one peer, called lanes. Each has its own share of the network's
// bandwidth and of the kernel's buffers. Lane 0 exists from the start, and is all that a channel
// needs: it carries puts and messages. Data lanes are made when a large get or write begins for the
// first time, so peers that exchange little cost one descriptor each. Once they stand, they carry
// the gets and writes, with requests and answers. Then no signal waits behind an answer any more.
// Nothing waits for data lanes; a data lane that cannot be made costs only speed.
//
// The end that made the data lanes retires lanes that carry nothing for a while, if the engine asks
// for that (restConnections()). A transfer that begins on such a lane at that moment is refused,
// and uses lane 0.
//
// If a lane that stood breaks, the other lanes are closed too: half a channel is of no use, and the
// other end may not have noticed the break. The channel goes on with a new lane 0.
class TcpChannel final : public Channel, public std::enable_shared_from_this<TcpChannel> {
 public:
  // A transfer of at least two pieces of this size is spread over the data lanes.
  static constexpr size_t kSplitBytes = size_t(1) << 20;
  // Data lanes are worthwhile from this number of unanswered bytes on.
  static constexpr size_t kLargeBytes = size_t(64) << 10;

  // Calls the peer for the missing data lanes. Any thread; does not wait.
  using MakeLanes = std::function<void(const std::shared_ptr<TcpChannel>&)>;
  struct Options {
    EngineId peer;
    uint16_t lanes = 1;    // at most
    uint64_t attempt = 0;  // the connector's attempt that lane 0 comes from; it grows
    MakeLanes makeLanes;   // null: the peer called us, and is asked for lanes
  };
  static std::shared_ptr<TcpChannel> start(const TransportContext& context, Fd firstLane,
                                           Options options);
  ~TcpChannel() override { close(); }

  const char* transportName() const override { return "tcp"; }
  std::span<std::byte> peerArena() const override { return {}; }
  bool isMadeAgain() const override { return true; }
  Status put(const PutRequest& request) override { return first().put(request); }
  Status get(const GetRequest& request) override { return transfer(request); }
  Status write(const WriteRequest& request) override { return transfer(request); }
  Status get(std::span<const GetRequest> requests) override { return transferAll(requests); }
  Status write(std::span<const WriteRequest> requests) override { return transferAll(requests); }
  Status send(ByteView message) override { return first().send(message); }
  void cancel(const Completion* completion) override;
  uint64_t lifeSigns() const override;
  void beat() override { first().beat(); }
  size_t restConnections() override;
  size_t connections() const override;
  void fence() override;
  void close() override { end({ErrorCode::kAborted, "the connection was closed"}); }
  void abandon() override { end({ErrorCode::kPeerLost, "the peer counts as lost"}); }

  // All on the loop's thread.
  //
  // Goes on over this connection of a later attempt, whether or not we have seen the earlier ones
  // end. Data of the earlier ones is dropped from now on. False: the channel is closed for good, or
  // has a later attempt.
  bool reconnect(Fd firstLane, uint64_t attempt);
  // Adds a data lane of the attempt that lane 0 comes from. False: it is not wanted any more.
  bool addLane(uint16_t lane, Fd socket, uint64_t attempt);
  // The connector makes each lane once at a time. Otherwise the two ends could keep different ones.
  bool beginLane(uint16_t lane);
  void endLane(uint16_t lane, bool isMade);

  bool isClosed() const;
  uint64_t attempt() const;
  uint16_t lanes() const { return static_cast<uint16_t>(lanes_.size()); }

 private:
  static constexpr size_t kPutLane = 0;
  struct Lane {
    std::shared_ptr<StreamConnection> connection;  // created once, under the lock
    std::atomic<StreamConnection*> made{nullptr};  // the same, for threads without the lock
    std::atomic<bool> stands{false};
    std::atomic<uint64_t> life{0};  // number of its current connection
    // Used on the loop's thread only.
    bool isBeingMade = false;
    bool isRetiring = false;  // until the peer's goodbye
    uint64_t restedAt = 0;    // its lifeSigns() at the last restConnections()
  };

  TcpChannel(const TransportContext& context, Options options)
      : context_(context), options_(std::move(options)), lanes_(options_.lanes) {}
  StreamConnection& first() const { return *lanes_[kPutLane].connection; }
  using DataLanes = std::array<StreamConnection*, kMaxLanes>;
  size_t dataLanes(DataLanes& lanes, size_t bytes);
  template <typename Request>
  Status transfer(const Request& request);
  template <typename Request>
  Status transferAll(std::span<const Request> requests);
  void startLane(size_t lane, Fd socket) REQUIRES(mutex_);
  StreamConnection::Events eventsOf(size_t lane);
  void end(const Error& why) EXCLUDES(mutex_);
  void wantLanes();
  void waitLonger();
  void laneEnded(size_t lane, uint64_t life, const Status& how) EXCLUDES(mutex_);
  void laneRetired(size_t lane, uint64_t life) EXCLUDES(mutex_);
  template <typename Request>
  Status beginOn(StreamConnection& lane, std::span<const Request> some);

  const TransportContext& context_;
  const Options options_;
  mutable Mutex mutex_;                     // also held while connections are made
  bool ended_ GUARDED_BY(mutex_) = false;   // until reconnect()
  bool closed_ GUARDED_BY(mutex_) = false;  // for good
  bool fenced_ GUARDED_BY(mutex_) = false;
  uint64_t attempt_ GUARDED_BY(mutex_) = 0;
  Clock::time_point stoodAt_ GUARDED_BY(mutex_);  // when the last data lane was made

  std::atomic<Clock::rep> nextWish_{0};  // earliest time to ask for data lanes
  std::atomic<Clock::rep> pause_;        // between two such times; grows with every failure
  std::vector<Lane> lanes_;
};

}  // namespace mooncake
