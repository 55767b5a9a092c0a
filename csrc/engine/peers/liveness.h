#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "engine/contract/life_word.h"
#include "engine/contract/transport.h"
#include "engine/memory/arena.h"
#include "engine/peers/peer_process.h"

namespace mooncake {

// A thread that does three things, none of which can block it. It keeps this engine's life word
// (engine/contract/life_word.h). It shows the peers on other hosts that we live. It watches all
// peers: their life words, their beats, and received bytes.
//
// Silence is counted in looks: each adds the time since the last look, up to a few beats. So time
// in which we did not run ourselves (stopped, starved, suspended) accuses no peer.
class Liveness {
 public:
  // A peer that has shown no sign of life for the failure timeout.
  struct Silent {
    EngineId peer;
    std::shared_ptr<Channel> channel;
    uint64_t sign;  // signOf() during all this time
  };
  struct Options {
    std::chrono::milliseconds failureTimeout;  // at least 200 ms are used
    // Both run on the liveness thread, without a lock. Called once per peer, when the kernel says
    // that its process has ended or is ending; `evidence` says how we know. Not called if only the
    // thread that holds the word has ended, because a sandbox may kill that thread alone.
    std::function<void(const EngineId& peer, const std::string& evidence)> onExited;
    // Gets all silent peers together, and again after each further failure timeout.
    std::function<void(std::vector<Silent>)> onSilent;
  };
  struct FutexWait;
  static Result<std::unique_ptr<Liveness>> create(Arena& arena, Options options);
  // Returns a value that changes whenever the peer shows that it lives.
  static uint64_t signOf(const Channel& channel);
  // Leaves in peace: the word is given back, and no peer takes that for a death.
  ~Liveness();

  // Starts the thread unless it runs; it sleeps until begin(). kExhausted: no thread can be
  // created.
  Status prepare();
  // Before this, no death is seen: neither a peer's here nor ours there. Fails as prepare() does.
  Status begin();
  // From now on a peer that has never shown a sign of life counts as silent, too. Before that it
  // may still be connecting to other peers, which comes before its first beat.
  void startSilenceDetection() { expectsSigns_.store(true, std::memory_order_relaxed); }
  // Call it when an operation begins that a death would block. Beats and looks are frequent until
  // 1 s after the last such call, and rare afterwards, because they cost even an idle rank.
  void markActive() {
    if (!stirred_.load(std::memory_order_relaxed)) stirred_.store(true, std::memory_order_relaxed);
  }
  // Joins the thread and releases all channels. Nothing is reported or watched afterwards.
  void stop();
  uint64_t wordOffset() const { return block_.offset(); }
  // Our report, which peers on this host read after our end.
  CrashReport& crashReport() { return own().crashReport; }
  // We have said goodbye: from now on the end of our process is not reported by peers.
  void leave();

  // The channel keeps the mapping that holds the peer's word.
  void watch(const EngineId& peer, const std::shared_ptr<Channel>& channel);
  void unwatch(const EngineId& peer);

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    std::shared_ptr<Channel> channel;
    PeerLife life;
    PeerProcess process;
    uint64_t sign = 0;
    // Counts from the first sign on. Before that the peer may still be waiting for other peers
    // to connect.
    std::chrono::nanoseconds silence{0};
    bool isMarked = false;              // its word is marked; is its process ending?
    Clock::time_point nextLook;         // into /proc, unless it shows a sign before
    std::chrono::nanoseconds patience;  // between two such looks; it grows
  };
  struct Exited {
    EngineId peer;
    std::string evidence;
    std::shared_ptr<Channel> last;  // destroyed without the lock
  };

  Liveness(ArenaBlock block, Options options);
  LifeWord& own() const { return *reinterpret_cast<LifeWord*>(block_.data()); }
  bool awaitBegin() EXCLUDES(mutex_);
  void run();
  void setPace();
  void look(std::vector<FutexWait>& waits, std::vector<Exited>& exited) REQUIRES(mutex_);
  bool listen(Watched& watched, std::chrono::nanoseconds passed) const;
  std::string confirmEnd(Watched& watched, Clock::time_point now);
  static std::string lookUp(Watched& watched, Clock::time_point now);
  static bool isLookDue(Watched& watched, Clock::time_point now);
  std::vector<Silent> takeSilent() REQUIRES(mutex_);
  void beat(Clock::time_point now) REQUIRES(mutex_);
  void sleep(std::vector<FutexWait>& waits);

  const ArenaBlock block_;  // holds our own word
  Options options_;         // constant once the thread runs
  Mutex mutex_;
  Condition begun_;
  bool hasBegun_ GUARDED_BY(mutex_) = false;
  std::map<EngineId, Watched> watched_ GUARDED_BY(mutex_);
  // Number of watched peers whose life words are not mapped.
  size_t remotes_ GUARDED_BY(mutex_) = 0;
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::atomic<bool> left_{false};
  std::atomic<bool> expectsSigns_{false};
  std::atomic<bool> stirred_{true};
  std::atomic<uint32_t> wakes_{0};
  std::thread thread_;  // started under the mutex; only stop() takes it

  // Used on the liveness thread only.
  std::chrono::milliseconds period_{0};  // from one look and beat to the next
  Clock::time_point calmAt_;
  Clock::time_point lastLook_;
  Clock::time_point nextBeat_;
  Clock::time_point nextConfirm_;  // the next check of a process whose word is marked
  bool waitsOnMany_ = false;       // this kernel supports waiting for many words at once
};

}  // namespace mooncake
