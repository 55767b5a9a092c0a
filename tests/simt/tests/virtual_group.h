#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/collectives.cuh"
#include "peers/decision_words.h"
#include "peers/peer_verdict.h"
#include "tests/simt/world.h"
#include "virtual_proxy.h"

namespace mooncake::kernels {

// A host that decides for a group of virtual ranks. When a rank is lost, or late where that may be
// skipped, each survivor's host stops its kernels; the host that comes last decides for all.
enum class Hosts : uint8_t {
  kNone,              // kernels get no decision
  kDecide,            // survivors go on
  kRefuse,            // the loss ends the group
  kDecideThenRefuse,  // survivors go on, but the group ends right after the decision
  kRefuseAnyTime,     // each ends the group at some moment, of which some have stopped the kernels
};

// Accesses of a host's thread in the emulator, which lets other threads run before each.
struct EmulatedAccess {
  template <typename Word>
  static Word loadAcquire(Word& word) {
    return loadAcquireSystem(&word);
  }
  static void storeRelaxed(uint32_t& word, uint32_t value) { storeRelaxedSystem(&word, value); }
  static void storeRelease(uint32_t& word, uint32_t value) { storeReleaseSystem(&word, value); }
};
using EmulatedDecisions = DecisionWords<EmulatedAccess>;

struct GroupShape {
  int ranks = 2;
  unsigned blocks = 2;
  unsigned threads = 64;
  unsigned banks = kMostBanks;
  size_t bankBytes = 4096;
  Hosts hosts = Hosts::kDecide;
  uint64_t patienceNs = 2'000'000;
  uint64_t decisionNs = 400'000'000;
  uint64_t ended = 0;  // operations before the first call, all of one block
  // Graphs launch the operations, on another stream than that on which hosts stop the kernels.
  bool ofGraphs = false;
  unsigned callsEach = 0;  // each so many operations beside graphs, one is a call; 0: none
  uint64_t skipNs = 0;     // see Exchange; not 0: that stream is another one for calls, too
  // The host of each rank. Empty: all are on one. Ranks on several have proxies, which the seed
  // drives, and banks of so many bytes in inboxes. 0: as large as the others.
  std::vector<int> hostOf = {};
  size_t inboxBankBytes = 0;
  uint64_t seed = 1;
};

// Ranks of one group with the memory that their kernels share, and their hosts.
class VirtualGroup {
 public:
  VirtualGroup(simt::World& world, const GroupShape& shape);

  // The rank's next operation on its stream. The kernel gets the exchange with the group's state.
  using Kernel = std::function<void(const Exchange&)>;
  void call(int rank, const std::string& name, Exchange exchange, Kernel kernel);
  // The same of an operation in two kernels. The first has so much dynamic shared memory.
  void callInTwo(int rank, const std::string& name, Exchange exchange, size_t sharedBytes,
                 Kernel send, Kernel receive);
  // One thread of the caller's own on that stream, behind the rank's calls so far.
  void run(int rank, const std::string& name, std::function<void()> body);
  // The rank dies after so many atomic accesses of its kernels and host. Its host never learns it.
  void kill(int rank, uint64_t afterAtomics);
  // Other ranks' hosts count the rank as lost, though it runs: at once, or after so many looks of
  // hosts. Its own host decides nothing any more.
  void evict(int rank) { evicted_ |= uint64_t(1) << rank; }
  void evict(int rank, unsigned afterLooks);
  // After the first decision that skips a rank, one or more of those that take part stop for a while
  // and die then. The others' operation with them may be under way. `seed` draws them.
  void loseAfterSkip(uint64_t seed);
  // Decisions reach the rank's kernels so much later.
  void delayDecisions(int rank, uint64_t ns) { memory_[size_t(rank)]->decisionDelayNs = ns; }
  // After the last call: the hosts' threads, which end with the kernels.
  void start();

