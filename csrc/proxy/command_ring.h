#pragma once

#include <cstdint>
#include <span>

#include "kernels/proxy/command.h"

namespace mooncake::proxy {

// The host's side of one peer's ring: reads commands in the order of their numbers, and publishes
// how many of them it has taken and completed. One thread.
class CommandRing {
 public:
  // The number of slots is a power of two. The ring goes on from the counts, which may be in memory
  // of a device that is mapped here. Both must outlive it.
  CommandRing(std::span<kernels::ProxyCommand> slots, kernels::ProxyCounts& counts,
              bool areCountsMapped = false)
      : slots_(slots),
        counts_(&counts),
        areCountsMapped_(areCountsMapped),
        taken_(counts.taken),
        completed_(counts.completed) {}

  // Returns whether a kernel has written the next command whole.
  bool hasNext() const;
  // Copies the next command. The copy stays as it is, also if kernels write to the slot.
  bool take(kernels::ProxyCommand& command);
  // Frees the slots of the commands that were taken.
  void publishTaken();
  // `count` commands have completed since the last call.
  void complete(uint32_t count);
  // Kernels that wait for this ring stop.
  void end(kernels::ProxyEnd why);

 private:
  void store(uint32_t& word, uint32_t value);

  std::span<kernels::ProxyCommand> slots_;
  kernels::ProxyCounts* counts_;
  bool areCountsMapped_;
  uint32_t taken_;
  uint32_t completed_;
};

}  // namespace mooncake::proxy
