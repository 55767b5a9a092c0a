#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tests/simt/builtins.h"
#include "tests/simt/memory_watch.h"

namespace mooncake::simt {

struct Options {
  uint64_t seed = 1;
  // At each access to an atomic word, another thread goes on with a probability of one in so many.
  unsigned switchOneIn = 4;
  // About so many switches long, some rank, block or warp gets no turn while others can go on.
  // 0: never.
  unsigned starveFor = 16;
  unsigned residentBlocks = 1u << 30;  // of a device at a time
  // Other threads or processes change memory, too: time is the system's, and a World in which all
  // threads spin sleeps a little. Otherwise time is virtual and passes when all threads spin.
  bool realTime = false;
  uint64_t hangNs = 1'000'000'000;  // so long without a change is a hang, in virtual time
};

struct Report {
  bool ok = true;
  std::string problem;  // with the place of every thread
  uint64_t threads = 0, switches = 0, atomics = 0, virtualNs = 0;
};

// Runs kernels of several virtual ranks on the CPU. Each CUDA thread is a fiber of the calling
// thread; a seed decides which one goes on at each point. A World is used by one thread, and
// several threads may each have one.
class World {
 public:
  explicit World(Options options);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // Memory of a rank, which counts in its traffic().
  void own(int rank, const void* begin, size_t bytes, MemoryOwner owner = MemoryOwner::kDevice);
  // Launches run in order within a rank's stream, and at once otherwise. `body` calls the kernel.
  void launch(int rank, int stream, const std::string& name, dim3 grid, dim3 block,
              size_t sharedBytes, std::function<void()> body);
  // A thread of the host that runs beside the kernels. It calls the functions of kernels/device.h,
  // and relax() where it waits.
  void host(int rank, const std::string& name, std::function<void()> body) {
    launch(rank, kHostStream, name, {}, {}, 0, std::move(body));
  }
  // After so many atomic accesses of its kernels from now on, the rank stops: for good, as if it
  // were killed, or for so long in virtual time. Its host's threads stop, too. Within a run only for
  // ranks that were told to mayStop() before.
  void kill(int rank, uint64_t afterAtomics);
  void stop(int rank, uint64_t afterAtomics, uint64_t forNs);
  void mayStop(int rank);
  // Whether the rank has been killed by now. If so, its work comes before the caller's, as when a
  // process has ended.
  bool isKilled(int rank) const;

  // Returns when all launches have ended, but for those of killed ranks, or at the first problem.
  Report run();
  const Traffic& traffic(int rank);

  static constexpr int kHostStream = -1;

  class Impl;

 private:
  const std::unique_ptr<Impl> impl_;
};

}  // namespace mooncake::simt
