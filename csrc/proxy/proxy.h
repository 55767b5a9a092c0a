#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/log.h"
#include "base/result.h"
#include "base/wait.h"
#include "engine/engine.h"
#include "proxy/peer_commands.h"
#include "proxy/proxy_memory.h"
#include "proxy/regions.h"

namespace mooncake::proxy {

struct ProxyOptions {
  uint32_t rank = 0;  // this one's
  uint32_t ranks = 1;
  uint32_t slots = 1024;       // of each peer's ring; a power of two
  uint32_t signalWords = 256;  // that each rank can count up at each other rank
  // Number of threads that post commands, each for a part of the peers. See threadsFor().
  uint32_t threads = 1;
  // A peer that has not taken a command after so long loses its ring.
  std::chrono::milliseconds timeout{10'000};
  std::chrono::milliseconds kernelTimeout{10'000};  // longest wait of a thread of a kernel
  LogLevel endLevel = LogLevel::kWarning;           // of lines about rings that have ended
  Accelerator* accelerator = nullptr;  // of the kernels that push; null: see ProxyMemory
  std::span<std::byte> tickets = {};   // see ProxyMemory::create()
  std::span<std::byte> counts = {};    // the same
};

// Returns the number of threads for a proxy to this many peers: the engine's setting, else one for
// each network card of it, at most eight. At least one, and at most one for each peer.
uint32_t threadsFor(const Engine& engine, uint32_t peers);

// Lets kernels write to peers that only the engine reaches. Kernels push commands into rings in
// pinned memory (kernels/proxy/proxy.cuh), and threads of the host give them to the engine. It is
// made in two steps, create() and attach(); in between the ranks exchange their describe() results.
//
// A ring ends with an error if its peer is lost or takes nothing, or if a command is wrong. Then no
// command of it reads its source any more, waiting kernels stop, and other rings go on.
class Proxy {
 public:
  // Commands name these regions by their place. Peers may write into all of them. They must outlive
  // the proxy.
  static Result<std::unique_ptr<Proxy>> create(std::shared_ptr<Engine> engine,
                                               std::vector<LocalRegion> regions,
                                               ProxyOptions options);
  ~Proxy() { close(); }
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // Returns the description of this rank's regions, for attach() of the other ranks.
  Bytes describe() const;
  // Starts the threads. `peers` and `descriptions` are by rank; this rank's own are not
  // used. A rank without a description has no ring. Call it once.
  Status attach(const std::vector<std::shared_ptr<Peer>>& peers,
                const std::vector<Bytes>& descriptions);

  // The argument of kernels, valid until the destructor. Kernels must have ended by then: close()
  // stops kernels that wait.
  kernels::ProxyView view() const;
  // The memory of view(). A user whose kernels may look at it later keeps it longer than the proxy.
  const std::shared_ptr<ProxyMemory>& memory() const { return memory_; }
  // Why the rank's ring has ended; ok while it goes on. Any thread.
  Status statusOf(uint32_t rank) const;
  // Has threads that sleep look at the rings at once; else that takes up to a millisecond. Any
  // thread.
  void wake();
  // Waits until all commands that were pushed before have completed, or their rings have ended. One
  // thread at a time.
  Status flush(Deadline deadline);
  // Ends the ring of a rank that takes no part any more. When this returns ok, none of its commands
  // reads its source. Any thread, before close().
  Status end(uint32_t rank, Deadline deadline);
  // Ends all rings, the threads, and the access of peers. When this returns, no command reads its
  // source, and nothing lands in the regions.
  void close();

 private:
  // The ring of a rank. No commands: it is this rank, or attach() has failed.
  struct Ring {
    std::unique_ptr<PeerCommands> commands;
    uint32_t thread = 0;  // that drives it
  };
  Proxy(std::shared_ptr<Engine> engine, std::vector<LocalRegion> regions, ProxyOptions options)
      : engine_(std::move(engine)), sources_(std::move(regions)), options_(options) {}

  Status registerRegions();
  void run(uint32_t thread);
  void tellEnd(uint32_t rank) const;

  const std::shared_ptr<Engine> engine_;
  const std::vector<LocalRegion> sources_;
  const ProxyOptions options_;
  std::shared_ptr<ProxyMemory> memory_;
  MemoryRegion signals_;
  std::vector<MemoryRegion> targets_;
  // One for each thread. Channels may still ring them after the last command has ended, so the
  // engine keeps them, too.
  std::shared_ptr<std::deque<Doorbell>> bells_;
  std::vector<Ring> rings_;  // by rank
  Interrupt stopping_;
  std::atomic<uint32_t> flushes_{0};                  // calls of flush()
  std::unique_ptr<std::atomic<uint32_t>[]> flushed_;  // by thread: the last call that it has done
  std::vector<std::thread> threads_;
};

}  // namespace mooncake::proxy
