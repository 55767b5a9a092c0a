#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/rendezvous/store.h"

namespace mooncake {

// One attempt to begin a job. A store may outlive many attempts: torchrun restarts workers over its
// agent's store, a process may come back to it, a file stays. An earlier attempt may have been
// killed at any point, so its keys may remain, and must not be taken for answers. Hence every
// attempt has keys of its own. Rank 0 begins it with a number that never comes again, and the
// other ranks find that number. If a rank finds the previous attempt, because rank 0 is not there
// yet, the exchange fails (see exchange()). It then looks again and joins the next attempt.
//
// As a Store, it holds the keys of this attempt.
class Generation final : public Store {
 public:
  // `ownKey`: the job's key, if this rank was given one. Else rank 0 makes one and hands it out
  // through the store; it is as secret as that store.
  static Result<std::unique_ptr<Generation>> join(Store& store, int rank,
                                                  const std::optional<std::string>& ownKey,
                                                  Deadline deadline);

  // For a process that joins a job in place of one of its ranks, also of rank 0: finds the generation
  // that is there.
  static Result<std::unique_ptr<Generation>> find(Store& store, int rank,
                                                  const std::optional<std::string>& ownKey,
                                                  Deadline deadline);

  const std::string& id() const { return id_; }  // never used again
  const Bytes& jobKey() const { return jobKey_; }
  // Returns whether rank 0 has begun another attempt since, which this rank has to join.
  bool hasSuccessor();
  // Waits for another attempt. On kTimeout the message says where the store's content comes from.
  // Other errors are the store's.
  Status awaitSuccessor(Deadline deadline);

  Status set(const std::string& key, ByteView value) override;
  Status append(const std::string& key, ByteView value) override;
  // kInterrupted: rank 0 has begun another attempt.
  Result<std::vector<Bytes>> get(const std::vector<std::string>& keys, Deadline deadline) override;
  Result<bool> present(const std::string& key) override;

 private:
  static Result<Bytes> announcementIn(Store& store, Deadline deadline);
  static Result<std::unique_ptr<Generation>> open(Store& store, int rank, Bytes announcement,
                                                  const std::optional<std::string>& ownKey);
  Generation(Store& store, int rank, std::string id, Bytes announcement, Bytes jobKey);
  std::string keyOf(const std::string& key) const { return prefix_ + key; }

  Store& store_;
  const int rank_;
  const std::string id_;
  const std::string prefix_;
  const Bytes announcement_;  // as rank 0 published it
  const Bytes jobKey_;
};

}  // namespace mooncake
