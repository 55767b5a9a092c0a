#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/life_word.h"
#include "engine/memory/arena.h"
#include "engine/transports/transport.h"

namespace mooncake {

// A thread that does two things and nothing that could hold it up: it keeps this engine's life word
// (engine/life_word.h), and it watches those of the peers on the host.
class Liveness {
 public:
  // `onExited` runs on the thread, once per peer, without a lock: the kernel says that its process
  // has ended, or is ending, and in which way we know.
  using OnExited = std::function<void(const EngineId& peer, const std::string& evidence)>;
  struct FutexWait;
  static Result<std::unique_ptr<Liveness>> create(Arena& arena, OnExited onExited);
  // In peace: the word is given back, no peer takes that for a death.
  ~Liveness();

  // Starts the thread, unless it runs. Until then nobody's death is seen here, nor ours there.
  void begin();
  // Joins it and lets go of all channels. Nothing is reported or watched afterwards.
  void stop();
  uint64_t wordOffset() const { return block_.offset(); }
  // From now on the end of our process is no news to anybody: it has said goodbye.
  void leave();

  // The channel holds the mapping in which the peer's word lies. Nothing to watch is fine.
  void watch(const EngineId& peer, const std::shared_ptr<Channel>& channel);
  void unwatch(const EngineId& peer);

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    std::shared_ptr<Channel> channel;
    PeerLife life;
    uint32_t beats = 0;
    Clock::time_point nextLook;          // into /proc, if it does not beat until then
    std::chrono::milliseconds patience;  // between two such looks; grows
  };
  struct Exited {
    EngineId peer;
    std::string evidence;
    std::shared_ptr<Channel> last;  // goes without the lock
  };

  Liveness(ArenaBlock block, OnExited onExited);
  LifeWord& own() const { return *reinterpret_cast<LifeWord*>(block_.data()); }
  void run();
  void look(std::vector<FutexWait>& waits, std::vector<Exited>& exited);
  static std::string standsStill(Watched& watched, Clock::time_point now);
  static void sleep(std::vector<FutexWait>& waits);

  const ArenaBlock block_;  // holds the own word
  const OnExited onExited_;
  std::mutex mutex_;  // guards watched_, stopping_ and the start of thread_
  std::map<EngineId, Watched> watched_;
  bool stopping_ = false;
  std::atomic<bool> left_{false};
  std::atomic<uint32_t> wakes_{0};
  std::thread thread_;
};

}  // namespace mooncake
