#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "wires/cards/card_renewal.h"
#include "wires/cards/packet_sinks.h"
#include "wires/cards/rail.h"

namespace mooncake {

// All cards of one engine, which all of its peers share: the rails, the threads that poll them, the
// buffers of packets that leave, and the sinks of packets that arrive.
class Rails {
 public:
  static constexpr size_t kMostPacketBytes = (size_t(64) << 10) - 1024;
  static constexpr auto kTick = std::chrono::milliseconds(1);

  struct Options {
    // Number of polling threads, at most one for each card. 0: as many as there are cards.
    size_t threads = 1;
    std::string name;                      // for the log
    CardRenewal::Reopen reopen = nullptr;  // null: a closed card stays closed
  };
  static Result<std::shared_ptr<Rails>> create(std::vector<std::unique_ptr<Nic>> nics,
                                               const Options& options);
  ~Rails() { stop(); }

  size_t count() const { return rails_.size(); }
  Rail& operator[](size_t rail) { return *rails_[rail]; }
  const std::string& name(size_t rail) const { return rails_[rail]->name(); }
  const std::string& provider() const { return provider_; }
  const NicLimits& limits(size_t rail) const { return rails_[rail]->limits(); }
  Bytes address(size_t rail) const { return rails_[rail]->address(); }
  uint64_t generation(size_t rail) const { return rails_[rail]->generation(); }
  std::shared_ptr<Nic> card(size_t rail, uint64_t& generation) const {
    return rails_[rail]->card(generation);
  }
  // Any thread, with or without a channel's lock.
  void submit(size_t rail, std::unique_ptr<RailOperation> operation) {
    rails_[rail]->submit(std::move(operation));
  }
  RegisteredPool& pool() { return *pool_; }
  size_t packetBytes() const { return pool_->buffers().bufferBytes(); }

  PacketSinks& sinks() { return sinks_; }
  // Lets the sink tick until it says that nothing is due.
  void activate(const std::shared_ptr<PacketSink>& sink);

  // A card that is to be closed, and opened anew at another address. When its generation is over,
  // no byte of its operations moves any more, nor of operations that peers began under its keys.
  struct Retired {
    size_t rail = 0;
    uint64_t generation = 0;
  };
  void retire(Retired which) { rails_[which.rail]->askToClose(which.generation); }
  bool isPolledHere() const { return isPolling == this; }
  // The same for several cards. Waits until they are closed, at most 10 s. A polling thread does
  // not wait.
  void retireNow(std::span<const Retired> which);
  // Sets the function that is called when a rail has another card, on a polling thread. Before the
  // first card can be retired.
  void onRenewal(std::function<void(size_t rail)> then) { onRenewal_ = std::move(then); }

  // Ends all operations, and the threads. Not on one of them.
  void stop();

 private:
  explicit Rails(Options options) : options_(std::move(options)) {}
  void run(size_t first, size_t step);
  void sleepAtAll(size_t first, size_t step, Clock::time_point until);
  void tellOfRenewal(size_t rail);
  Clock::time_point tick(Clock::time_point now) EXCLUDES(activeMutex_);

  static thread_local const Rails* isPolling;  // the rails that this thread polls

  const Options options_;
  std::string provider_;
  std::function<void(size_t rail)> onRenewal_;
  std::unique_ptr<RegisteredPool> pool_;  // of packets that leave
  PacketSinks sinks_;
  std::vector<std::unique_ptr<Rail>> rails_;
  std::vector<CardRenewal> renewals_;  // by rail, each of its polling thread
  std::vector<std::thread> threads_;
  std::atomic<bool> stopping_{false};
  std::once_flag stopped_;

  Mutex activeMutex_;
  std::vector<std::weak_ptr<PacketSink>> active_ GUARDED_BY(activeMutex_);
  Clock::time_point nextTick_ GUARDED_BY(activeMutex_) = Clock::time_point::max();
};

}  // namespace mooncake
