#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/life_word.h"
#include "engine/memory/arena.h"
#include "engine/peer_process.h"
#include "engine/transports/transport.h"

namespace mooncake {

// A thread that does three things and nothing that could hold it up: it keeps this engine's life
// word (engine/life_word.h), it shows the peers on other hosts that we live, and it watches all of
// them: life words, beats, what comes over connections.
//
// Silence is counted in looks: one adds what passed since the last, but a few beats at most. So
// time in which we did not run ourselves (stopped, starved, suspended) accuses nobody.
class Liveness {
 public:
  // A peer that has shown no sign of life for the failure timeout.
  struct Silent {
    EngineId peer;
    std::shared_ptr<Channel> channel;
    uint64_t sign;  // signOf() all this time
  };
  struct Options {
    std::chrono::milliseconds failureTimeout;  // 200 ms at least are taken
    // Both run on the thread, without a lock. Once per peer: the kernel says that its process has
    // ended, or is ending, and in which way we know. Never for a process of which only the thread
    // that holds the word has ended: a sandbox may kill that one alone.
    std::function<void(const EngineId& peer, const std::string& evidence)> onExited;
    // All that are silent, together; and again after each further failure timeout.
    std::function<void(std::vector<Silent>)> onSilent;
  };
  struct FutexWait;
  static Result<std::unique_ptr<Liveness>> create(Arena& arena, Options options);
  // Changes whenever the peer shows that it lives.
  static uint64_t signOf(const Channel& channel);
  // In peace: the word is given back, no peer takes that for a death.
  ~Liveness();

  // Starts the thread, unless it runs; it sleeps until begin(). kExhausted where there is none.
  Status prepare();
  // Until then no peer's death is seen here, nor this process's death there. Fails as prepare().
  Status begin();
  // From now on a peer that has never shown a sign of life is silent, too: before, it may still be
  // connecting to others, and begins when it is through.
  void startSilenceDetection() { expectsSigns_.store(true, std::memory_order_relaxed); }
  // Something was begun that a death would hold up. Until a second after the last such call beats
  // and looks come quickly, afterwards at leisure: they cost even a rank that does nothing.
  void markActive() {
    if (!stirred_.load(std::memory_order_relaxed)) stirred_.store(true, std::memory_order_relaxed);
  }
  // Joins it and lets go of all channels. Nothing is reported or watched afterwards.
  void stop();
  uint64_t wordOffset() const { return block_.offset(); }
  // Ours, for the peers on the host to read when we have ended.
  CrashReport& crashReport() { return own().crashReport; }
  // From now on the end of our process is no news to anybody: it has said goodbye.
  void leave();

  // The channel holds the mapping in which the peer's word lies.
  void watch(const EngineId& peer, const std::shared_ptr<Channel>& channel);
  void unwatch(const EngineId& peer);

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    std::shared_ptr<Channel> channel;
    PeerLife life;
    PeerProcess process;
    uint64_t sign = 0;
    // Counts from the first sign on: until then it may still be waiting for others to connect.
    std::chrono::nanoseconds silence{0};
    bool isMarked = false;              // its word is: what came of the process?
    Clock::time_point nextLook;         // into /proc, if it shows no sign until then
    std::chrono::nanoseconds patience;  // between two such looks; grows
  };
  struct Exited {
    EngineId peer;
    std::string evidence;
    std::shared_ptr<Channel> last;  // goes without the lock
  };

  Liveness(ArenaBlock block, Options options);
  LifeWord& own() const { return *reinterpret_cast<LifeWord*>(block_.data()); }
  bool awaitBegin();
  void run();
  void setPace();
  void look(std::vector<FutexWait>& waits, std::vector<Exited>& exited);
  bool listen(Watched& watched, std::chrono::nanoseconds passed) const;
  std::string confirmEnd(Watched& watched, Clock::time_point now);
  static std::string lookUp(Watched& watched, Clock::time_point now);
  static bool isLookDue(Watched& watched, Clock::time_point now);
  std::vector<Silent> takeSilent();
  void beat(Clock::time_point now);
  void sleep(std::vector<FutexWait>& waits);

  const ArenaBlock block_;  // holds the own word
  Options options_;         // constant from the start of the thread on
  std::mutex mutex_;        // guards watched_, stopping_, hasBegun_ and the start of thread_
  std::condition_variable begun_;
  bool hasBegun_ = false;
  std::map<EngineId, Watched> watched_;
  size_t remotes_ = 0;  // of them: those whose life words are not mapped
  bool stopping_ = false;
  std::atomic<bool> left_{false};
  std::atomic<bool> expectsSigns_{false};
  std::atomic<bool> stirred_{true};
  std::atomic<uint32_t> wakes_{0};
  std::thread thread_;

  // Of the thread alone.
  std::chrono::milliseconds period_{0};  // from one look, and beat, to the next
  Clock::time_point calmAt_;
  Clock::time_point lastLook_;
  Clock::time_point nextBeat_;
  Clock::time_point nextConfirm_;  // the next look at a process whose word is marked
  bool waitsOnMany_ = false;       // this kernel lets us wait for many words at a time
};

}  // namespace mooncake
