#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "engine/rendezvous/store.h"

namespace mooncake {

// torch's store (TCPStore, FileStore, HashStore, PrefixStore) as the engine's.
class C10dStore : public Store {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  Status set(const std::string& key, ByteView value) override;
  Result<std::vector<Bytes>> get(const std::vector<std::string>& keys, Deadline deadline) override;
  Result<bool> present(const std::string& key) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

// The host that the ranks meet at, when the store has one (TCPStore, also behind prefixes): the
// address of ours that leads there is the one that peers can reach. Empty otherwise.
std::string rendezvousHost(const c10::intrusive_ptr<c10d::Store>& store);

// Returns when the TCPStore's server has hung up on this process, at once for other stores, and at
// the deadline. Asks the kernel: the store itself would only tell in an exception and a log line.
void awaitServersEnd(const c10::intrusive_ptr<c10d::Store>& store, Deadline deadline);

}  // namespace mooncake
