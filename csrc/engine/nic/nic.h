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
// libfabric (libfabric/), a card that is worse than any real one (sim/), and one that completes at
// once and measures what we cost ourselves (null/).
//
// The order is nobody's promise: packets and their bytes arrive in any order, a completion may be
// late, and immediate data may come before the bytes that it announces.
namespace mooncake {

// A peer's card, in the address table of one of ours.
using NicPeer = uint64_t;

// What a peer needs to reach registered memory through one card. Wire form: two u64 in this order.
struct NicKey {
  uint64_t key = 0;
  uint64_t base = 0;  // added to an offset into the memory: its address, or 0
};

// Memory that one card may touch, for as long as this object lives. Its destructor withdraws the
// key: what a peer still asks under it fails.
class NicMemory {
 public:
  virtual ~NicMemory() = default;
  virtual std::span<std::byte> memory() const = 0;
  virtual NicKey key() const = 0;
};

enum class NicAccess : uint32_t {
  kLocal = 0,  // source and target of our own operations
  kRemoteRead = 1,
  kRemoteWrite = 2,  // these two by or
};

// Bytes here, in memory that this card has registered.
struct NicBuffer {
  std::span<std::byte> bytes;
  const NicMemory* memory = nullptr;
};

enum class NicError : uint8_t {
  kNone,
  kRefused,      // the key, the range or the right: the peer lives
  kUnreachable,  // the peer's card did not answer, is gone, or has no buffer for us. Also what a
                 // card says of a refusal that ends its connection (tcp;ofi_rxm)
  kCancelled,    // by close(), or remove() of the peer
  kDevice,       // our own card: nothing works there any more
};

struct NicCompletion {
  enum class Kind : uint8_t { kSent, kReceived, kRead, kWritten };
  Kind kind = Kind::kSent;
  NicError error = NicError::kNone;
  uint64_t bytes = 0;       // of what was received
  void* context = nullptr;  // of the operation
  int providerError = 0;    // for the log: strerror() of the provider's
  // It ended by the time limit or by close(), not by the card, which may still read or write the
  // memory: that serves nothing else until the card is closed.
  bool abandoned = false;
};

struct NicLimits {
  uint64_t mostSendBytes = 0;  // of one packet
  uint64_t mostRmaBytes = 0;   // of one read or write; 0: the card does neither
  size_t sendDepth = 0;        // operations under way at once
  size_t receiveDepth = 0;
  uint64_t mostMemoryBytes = 0;  // of one registration; 0: any
  bool remoteRead = false;
  bool remoteWrite = false;
  bool deviceMemory = false;
  // Once a NicMemory is gone nothing lands in it any more, also not of what a peer had begun. Where
  // this does not hold only close() stops that.
  bool withdrawalStops = false;
  // close() ends reads that are under way, as it ends all else. Where this does not hold it may
  // crash the process: read nothing there whose link can fail.
  bool closeEndsReads = true;
};

// Until when a thread that polls several cards may sleep for the sake of one of them, and what
// wakes it earlier.
struct NicSleep {
  static constexpr auto kNap = std::chrono::microseconds(200);

  Clock::time_point until;
  std::array<int, 2> descriptors{-1, -1};  // to read from
  bool yields = false;  // any sleep were too long: the processor is only offered to others
};

// Every call from any thread but close() and the destructor, which come last. No call waits for a
// peer.
class Nic {
 public:
  virtual ~Nic() = default;

  virtual const std::string& name() const = 0;  // of the device: "rdmap79s0", "eth1"
  virtual const char* provider() const = 0;     // "efa", "tcp;ofi_rxm", "sim", "null"
  virtual const NicLimits& limits() const = 0;
  // What a peer inserts. Opaque; at most 256 bytes.
  virtual Bytes address() const = 0;

  // The same address gives the same peer.
  virtual Result<NicPeer> insert(ByteView address) = 0;
  // What is under way to it ends, if the card can tell, with kCancelled; nothing of the number is
  // used again.
  virtual void remove(NicPeer peer) = 0;

  virtual Result<std::unique_ptr<NicMemory>> registerMemory(std::span<std::byte> memory,
                                                            uint32_t access) = 0;

  // Begun, or kExhausted: the queue is full at the moment, which is normal; try again after a
  // completion. Each that was begun gives one completion, also when the peer or the card dies,
  // within the card's own time limit. A written one is complete when its bytes are in the peer's
  // memory. A packet is header and body, gathered; both stay as they are until the completion.
  virtual Status send(NicPeer peer, NicBuffer header, NicBuffer body, void* context) = 0;
  virtual Status receive(NicBuffer buffer, void* context) = 0;
  virtual Status read(NicPeer peer, NicBuffer target, NicKey from, uint64_t offset,
                      void* context) = 0;
  virtual Status write(NicPeer peer, NicBuffer source, NicKey to, uint64_t offset,
                       void* context) = 0;

  // Takes what has completed, at most as many as fit; by one thread at a time. This is also what
  // moves cards that need the processor to make progress.
  virtual size_t poll(std::span<NicCompletion> into) = 0;
  // Sleeps until poll() may find something, or the deadline, or wake(). By the thread that polls.
  // A card without a descriptor to sleep at naps, short ones while something is under way.
  virtual void wait(Deadline deadline) = 0;
  virtual void wake() = 0;
  // The same for a thread that polls several cards: it sleeps at all of them between these two.
  // A card that cannot be slept at so is looked at again after a nap.
  virtual NicSleep fallAsleep(Deadline deadline) {
    return {.until = std::min<Clock::time_point>(deadline.when(), Clock::now() + NicSleep::kNap)};
  }
  virtual void awake() {}

  // Ends everything under way with kCancelled where poll() still asks; withdraws all keys.
  virtual void close() = 0;
};

}  // namespace mooncake
