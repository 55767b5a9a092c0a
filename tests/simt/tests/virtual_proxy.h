#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/remote.h"
#include "proxy/command_ring.h"
#include "tests/simt/world.h"

namespace mooncake::kernels {

// The proxy of a virtual rank: takes commands of its kernels and carries them out as csrc/proxy does
// over a bad wire. Data arrive torn and out of order, some time after they have left, also when their
// sender has died or has ended the ring. Commands that have not completed may be repeated, from the
// source as it is then; bytes of the first attempt may land after those of the second one. A seed
// decides.
class VirtualProxy {
 public:
  static constexpr uint64_t kTimeoutNs = 200'000'000;

  VirtualProxy(simt::World& world, int rank, int ranks, uint64_t seed);
  VirtualProxy(const VirtualProxy&) = delete;
  VirtualProxy& operator=(const VirtualProxy&) = delete;

  ProxyView view();
  // After so many commands to a rank, takes none until this time.
  void delay(int peer, uint32_t after, uint64_t untilNs) {
    rings_[size_t(peer)].delayAfter = after;
    rings_[size_t(peer)].delayUntilNs = untilNs;
  }
  // Bytes of all commands to a rank.
  struct Bytes {
    uint64_t data = 0, mails = 0;
  };
  Bytes bytesTo(int peer) const { return rings_[size_t(peer)].bytes; }
  // Where commands of this rank read and write. Mails begin at these offsets of the second region.
  void setRegions(std::span<unsigned char> own, std::span<unsigned char> inbox,
                  std::vector<size_t> mails);
  // As Proxy::end(): ends the rings of these ranks. Returns whether they have ended. One thread.
  bool end(uint64_t ranks);
  // The body of a host thread, until `isOver` returns true.
  void run(const std::vector<VirtualProxy*>& all, const std::function<bool()>& isOver);

 private:
  struct Piece {
    size_t begin, end;
  };
  struct UnderWay {
    explicit UnderWay(const ProxyCommand& command) : command(command) {}
    bool hasArrived() const { return left.empty() && *flying == 0; }
    ProxyCommand command;
    std::vector<Piece> left;
    std::shared_ptr<unsigned> flying = std::make_shared<unsigned>(0);  // number of pieces
    bool isSignalled = false, isRepeated = false;
  };
  // A piece of a command that has left.
  struct Flying {
    std::vector<unsigned char> bytes;
    unsigned char* to = nullptr;
    bool isMail = false, isRepeated = false;
    uint64_t due = 0;                 // Ring::looks from which on it may land
    std::shared_ptr<unsigned> count;  // UnderWay::flying
  };
  struct Ring {
    proxy::CommandRing commands;
    std::deque<UnderWay> underWay;
    std::vector<Flying> flying;
    uint64_t looks = 0;               // at `flying`
    std::vector<uint64_t> signalled;  // by word
    bool hasEnded = false;
    Bytes bytes;
    uint32_t taken = 0, delayAfter = 0;
    uint64_t delayUntilNs = 0;
  };

  unsigned draw(unsigned below);
  // One step for a peer. Returns whether there was one.
  bool step(int peer, VirtualProxy& other);
  bool take(int peer, VirtualProxy& other);
  void cut(UnderWay& one);
  void send(Ring& ring, VirtualProxy& other, UnderWay& one);
  // May land a piece. Returns whether there is one.
  bool land(Ring& ring);
  void signal(int peer, VirtualProxy& other);
  void endDropped();
  void end(Ring& ring, ProxyEnd why);
  bool isMail(size_t offset) const;
  void pass();  // lets other threads run, and faults come

  simt::World& world_;
  const int rank_;
  uint64_t random_;
  const uint32_t slots_;
  const bool endsRings_;  // of lost ranks, soon
  const bool isSlow_;     // some pieces fly for long
  std::vector<ProxyCommand> commands_;
  std::vector<ProxyCounts> counts_;
  std::vector<ProxyTickets> tickets_;
  std::vector<uint64_t> signals_;
  std::span<unsigned char> regions_[2];
  std::vector<size_t> mails_;
  std::vector<Ring> rings_;
  // The piece that is under copy: a killed rank's thread ends anywhere, and frees nothing.
  std::vector<unsigned char> leaving_;
  Flying landing_;
  uint64_t dropped_ = 0, ended_ = 0;  // bits of ranks
  uint32_t passed_ = 0;
};

}  // namespace mooncake::kernels
