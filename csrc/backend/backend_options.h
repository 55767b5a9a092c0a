#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "backend/merge_store.h"
#include "backend/stream_settings.h"
#include "engine/engine.h"
#include "engine/env.h"
#include "group/group_env.h"

namespace mooncake {

struct BackendOptions {
  std::string name;  // "mooncake" or "mooncake-cpu"
  std::string groupName;
  std::vector<int> globalRanks;
  std::chrono::milliseconds timeout;
  std::optional<std::chrono::milliseconds> messageTimeout;  // none: `timeout`
  bool lostMessagesReturn = false;  // in mode `continue`: see MessageDriver::lostMessagesReturn()
  EngineEnv env;
  GroupEnv groupEnv;    // of all groups of the job
  bool raises = false;  // mode `raise`: a loss ends one operation
  StreamSettings streams;
  bool blockingWait = false;  // wait() for tensors of a device waits on the host for the outputs
  at::Tensor activeRanks;     // int32, 1 for each active rank; the caller's own when one was given
  bool readsActiveRanks = false;  // the program has given them
  // How long programs see a lost rank as active. Until deactivated: or until the members change
  // otherwise.
  enum class LostRanks { kAreOut, kStayUntilSynced, kStayUntilDeactivated };
  LostRanks lostRanks = LostRanks::kAreOut;
  // A process that takes the place of a lost rank: its groups have it alone until Replacing::join().
  bool isNewcomer = false;
  Bytes joinToken;  // of a newcomer, in place of the store (membership/join_token.h); or empty
  bool mayBegin = false;  // a newcomer that finds no job which runs begins one with the others
  int capacity = 0;       // ranks that the group may grow to; 0: its size
  // An engine that its owner lends to the job; null: the job makes its own. env.jobKey must be the
  // key of a lent engine. When the job ends, the engine stays, without connections to its peers.
  std::shared_ptr<Engine> engine;
  // Key of the job's store, without prefixes, under which a launcher names the ranks that died.
  // Empty: no launcher does.
  std::string launcherKey;
  // If groups are merged into this one: the members of the group that this rank comes from.
  MergeStore::Members mergeMembers;
};

}  // namespace mooncake
