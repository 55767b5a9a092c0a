#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"

namespace mooncake {

// What a process must have in common with a job to become one of its ranks.
struct JobIdentity {
  static constexpr size_t kMostJob = 128;  // bytes of `job`
  static constexpr size_t kMostMode = 32;  // bytes of `mode`

  std::string job;       // name of the job, never used for another one
  std::string mode;      // how its groups treat a loss: "continue" or "raise"
  uint64_t options = 0;  // digest of the options that must be equal on all ranks

  bool operator==(const JobIdentity&) const = default;
};

// How a newcomer asks for a rank. See Membership::join().
struct JoinOptions {
  JobIdentity identity;
  // Engine::endpoint() of members. They are asked in this order; one that answers is enough.
  std::vector<Bytes> members;
  int rank = 0;  // the rank to take over; its last holder must be out of the job
  int size = 0;  // number of ranks of which the newcomer knows; the job may have room for more
  std::chrono::milliseconds failureTimeout{3000};
  std::string waitsFile;  // see loss_waits.h
};

}  // namespace mooncake
