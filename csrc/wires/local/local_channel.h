#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "base/mutex.h"
#include "engine/contract/transport.h"
#include "engine/memory/fence_words.h"
#include "engine/memory/gate.h"
#include "wires/local/device_reader.h"
#include "wires/local/direct_reader.h"
#include "wires/local/direct_transfers.h"
#include "wires/stream/stream_connection.h"

namespace mooncake {

// A channel to an engine whose arena is mapped here. A put copies into the mapping. A get copies
// out of it, else reads directly, else asks over the socket. If the engine has data threads, a
// second thread helps with large gets. A write copies into the mapping. A write to other memory is
// pulled by the peer, on a thread of its own, or is sent: only the owner of a program's memory
// writes into it. Between devices, a device copies out of a mapping, where that was asked for; else
// the ends of the socket copy. The socket also carries the goodbye and shows a death. The mapping outlives the
// peer: data that it published stays readable until the channel is destroyed.
//
// Law 5: this side checks the peer's mirror and fence word before it touches the peer's memory, and
// again after a read. A put that races with the end of a region may still write, but only inside
// the arena.
class LocalChannel final : public Channel, public std::enable_shared_from_this<LocalChannel> {
 public:
  struct Mapped {
    std::shared_ptr<ArenaMapping> arena;
    uint64_t address = 0;                    // of the arena in the peer's process
    uint64_t mirror = 0;                     // offset of its RegionMirror
    uint64_t life = 0;                       // offset of its LifeWord
    uint64_t fence = 0;                      // offset of our word among the peer's FenceWords
    std::shared_ptr<FenceWords::Word> ours;  // the peer's word among our FenceWords
    pid_t process = 0;                       // 0: not visible from our pid namespace
    std::unique_ptr<DirectReader> reader;    // null: this peer cannot be read directly
    std::shared_ptr<DeviceReader> devices;   // null: its devices' memory is not mapped here
    std::function<bool(std::function<void()>)> copyLater;  // on another thread; false: shut down
    bool sharesCopies = false;                             // shares large copies with that thread
  };

  static std::shared_ptr<LocalChannel> start(const char* transportName, Mapped peer, Fd socket,
                                             const EngineId& id, const TransportContext& context);
  LocalChannel(const char* transportName, Mapped peer, const TransportContext& context);
  ~LocalChannel() override;

  const char* transportName() const override { return transportName_; }
  std::span<std::byte> peerArena() const override {
    return {peer_.arena->base(), peer_.arena->capacity()};
  }
  std::shared_ptr<const void> sharedPeerArena() const override { return peer_.arena; }
  PeerLife peerLife() const override;
  const std::atomic<uint32_t>* fenceWord() const override;
  void peerExited(const Error& why) override;
  bool mapsDevices() const override { return peer_.devices != nullptr; }
  Status put(const PutRequest& request) override;
  using Channel::write;
  Status get(const GetRequest& request) override;
  Status get(std::span<const GetRequest> requests) override;
  Status write(const WriteRequest& request) override;
  Status send(ByteView message) override;
  void cancel(const Completion* completion) override;
  void fence() override;
  bool hasLateWrites() const override { return peer_.ours->hasLateWrites(); }
  void close() override;

 private:
  Evidence onEnded(const Status& how);
  ErrorCode permission(uint64_t key, uint32_t right) const;
  bool isOfDevice(const RemoteRegion& region) const;
  const RegionMirror& mirror() const;
  Doorbell& bellOf(const RemoteRegion& region, std::byte* start) const;
  std::byte* mapped(const RemoteRegion& region) const;
  ErrorCode readHere(const GetRequest& request, const DirectTransfers::Running& running);
  ErrorCode mayReadHere(const GetRequest& request) const;
  Status getShared(std::span<const GetRequest> requests);
  Status end(const GetRequest& request, ErrorCode code);
  Status getFromDevice(const GetRequest& request);
  Status getLater(const GetRequest& request);
  ErrorCode writeHere(const WriteRequest& request, std::byte* region,
                      const DirectTransfers::Running& running);
  ErrorCode writePieces(const WriteRequest& request, std::byte* region,
                        const DirectTransfers::Running& running);
  ErrorCode readPiece(const RemoteRegion& region, uint64_t offset, std::span<std::byte> target,
                      bool isOfProgram);
  void refusePulls();
  void onPull(const PullRequest& pull);
  void pull(const PullRequest& pull, uint64_t done);
  ErrorCode pullPiece(const PullRequest& pull, uint64_t done, size_t bytes);
  bool pullFromDevice(const PullRequest& pull);
  void endPull(const PullRequest& pull, ErrorCode code);

  const char* transportName_;
  Mapped peer_;
  std::shared_ptr<StreamConnection> stream_;
  Gate puts_;
  DirectTransfers transfers_;
  const TransportContext& context_;
  SharedMutex pullMutex_;  // shared while a piece is pulled
  std::atomic<bool> refusesPulls_{false};
  std::atomic<size_t> pulls_{0};  // the peer's pulls under way
  std::atomic<bool> closing_{false};
  std::atomic<bool> ended_{false};
  Error why_;  // written before ended_
};

}  // namespace mooncake
