#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/result.h"

// One network card, as the fabric transport drives it. Three kinds implement it: an endpoint of
// libfabric (libfabric/), a simulated card that is worse than any real one (sim/), and a card that
// completes at once, for measuring our own cost (null/).
//
// No order is promised: packets and their bytes arrive in any order, a completion may be late, and
// immediate data may come before the bytes that it announces.
namespace mooncake {

// A peer's card, as an index into the address table of one of our cards.
using NicPeer = uint64_t;

// The data that a peer needs to reach registered memory through one card. Wire form: two u64 in
// this order.
struct NicKey {
  uint64_t key = 0;
  uint64_t base = 0;  // added to an offset into the memory: its address, or 0
};

// Memory that one card may touch while this object lives. Its destructor withdraws the key: later
// requests of a peer with it fail.
class NicMemory {
 public:
  virtual ~NicMemory() = default;
  virtual std::span<std::byte> memory() const = 0;
  virtual NicKey key() const = 0;
};

enum class NicAccess : uint32_t {
  kLocal = 0,  // source or target of our own operations
  kRemoteRead = 1,
  kRemoteWrite = 2,  // can be combined with kRemoteRead by |
};

// A range of memory here that this card has registered.
struct NicBuffer {
  std::span<std::byte> bytes;
  const NicMemory* memory = nullptr;
};

enum class NicError : uint8_t {
  kNone,
  kRefused,      // the key, range or right is wrong: the peer lives
  kUnreachable,  // the peer's card did not answer, is gone, or has no buffer for us. Some cards
                 // also report a refusal that ends the connection like this (tcp;ofi_rxm)
  kCancelled,    // by close(), or by remove() of the peer
  kDevice,       // our own card does not work any more
};

struct NicCompletion {
  enum class Kind : uint8_t { kSent, kReceived, kRead, kWritten };
  Kind kind = Kind::kSent;
  NicError error = NicError::kNone;
  uint64_t bytes = 0;       // number of received bytes
  void* context = nullptr;  // of the operation
  int providerError = 0;    // for the log: the provider's number, see its strerror()
  // The time limit or close() ended it, not the card, which may still read or write the memory.
  // That memory must not be reused before the card is closed.
  bool abandoned = false;
};

struct NicLimits {
  uint64_t mostSendBytes = 0;  // of one packet
  uint64_t mostRmaBytes = 0;   // of one read or write; 0: the card can do neither
  size_t sendDepth = 0;        // operations under way at once
  size_t receiveDepth = 0;
  uint64_t mostMemoryBytes = 0;  // of one registration; 0: no limit
  bool remoteRead = false;
  bool remoteWrite = false;
  bool deviceMemory = false;
  // After a NicMemory is destroyed, no byte lands in it any more, not even of an operation that a
  // peer had begun. If false, only close() guarantees that.
  bool withdrawalStops = false;
  // close() ends reads under way, like all other operations. If false, close() during a read may
  // crash the process: do not read over a link that can fail.
  bool closeEndsReads = true;
};

// How long a thread that polls several cards may sleep as far as one card is concerned, and the
// descriptors that wake it earlier.
struct NicSleep {
  static constexpr auto kNap = std::chrono::microseconds(200);

  Clock::time_point until;
  std::array<int, 2> descriptors{-1, -1};  // to read from
  bool yields = false;                     // any sleep would be too long: only yield the processor
};

// Any thread may call it, except close() and the destructor, which come last. No call waits for a
// peer.
class Nic {
 public:
  virtual ~Nic() = default;

  virtual const std::string& name() const = 0;  // the device: "rdmap79s0", "eth1"
  virtual const char* provider() const = 0;     // "efa", "tcp;ofi_rxm", "sim", "null"
  virtual const NicLimits& limits() const = 0;
  // Returns the address that a peer inserts. Opaque; at most 256 bytes.
  virtual Bytes address() const = 0;

  // Returns the same peer for the same address.
  virtual Result<NicPeer> insert(ByteView address) = 0;
  // Operations under way to the peer end with kCancelled, if the card can tell. The number is never
  // reused.
  virtual void remove(NicPeer peer) = 0;

  virtual Result<std::unique_ptr<NicMemory>> registerMemory(std::span<std::byte> memory,
                                                            uint32_t access) = 0;

  // Ok: begun. kExhausted: the queue is full, which is normal; try again after a completion. Each
  // begun operation gives one completion within the card's own time limit, even if the peer or the
  // card dies. A write is complete when its bytes are in the peer's memory. A packet is header and
  // body, gathered; both must stay unchanged until the completion.
  virtual Status send(NicPeer peer, NicBuffer header, NicBuffer body, void* context) = 0;
  virtual Status receive(NicBuffer buffer, void* context) = 0;
  virtual Status read(NicPeer peer, NicBuffer target, NicKey from, uint64_t offset,
                      void* context) = 0;
  virtual Status write(NicPeer peer, NicBuffer source, NicKey to, uint64_t offset,
                       void* context) = 0;

  // Returns completions, at most as many as fit. One thread at a time. Cards that need the
  // processor make progress only in this call.
  virtual size_t poll(std::span<NicCompletion> into) = 0;
  // Sleeps until poll() may find a completion, the deadline passes, or wake() is called. Called by
  // the polling thread. A card without a descriptor naps, briefly while operations are under way.
  virtual void wait(Deadline deadline) = 0;
  virtual void wake() = 0;
  // The same for a thread that polls several cards: it sleeps at all of them between these two
  // calls. A card without a descriptor is polled again after a nap.
  virtual NicSleep fallAsleep(Deadline deadline) {
    return {.until = std::min<Clock::time_point>(deadline.when(), Clock::now() + NicSleep::kNap)};
  }
  virtual void awake() {}

  // Ends all operations under way with kCancelled, which poll() reports; withdraws all keys.
  virtual void close() = 0;
};

}  // namespace mooncake
