#pragma once

#include <mutex>
#include <vector>

#include "engine/stream/stream_connection.h"

namespace mooncake {

// Several connections to one peer, each with its own share of the network's bandwidth and of the
// kernel's buffers. Lane 0 carries the puts and nothing large, so a signal never stands behind
// somebody's answer; the other lanes carry gets, their requests and their answers. A single lane
// does both.
class TcpChannel final : public Channel, public std::enable_shared_from_this<TcpChannel> {
 public:
  // A get of at least two such pieces is spread over the data lanes.
  static constexpr size_t kSplitBytes = size_t(1) << 20;

  // `attempt`: which of the connector's attempts the lanes come from. They grow.
  static std::shared_ptr<TcpChannel> start(const TransportContext& context, const EngineId& peer,
                                           std::vector<Fd> lanes, uint64_t attempt);
  ~TcpChannel() override { close(); }

  const char* transportName() const override { return "tcp"; }
  std::span<std::byte> peerArena() const override { return {}; }
  Status put(const PutRequest& request) override { return lanes_[kPutLane]->put(request); }
  Status get(const GetRequest& request) override;
  Status send(ByteView message) override { return lanes_[kPutLane]->send(message); }
  void cancelGets(const Completion* completion) override;
  uint64_t lifeSigns() const override;
  void beat() override { lanes_[kPutLane]->beat(); }
  void fence() override;
  void close() override;

  // Goes on over these connections, of a later attempt, whether or not we have seen the end of the
  // ones before. Nothing that came over those is dealt with any more. False: it is closed for good,
  // or they do not fit. On the loop's thread.
  bool renew(std::vector<Fd> lanes, uint64_t attempt);
  bool isClosed() const;

 private:
  TcpChannel(const TransportContext& context, const EngineId& peer)
      : context_(context), peer_(peer) {}
  size_t firstDataLane() const { return lanes_.size() > 1 ? 1 : 0; }
  static constexpr size_t kPutLane = 0;
  void laneEnded(size_t lane, const Status& how);

  const TransportContext& context_;
  const EngineId peer_;
  // Guards what follows, but lanes_ only until start() is through.
  mutable std::mutex mutex_;
  bool ended_ = false;   // until renew()
  bool closed_ = false;  // for good
  uint64_t attempt_ = 0;
  std::vector<std::shared_ptr<StreamConnection>> lanes_;
};

}  // namespace mooncake
