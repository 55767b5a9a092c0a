#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/contract/transport.h"
#include "engine/rendezvous/store.h"

namespace mooncake {

// A rank of a group that is merged with other groups.
struct MergeMember {
  EngineId id{};
  std::string lost;  // "rank 2 of group '0' (...)"; empty: it may come
};

// The store in which the groups of a merge meet. They do not know each other beforehand. So each
// rank publishes a list there: the members of its group, and which of them are lost. A rank that
// waits for a key reads these lists. Its wait fails at once when fewer ranks are left than were
// asked for.
class MergeStore final : public Store {
 public:
  // Returns the members of this rank's group, this rank first. Called again at every look.
  using Members = std::function<std::vector<MergeMember>()>;

  MergeStore(Store& store, int rank, int size, Members members)
      : store_(store), rank_(rank), size_(size), members_(std::move(members)) {}

  Status set(const std::string& key, ByteView value) override { return store_.set(key, value); }
  Status append(const std::string& key, ByteView value) override {
    return store_.append(key, value);
  }
  // kRefused: the merge cannot be complete. The error names the lost ranks.
  Result<std::vector<Bytes>> get(const std::vector<std::string>& keys, Deadline deadline) override;
  Result<bool> present(const std::string& key) override { return store_.present(key); }

 private:
  Status canBeComplete();
  Status say();
  Status hear();

  Store& store_;
  const int rank_;
  const int size_;
  const Members members_;
  Bytes said_;
  std::vector<std::string> come_;          // keys of the ranks that have published a list
  std::map<EngineId, std::string> known_;  // MergeMember::lost of all members of their groups
  std::vector<EngineId> callers_;          // ranks that have published a list
};

}  // namespace mooncake
