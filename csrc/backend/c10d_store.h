#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/store_calls.h"
#include "engine/rendezvous/store.h"

namespace mooncake {

// torch's store (TCPStore, FileStore, HashStore, PrefixStore) as the engine's. For one caller.
class C10dStore final : public Store {
 public:
  // `until`: when the caller must end, also where the server of a TCPStore does not answer.
  // `launcherKey`: key of the store without its prefixes, under which a launcher names the ranks
  // that died, one a line; empty: no launcher does.
  C10dStore(c10::intrusive_ptr<c10d::Store> store, Deadline until, std::string launcherKey);

  Status set(const std::string& key, ByteView value) override;
  Status append(const std::string& key, ByteView value) override;
  // Also kRefused: a rank has died. It quotes the launcher.
  Result<std::vector<Bytes>> get(const std::vector<std::string>& keys, Deadline deadline) override;
  Result<bool> present(const std::string& key) override;

  // Returns the error with which the job could not begin. If that is a timeout and the store was
  // silent at the end of the last set() or get() that failed, the silence is the cause: returns an
  // error that says so.
  Error explain(Error error) const;

 private:
  // Runs the call, which must own all that it uses, and returns what it returned.
  template <typename Call>
  auto ask(const char* what, Call call) -> decltype(call());
  Result<bool> check(std::vector<std::string> keys);
  Status await(const std::vector<std::string>& keys, Deadline deadline);
  // Looks twice a second at the launcher's key. kRefused when a rank has died: a job begins with
  // all of its ranks.
  Status ranksLive();
  // Returns the status of a set() or a get().
  Status noteSilence(Status status);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string launcherKey_;
  Clock::time_point lookAt_;           // next look at that key
  std::unique_ptr<StoreCalls> calls_;  // null: only a TCPStore has a server that may be stopped
  Clock::duration silence_{};  // of the store, at the end of the last set() or get() that failed
};

// The host that the ranks meet at, when the store has one (TCPStore, also behind prefixes): the
// address of ours that leads there is the one that peers can reach. Empty otherwise.
std::string rendezvousHost(const c10::intrusive_ptr<c10d::Store>& store);

// Returns when the TCPStore's server has hung up on this process, at once for other stores, and at
// the deadline. Asks the kernel: the store itself would only tell in an exception and a log line.
void awaitServersEnd(const c10::intrusive_ptr<c10d::Store>& store, Deadline deadline);

}  // namespace mooncake
