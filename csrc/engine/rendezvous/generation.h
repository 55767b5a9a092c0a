#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/rendezvous/store.h"

namespace mooncake {

// One attempt to begin a job. A store may outlive many: torchrun restarts workers over its agent's
// store, a process may come back to it, a file stays. What an earlier attempt left there must not
// be taken for an answer, and it may have been killed at any point, so nothing can be relied on to
// have been cleaned up or counted. Hence every attempt has keys of its own: rank 0 begins it with a
// number that never comes again, and the others find that. Who finds the one before, because rank 0
// is not there yet, meets nobody in it (see exchange()), looks again and joins the next.
//
// As a store it holds the keys of this attempt.
class Generation final : public Store {
 public:
  // `ownKey`: the job's key, when this rank was given one. Else rank 0 makes one and hands it out
  // through the store, as secret as that store.
  static Result<std::unique_ptr<Generation>> join(Store& store, int rank,
                                                  const std::optional<std::string>& ownKey,
                                                  Deadline deadline);

  const Bytes& jobKey() const { return jobKey_; }
  // Whether rank 0 has begun another one since, so that this rank has to join that.
  bool hasSuccessor();
  // Waits for it. kTimeout says what the store holds.
  Status awaitSuccessor(Deadline deadline);

  Status set(const std::string& key, ByteView value) override;
  // kInterrupted when there is a successor.
  Result<std::vector<Bytes>> get(const std::vector<std::string>& keys, Deadline deadline) override;
  Result<bool> present(const std::string& key) override;

 private:
  Generation(Store& store, int rank, std::string prefix, Bytes announcement, Bytes jobKey);
  std::string keyOf(const std::string& key) const { return prefix_ + key; }

  Store& store_;
  const int rank_;
  const std::string prefix_;
  const Bytes announcement_;  // what rank 0 has said
  const Bytes jobKey_;
};

}  // namespace mooncake
