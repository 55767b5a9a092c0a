#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/result.h"
#include "device/memory_owner.h"
#include "group/group.h"
#include "kernels/proxy/command.h"
#include "proxy/proxy.h"

namespace mooncake {

// The way from kernels of a group to its ranks on other hosts: a proxy over memory of the device.
class PeerProxy {
 public:
  struct Settings {
    MemoryOwner owner;              // of the memory
    std::span<std::byte> own;       // kernels::kOwnRegion
    std::span<std::byte> inboxes;   // kernels::kInboxRegion
    std::span<std::byte> tickets;   // see proxy::ProxyOptions; all zeros
    std::span<std::byte> counts;    // the same
    uint64_t remote = 0;            // bits of the ranks on other hosts
    std::vector<uint64_t> inboxAt;  // by rank: offset of this rank's inbox in the rank's region
    size_t inboxBytes = 0;          // of one inbox
    std::chrono::nanoseconds timeout{};
  };
  // Collective over the group: all members return ok or all return an error, which says why. Writes
  // `firstBytes` of `own` to the start of each inbox, so that the first kernel finds a way that is
  // known to work, and that allocates nothing any more.
  static Result<std::unique_ptr<PeerProxy>> make(Group& group, Settings settings,
                                                 std::span<const std::byte> firstBytes,
                                                 Deadline deadline);
  ~PeerProxy() { close(); }
  PeerProxy(const PeerProxy&) = delete;
  PeerProxy& operator=(const PeerProxy&) = delete;

  const kernels::ProxyView& view() const { return view_; }
  // Kernels are about to push commands. Any thread.
  void wake();
  // Returns why the rings of these ranks have ended, as the end of a sentence; empty: none has. Any
  // thread, before close().
  std::string endsOf(uint64_t ranks) const;
  // Ends the rings of ranks that the group goes on without. When this returns ok, none of their
  // commands reads the memory, so kernels may write to it.
  Status end(uint64_t ranks, Deadline deadline);
  // Waits until all commands of kernels that have ended have arrived, as far as their ranks live.
  // Other ranks may need them to end the same operation.
  void flush(Deadline deadline);
  // Kernels have ended, or find that their group has. Nothing lands in the memory from here on, and
  // nothing is read from it. The memory of view() stays until the destructor.
  void close();

 private:
  explicit PeerProxy(Settings settings) : settings_(std::move(settings)) {}
  Status create(Group& group);
  Status attach(Group& group, const std::vector<Bytes>& descriptions);
  Status tryAll(Group& group, const std::vector<Bytes>& descriptions,
                std::span<const std::byte> firstBytes, Deadline deadline) const;

  const Settings settings_;
  std::unique_ptr<proxy::Proxy> proxy_;
  std::shared_ptr<proxy::ProxyMemory> memory_;
  kernels::ProxyView view_{};
};

}  // namespace mooncake
