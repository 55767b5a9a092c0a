#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "fabric/crew.h"
#include "wires/nic/fabric_env.h"
#include "wires/nic/nic.h"

namespace mooncake::bench {

enum class Verb { kSend, kWrite, kRead };

constexpr size_t kReceives = 64;  // posted at a time
constexpr size_t kReceiveBytes = 4 << 20;

// One rank's cards and memory, and the other ranks' addresses and keys.
class Station {
 public:
  // `copies`: number of Nics to open for each card that the filters allow.
  Station(Crew& crew, const FabricEnv& env, size_t bytes, size_t copies, bool spins);

  size_t cards() const { return cards_.size(); }
  const Nic& card(size_t i) const { return *cards_[i]; }
  std::span<std::byte> memory() const { return memory_; }
  std::span<std::byte> inbox() const { return inbox_; }

  struct Piece {
    size_t card;
    uint64_t offset;
    uint64_t bytes;
  };
  // Appends the pieces of block number i.
  using Plan = std::function<void(size_t i, std::vector<Piece>& pieces)>;

  // Moves blocks for `seconds`, with `depth` of them under way to each target. Returns bytes per
  // second.
  double stream(Verb verb, const std::vector<int>& targets, const Plan& plan, size_t depth,
                double seconds);
  // Polls, so that other ranks can go on, until all ranks have called this.
  void attend();
  // Times in microseconds.
  struct FirstSubmits {
    double first = 0;      // first write, of 1 MiB, including the insertion of its address
    double insertAll = 0;  // inserting every card of the peer into every address table
    double allFirst = 0;   // one byte over each pair of cards, all at once
    double second = 0;     // 1 MiB over the first pair again
  };
  FirstSubmits firstSubmits(int peer);

 private:
  struct Remote {
    std::vector<Bytes> addresses;
    std::vector<NicKey> keys;
  };
  NicPeer peer(size_t card, int rank);
  size_t pollAll();  // returns the number of own operations that have ended
  void begin(Verb verb, int target, const Piece& piece, size_t slot);
  void postReceive(size_t card, size_t i);

  Crew& crew_;
  const bool spins_;  // false: sleeps when nothing has completed
  bool isReceiving_ = false;
  std::vector<std::unique_ptr<Nic>> cards_;
  std::span<std::byte> memory_, inbox_;
  std::vector<std::unique_ptr<NicMemory>> registered_, inboxes_;
  std::vector<Remote> remotes_;
  std::vector<std::vector<NicPeer>> peers_;  // by card, then rank
  std::vector<size_t> left_;                 // pieces under way in each slot
  std::vector<size_t> ended_;                // free slots
};

}  // namespace mooncake::bench