  // Checks that no rank has pushed data to a rank of an exchange in which that has no part.
  void checkPushes() const;
  // How often hosts of this group have decided so.
  unsigned decided(Decision decision) const { return decided_[size_t(decision)]; }
  // The ranks that took part in an operation, by the hosts' decisions.
  uint64_t contributors(uint64_t number) const;
  // The ranks that were not lost by then: late ones may have been skipped.
  uint64_t members(uint64_t number) const;
  // How often a rank was skipped.
  unsigned skipped() const;
  // The same, as kernels have told a rank's host.
  uint64_t told(int rank, uint64_t number) const;
  // The ranks whose data a rank's result has: an evicted one takes part in no agreement.
  uint64_t sources(int rank, uint64_t number) const {
    return isEvicted(rank) ? told(rank, number) : contributors(number);
  }
  // Whether a living rank must have ended an operation: an evicted one may have an error.
  bool mustHaveEnded(int rank, uint64_t number) const {
    return !isEvicted(rank) || number <= state(rank).done;
  }
  uint64_t ended() const { return shape_.ended; }
  VirtualProxy& proxy(int rank) { return *memory_[size_t(rank)]->proxy; }
  // Bytes that a rank has pushed to a remote rank.
  VirtualProxy::Bytes pushed(int rank, int peer) const {
    return memory_[size_t(rank)]->proxy->bytesTo(peer);
  }
  // Commands of a rank to a remote one that have completed.
  uint32_t completed(int rank, int peer) const {
    return loadAcquireSystem(&state(rank).remote.proxy.counts[peer].completed);
  }
  // How many of the operations up to this one are calls.
  uint64_t calls(uint64_t number) const;
  // Checks what kernels have told of changes of ranks.
  void checkChanges() const;
  bool isKilled(int rank) const { return killed_ >> rank & 1; }
  bool isEvicted(int rank) const { return evicted_ >> rank & 1; }
  const GroupState& state(int rank) const { return memory_[size_t(rank)]->state; }
  HostWords& host(int rank) { return memory_[size_t(rank)]->host; }
  uint32_t called(int rank) const { return memory_[size_t(rank)]->called; }

 private:
  struct Memory {
    GroupState state;
    HostWords host;
    Signals signals{};
    std::vector<unsigned char> data;  // banks, and the mails for remote ranks
    std::vector<unsigned char> inbox;
    std::unique_ptr<VirtualProxy> proxy;
    uint32_t called = 0;
    uint32_t isOver = 0;  // all of the rank's kernels have ended
    uint32_t isHostOver = 0;
    uint32_t enqueued =
        0;  // kernels beside calls that stop the others, as far as the host wants them
    uint64_t decisionDelayNs = 0;
    uint64_t skipped = 0;           // as decided last
    uint64_t waits = 0, since = 0;  // for late ranks: number of the operation, and begin
    uint64_t late = 0;              // see PeerReport
    uint64_t settled = 0;           // an operation that has gone on without late ranks
  };
  struct Agreement {
    uint64_t lastOld = 0;  // number of the last operation with the ranks before
    uint64_t active = 0;
    uint64_t serial = 0, among = 0;     // see HostWords; those of the next operation
    std::vector<PeerVerdict> verdicts;  // by rank
  };

  bool areRemote(int a, int b) const {
    return !shape_.hostOf.empty() && shape_.hostOf[size_t(a)] != shape_.hostOf[size_t(b)];
  }
  void makeRemote();
  bool isOver() const;
  int stream() const;
  Exchange complete(int rank, Exchange exchange);
  void launch(int rank, const std::string& name, size_t sharedBytes, const Exchange& exchange,
              Kernel kernel);
  void runHost(int rank);
  void decideUntilOver(int rank);
  void refuseSometime(int rank);
  void launchStops(int rank);
  bool isLost(int rank) const;
  bool isBeside() const { return shape_.ofGraphs || shape_.skipNs != 0; }
  uint64_t lateOperation(int rank);
  void look();
  const Agreement* agree(uint32_t generation);
  void loseSome(const Agreement& agreement);
  const Agreement* agreed(uint32_t generation) const;

  simt::World& world_;
  const GroupShape shape_;
  std::vector<std::unique_ptr<Memory>> memory_;
  uint64_t killed_ = 0, evicted_ = 0;  // bits of ranks
  int evictedLater_ = -1;
  unsigned looksLeft_ = 0;                 // until then
  std::optional<std::mt19937_64> losses_;  // that are still to come, after a skip
  uint64_t missing_[kMaxRanks] = {};       // bits of ranks that kernels have told each host
  unsigned decided_[3] = {};
  std::deque<Agreement> agreements_;  // by generation, from 1 on
  uint32_t wanted_ = 0;               // the agreement that a host wants, because ranks are late
};

}  // namespace mooncake::kernels
