#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

#include "engine/stream/handshake.h"
#include "engine/stream/stream_connection.h"

namespace mooncake {

// One to several connections to one peer, called lanes, each with its own share of the network's
// bandwidth and of the kernel's buffers. Lane 0 is there from the first on and is all that a
// channel needs: it carries puts and messages. The data lanes are made when something large is
// fetched or written for the first time, so that peers that exchange little cost one descriptor
// each. As soon as they stand they carry the gets and writes, their requests and their answers, and
// no signal stands behind somebody's answer any more. Nothing waits for them, and one that cannot
// be made costs nothing but speed.
//
// Data lanes that carry nothing for a while are retired by the end that made them, where the engine
// asks for that (restConnections()). Whoever began a transfer on one in that very moment finds it
// refused, and takes lane 0.
//
// A lane that stood and breaks takes the others with it: whatever broke it, half a channel is of no
// use, and the other end may not have noticed. The channel goes on with a new lane 0.
class TcpChannel final : public Channel, public std::enable_shared_from_this<TcpChannel> {
 public:
  // A transfer of at least two such pieces is spread over the data lanes.
  static constexpr size_t kSplitBytes = size_t(1) << 20;
  // So much that has yet to come makes data lanes worth it.
  static constexpr size_t kLargeBytes = size_t(64) << 10;

  // Calls the peer for the data lanes that are missing. Any thread; does not wait.
  using MakeLanes = std::function<void(const std::shared_ptr<TcpChannel>&)>;
  struct Options {
    EngineId peer;
    uint16_t lanes = 1;    // at most
    uint64_t attempt = 0;  // which of the connector's attempts lane 0 comes from; they grow
    MakeLanes makeLanes;   // none: the peer called, and is asked for them
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
  void close() override;

  // All on the loop's thread.
  //
  // Goes on over this connection, of a later attempt, whether or not we have seen the end of the
  // ones before. Nothing that came over those is dealt with any more. False: it is closed for good,
  // or there was a later one.
  bool reconnect(Fd firstLane, uint64_t attempt);
  // A data lane, made for the attempt that lane 0 comes from. False: it is not wanted any more.
  bool addLane(uint16_t lane, Fd socket, uint64_t attempt);
  // The connector makes each at most once at a time, or the two ends could keep different ones.
  bool beginLane(uint16_t lane);
  void endLane(uint16_t lane, bool isMade);

  bool isClosed() const;
  uint64_t attempt() const;
  uint16_t lanes() const { return static_cast<uint16_t>(lanes_.size()); }

 private:
  static constexpr size_t kPutLane = 0;
  struct Lane {
    std::shared_ptr<StreamConnection> connection;  // made once, under the lock
    std::atomic<StreamConnection*> made{nullptr};  // the same for those who do not hold it
    std::atomic<bool> stands{false};
    std::atomic<uint64_t> life{0};  // which of its connections it is
    // Of the loop's thread.
    bool isBeingMade = false;
    bool isRetiring = false;  // until the peer's goodbye
    uint64_t restedAt = 0;    // its signs of life when restConnections() looked last
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
  void startLane(size_t lane, Fd socket);
  StreamConnection::Events eventsOf(size_t lane);
  void wantLanes();
  void waitLonger();
  void laneEnded(size_t lane, uint64_t life, const Status& how);
  void laneRetired(size_t lane, uint64_t life);
  template <typename Request>
  Status beginOn(StreamConnection& lane, std::span<const Request> some);

  const TransportContext& context_;
  const Options options_;
  mutable std::mutex mutex_;  // guards what follows, and who makes connections
  bool ended_ = false;        // until reconnect()
  bool closed_ = false;       // for good
  bool fenced_ = false;
  uint64_t attempt_ = 0;
  Clock::time_point stoodAt_;  // the last data lane that was made

  std::atomic<Clock::rep> nextWish_{0};  // for data lanes
  std::atomic<Clock::rep> pause_;        // until the one after that; grows with every failure
  std::vector<Lane> lanes_;
};

}  // namespace mooncake
