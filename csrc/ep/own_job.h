#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/result.h"
#include "engine/engine.h"
#include "group/group.h"

namespace mooncake::ep {

struct OwnJobOptions {
  int rank = 0;
  int size = 1;
  size_t bytes = 0;                  // of all buffers that use the job
  bool raises = false;               // mode `raise`
  std::string routeHint;             // see EngineEnv::routeHint
  std::vector<std::string> devices;  // network cards of the job's own engine; empty: all
  // An engine that its owner lends to the job, and the key of that engine; null: the job makes its
  // own.
  std::shared_ptr<Engine> lent;
  std::string lentKey;
  Status ready;  // not ok: this rank cannot begin the job
};

// Passes this rank's bytes to all ranks, and returns the bytes of all, by rank.
using ByteExchange = std::function<Result<std::vector<Bytes>>(const Bytes& mine)>;

// Begins the job of buffers over ranks that are in no group of ours, and returns the group of all
// ranks. Collective: the ranks exchange bytes twice, the proposed keys and then their addresses. If
// a rank cannot go on until then, all ranks return its error, which names it. Reads the environment.
Result<std::unique_ptr<Group>> beginOwnJob(const OwnJobOptions& options,
                                           const ByteExchange& exchange, Deadline deadline);
// Makes one more group of the job's ranks, over the job's connections. Collective.
Result<std::unique_ptr<Group>> groupWithin(const Group& first, const OwnJobOptions& options,
                                           Deadline deadline);

}  // namespace mooncake::ep
