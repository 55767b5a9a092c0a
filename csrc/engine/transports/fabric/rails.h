#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine/nic/nic.h"
#include "engine/packets/packet.h"
#include "engine/transports/fabric/fair_queue.h"
#include "engine/transports/fabric/fair_shares.h"
#include "engine/transports/fabric/packet_pool.h"
#include "engine/transports/fabric/rail_operation.h"

namespace mooncake {

// Who takes the packets that are meant for one incarnation.
class PacketSink {
 public:
  virtual ~PacketSink() = default;
  // On a thread that polls, without a lock. The bytes are gone when it returns.
  virtual void onPacket(size_t rail, const Packet& packet, ByteView data) = 0;
  // About every millisecond from activate() on, on a thread that polls. False: nothing is due.
  virtual bool tick(Clock::time_point now) = 0;
  // The card has another address now, and knows nobody. On a thread that polls, without a lock.
  virtual void onRenewed(size_t rail) = 0;
};

// All cards of one engine, shared by all of its peers: who posts, who polls, whose a packet is. A
// card never has more under way than it says it takes: what is more waits, the channels in turn.
// Channels share the places of a card: FairShares.
class Rails {
 public:
  static constexpr size_t kMostPacketBytes = (size_t(64) << 10) - 1024;
  static constexpr auto kTick = std::chrono::milliseconds(1);

  struct Options {
    size_t threads = 1;  // that poll, at most one for each card; 0: as many as there are cards
    std::string name;    // for the log
    // A card anew, in place of one that was closed. None: it stays closed.
    std::function<Result<std::unique_ptr<Nic>>(size_t rail)> reopen = nullptr;
  };
  static Result<std::shared_ptr<Rails>> create(std::vector<std::unique_ptr<Nic>> nics,
                                               const Options& options);
  ~Rails() { stop(); }

  size_t count() const { return rails_.size(); }
  const std::string& name(size_t rail) const { return rails_[rail]->name; }
  const std::string& provider() const { return provider_; }
  const NicLimits& limits(size_t rail) const { return rails_[rail]->limits; }
  Bytes address(size_t rail) const;
  // Which of the cards that this rail has had is there; from 1 on.
  uint64_t generation(size_t rail) const {
    return rails_[rail]->generation.load(std::memory_order_acquire);
  }
  // Null: it is closed just now.
  std::shared_ptr<Nic> card(size_t rail, uint64_t& generation) const;
  PacketPool& pool() { return *pool_; }
  size_t packetBytes() const { return pool_->bufferBytes(); }

  // The peer's card in the address table of ours; once more for each release(). Any thread.
  Result<RailPeer> insert(size_t rail, ByteView address);
  void release(size_t rail, RailPeer peer);

  // Any thread, with or without a channel's lock.
  void submit(size_t rail, std::unique_ptr<RailOperation> operation);

  void add(uint64_t incarnation, std::weak_ptr<PacketSink> sink);
  void remove(uint64_t incarnation);
  // Has it ticked until it says that nothing is due.
  void activate(const std::shared_ptr<PacketSink>& sink);

  // Closes a card and opens it anew, at another address, unless that has happened since: no byte of
  // what it has under way moves any more, nor of what peers ask of it under keys that it gave.
  struct Retired {
    size_t rail = 0;
    uint64_t generation = 0;
  };
  void retire(Retired which);
  bool isPolledHere() const { return isPolling == this; }
  // And waits until they are closed; not on a thread that polls, where it only asks.
  void retireNow(std::span<const Retired> which);
  uint64_t retired() const { return retired_.load(std::memory_order_relaxed); }
  // On a thread that polls, when a card has come anew. Before any can be retired.
  void onRenewal(std::function<void(size_t rail)> then) { onRenewal_ = std::move(then); }

  // Packets that do not decode, or that nobody waits for.
  uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

  // Ends everything, and the threads. Not on one of them.
  void stop();

 private:
  struct Receive {
    std::byte* buffer = nullptr;
  };
  friend class RailShare;
  struct Rail {
    explicit Rail(const NicLimits& limits) : limits(limits), slots(limits.sendDepth) {}

    size_t index = 0;
    std::string name;
    const NicLimits limits;
    std::atomic<bool> mustRetire{false};
    std::atomic<uint64_t> generation{1};
    mutable std::mutex mutex;         // guards what follows
    std::shared_ptr<Nic> nic;         // another one only on the thread that polls
    bool isClosed = false;            // written there only, too
    std::condition_variable retired;  // its generation is over
    std::map<NicPeer, size_t> peers;  // how often each is in use
    FairShares slots;                 // operations that it has under way
    size_t underWay() const { return limits.sendDepth - slots.left(); }
    FairQueue<RailOperation> waiting;
    std::deque<std::unique_ptr<RailOperation>> failed;  // to begin
    // Of the thread that polls.
    std::vector<Receive> receives;
    std::vector<Receive*> unposted;
    // The card may still use their memory: they stay until it is closed. Those that
    // end with it are told then.
    std::vector<std::pair<std::unique_ptr<RailOperation>, NicCompletion>> abandoned;
    Clock::time_point reopenAt;
  };

  explicit Rails(Options options) : options_(std::move(options)) {}
  Status start(Rail& rail, RailOperation& operation);
  void give(Rail& rail, std::unique_ptr<RailOperation> operation, const Status& begun);
  bool beginWaiting(Rail& rail);
  void run(size_t first, size_t step);
  void sleepAtAll(size_t first, size_t step, Clock::time_point until);
  size_t serve(size_t index, std::span<NicCompletion> room);
  bool feed(size_t index);
  void post(Rail& rail);
  void onReceived(size_t index, const NicCompletion& completion);
  Clock::time_point tick(Clock::time_point now);
  // What becomes of a card that is retired: renewal.cc.
  void renewWhereDue(size_t index);
  void closeCard(size_t index);
  void endAll(size_t index);
  bool reopen(size_t index);
  void keep(Rail& rail, std::unique_ptr<RailOperation> operation, const NicCompletion& how);

  static thread_local const Rails* isPolling;  // whose thread this is

  const Options options_;
  std::string provider_;
  std::function<void(size_t rail)> onRenewal_;
  std::atomic<uint64_t> retired_{0};
  std::vector<std::unique_ptr<Rail>> rails_;
  std::unique_ptr<PacketPool> pool_;                    // of what leaves
  std::vector<std::unique_ptr<PacketPool>> receiving_;  // by rail
  std::vector<std::thread> threads_;
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> dropped_{0};

  std::shared_mutex sinksMutex_;
  std::unordered_map<uint64_t, std::weak_ptr<PacketSink>> sinks_;

  std::mutex activeMutex_;  // guards what follows
  std::vector<std::weak_ptr<PacketSink>> active_;
  Clock::time_point nextTick_ = Clock::time_point::max();
  std::once_flag stopped_;
};

}  // namespace mooncake
