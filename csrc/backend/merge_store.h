#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/rendezvous/store.h"
#include "engine/transports/transport.h"

namespace mooncake {

// A rank of the group that another one comes from when groups are merged.
struct MergeMember {
  EngineId id{};
  std::string lost;  // "rank 2 of group '0' (...)"; empty: it may come
};

// The store in which groups meet that are merged into one. Nobody knows beforehand who comes; so
// each rank says there which ranks its group has and who of them is lost. Whoever waits for a key
// looks at that, and is told at once that the ranks that are left cannot be as many as were asked
// for.
class MergeStore final : public Store {
 public:
  // Of this rank's group, asked again whenever we look; this rank is the first.
  using Members = std::function<std::vector<MergeMember>()>;

  MergeStore(Store& store, int rank, int size, Members members)
      : store_(store), rank_(rank), size_(size), members_(std::move(members)) {}

  Status set(const std::string& key, ByteView value) override { return store_.set(key, value); }
  // kRefused: it says who is lost.
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
  std::vector<std::string> come_;          // keys of the ranks that have said something
  std::map<EngineId, std::string> known_;  // all ranks of their groups; what is lost, and how
  std::vector<EngineId> callers_;          // those that have come
};

}  // namespace mooncake
