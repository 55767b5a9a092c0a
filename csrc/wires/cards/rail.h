#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "wires/cards/fair_queue.h"
#include "wires/cards/packet_sinks.h"
#include "wires/cards/rail_operation.h"
#include "wires/cards/registered_pool.h"
#include "wires/nic/nic.h"
#include "wires/packets/fair_shares.h"

namespace mooncake {

// One card of an engine, for all of its peers. The card never has more operations under way than it
// takes. More of them wait, the channels in turn, and the channels share the card's places
// (FairShares). One thread polls the card; CardRenewal closes it and opens it anew.
class Rail {
 public:
  // `receiving` has one buffer for each packet that the card may receive at once.
  Rail(size_t index, std::shared_ptr<Nic> nic, std::unique_ptr<RegisteredPool> receiving);

  // ---- any thread
  size_t index() const { return index_; }
  const std::string& name() const { return name_; }
  const NicLimits& limits() const { return limits_; }
  // Counts a channel among the channels that share the places; the owner stays where it is
  // meanwhile.
  void addOwner(FairShares::Owner& owner);
  void removeOwner(FairShares::Owner& owner);
  // Counts the cards that this rail has had, from 1 on.
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
  Bytes address() const;
  // Returns null while the card is closed.
  std::shared_ptr<Nic> card(uint64_t& generation) const;
  // Puts the peer's card into this card's address table, until release() has been called as often.
  Result<RailPeer> insert(ByteView address);
  void release(RailPeer peer);
  void submit(std::unique_ptr<RailOperation> operation);
  void wake();
  // Refuses everything from now on, and wakes the polling thread.
  void stop();

  // ---- closing, for CardRenewal
  // Asks the polling thread to close the card, if it still has this generation. Any thread.
  void askToClose(uint64_t generation);
  // Returns false if the card still has this generation at the deadline. Any thread.
  bool awaitEndOf(uint64_t generation, Deadline deadline);
  bool mustClose() const { return mustClose_.load(std::memory_order_acquire); }
  // Closes the card. Returns false if it was closed already. On the polling thread, as the rest.
  bool close();
  // Returns whether the card has ended all operations.
  bool isIdle() const;
  // Ends the operations that the card had abandoned. After close().
  void endAbandoned();
  // Opens the rail with another card. `sendingMemory` and `receivingMemory` are the registrations
  // of `sending` and of the buffers for received packets with it. Returns the old card.
  std::shared_ptr<Nic> reopen(std::shared_ptr<Nic> nic, RegisteredPool& sending,
                              std::unique_ptr<NicMemory> sendingMemory,
                              std::unique_ptr<NicMemory> receivingMemory);
  const RegisteredPool& receiving() const { return *receiving_; }
  // Frees the buffers of received packets. After the last serve().
  void dropReceiving() { receiving_.reset(); }

  // ---- the polling thread
  bool isClosed() const { return isClosed_; }
  Nic& nic() { return *nic_; }
  bool lacksReceives() const { return !unposted_.empty(); }
  // Takes completions, and gives received packets to the sinks. Returns the number of completions.
  size_t serve(std::span<NicCompletion> room, PacketSinks& sinks);
  // Begins operations that wait, and ends operations that could not begin. Returns whether the
  // card has refused one that it may take before a completion comes.
  bool feed();

 private:
  struct Receive {
    std::byte* buffer = nullptr;
  };
  Status start(RailOperation& operation) REQUIRES(mutex_);
  void give(std::unique_ptr<RailOperation> operation, const Status& begun) REQUIRES(mutex_);
  bool beginWaiting() REQUIRES(mutex_);
  size_t underWay() const REQUIRES(mutex_) { return limits_.sendDepth - slots_.left(); }
  // On the polling thread.
  void post();
  void onReceived(const NicCompletion& completion, PacketSinks& sinks);
  void keep(std::unique_ptr<RailOperation> operation, const NicCompletion& how);

  const size_t index_;
  const std::string name_;
  const NicLimits limits_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> mustClose_{false};
  std::atomic<uint64_t> generation_{1};

  mutable Mutex mutex_;
  // Written only by the polling thread, which reads both without the lock.
  std::shared_ptr<Nic> nic_;
  bool isClosed_ = false;
  Condition ended_;                                      // a generation is over
  std::map<NicPeer, size_t> peers_ GUARDED_BY(mutex_);   // number of uses of each
  FairShares slots_ GUARDED_BY(mutex_);                  // one place for each operation under way
  FairQueue<RailOperation> waiting_ GUARDED_BY(mutex_);  // the owner is the channel's RailShare
  std::deque<std::unique_ptr<RailOperation>> failed_ GUARDED_BY(mutex_);  // could not begin

  // Of the polling thread.
  std::unique_ptr<RegisteredPool> receiving_;
  std::vector<Receive> receives_;
  std::vector<Receive*> unposted_;
  // The card may still use the memory of these operations, so they stay until it is closed.
  std::vector<std::pair<std::unique_ptr<RailOperation>, NicCompletion>> abandoned_;
};

}  // namespace mooncake
