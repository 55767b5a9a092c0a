#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/result.h"
#include "engine/engine.h"
#include "engine/env.h"
#include "group/group.h"
#include "group/group_env.h"

namespace mooncake::ep {

struct OwnJobOptions {
  int rank = 0;
  int size = 1;
  size_t bytes = 0;                  // of the buffer
  bool raises = false;               // mode `raise`
  std::string routeHint;             // see EngineEnv::routeHint
  std::vector<std::string> devices;  // network cards of the job's own engine; empty: all
  // An engine that its owner lends to the job, and the key of that engine; null: the job makes its
  // own.
  std::shared_ptr<Engine> lent;
  std::string lentKey;
};

// The job of a buffer over ranks that are in no group of ours. Its ranks exchange bytes twice: the
// proposed keys, and then, in begin(), their addresses.
class OwnJob {
 public:
  // Reads the environment.
  static Result<OwnJob> prepare(OwnJobOptions options);

  // The key that this rank proposes for the job. Empty: this rank has a key, from the environment
  // or from the lent engine.
  const Bytes& proposedKey() const { return proposedKey_; }
  // Collective. Makes the engine, if none was lent, and the group of all ranks. The job has the key
  // of this rank, or else `firstProposal`, which rank 0 made. Called once.
  Result<std::unique_ptr<Group>> begin(Bytes firstProposal, const Group::Exchange& exchange,
                                       Deadline deadline);

 private:
  OwnJob(OwnJobOptions options, EngineEnv env, GroupEnv groupEnv);

  Result<std::shared_ptr<Engine>> engineWith(Bytes key);

  OwnJobOptions options_;
  EngineEnv env_;
  GroupEnv groupEnv_;
  Bytes proposedKey_;
};

}  // namespace mooncake::ep
