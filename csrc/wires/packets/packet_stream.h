#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"
#include "engine/contract/transfer.h"
#include "engine/memory/region_table.h"
#include "wires/packets/incoming.h"
#include "wires/packets/out_packet.h"
#include "wires/packets/paths.h"
#include "wires/packets/put_queue.h"
#include "wires/packets/sent_packets.h"

namespace mooncake {

// Puts, gets and writes as packets, between this end of a channel and the peer's. Each packet has a
// serial and is kept until the peer acknowledges it. If a path fails, its packets leave again over
// another one. A packet that is lost alone leaves again, too. Received packets count once, in any order.
//
// Packets and the time come in from outside, and packets go out to a function of the caller. There
// is no card, thread or lock here: the channel guards a stream with its own lock.
class PacketStream {
 public:
  // Number of packets that the peer has not acknowledged, for each path that is up: 8 MiB of the
  // largest packets, 2 MiB of tcp;ofi_rxm's packets. So a link of 1 Gbit/s stays busy while both
  // processors do something else for 60 ms, or for 16 ms.
  static constexpr size_t kWindow = 128;
  // The same for all paths together: the peer holds at most 64 MiB of packets that come too early.
  static constexpr size_t kMostWindow = 512;

  struct Options {
    const char* name = "fabric";         // for the log
    std::vector<std::string> pathNames;  // for the log; as many as paths
    size_t packetBytes = 0;              // length of our buffers
    // A transfer of at least this size goes over all paths. If fewer transfers than paths are under
    // way, a sixteenth of this is enough, because other transfers do not keep the paths busy.
    size_t splitBytes = 0;
    // How long a path may have packets under way without an acknowledgement before it has stalled.
    Clock::duration stallLimit = {};
  };
  PacketStream(Options options, RegionTable& regions, PacketPool& pool);

  // ---- the connection
  // Begins when the peer has said these two values. Nothing leaves before.
  void open(uint64_t incarnation, size_t packetBytes);
  bool isOpen() const { return peer_.has_value(); }
  // Leaves out all paths: the first one is up when the peer has answered a probe over it.
  void awaitProbes(Clock::time_point now);
  // The connection has broken: nothing is answered until restart(). Puts stay for flushPuts().
  void breakOff();
  // Begins a new connection, of which nothing leaves before open(). Received packets are held until
  // release(). The caller ends all transfers first.
  void restart();
  // Returns the packets that were held. The caller gives them to land().
  std::vector<std::pair<Packet, Bytes>> release();
  bool isHeld() const { return isHeld_; }
  // The peer is out: from now on only its acknowledgements count, and puts to it are dropped.
  // Returns the writes of the peer that have landed, and that it may not know of.
  std::vector<uint64_t> fence(Clock::time_point now);
  // The peer says that we are out: nothing of ours would land.
  void shutOut(Clock::time_point now);
  // Drops everything. After finishAll() and flushPuts().
  void close();

  // ---- requests
  bool hasRoomForPut(size_t bytes) const { return puts_.hasRoomFor(bytes); }
  // Queues a put and returns its number. `request.data` must stay until copyUnsent().
  uint64_t put(const PutRequest& request);
  // Copies the part of this put that has not left, so that its caller may reuse the data.
  void copyUnsent(uint64_t number) { puts_.copyUnsent(number); }
  // Puts a word after the bytes that it announces have landed. Dropped if no put would count.
  void announce(const RemoteSignal& signal);

  // A get or a write of ours over packets.
  struct Transfer {
    std::span<std::byte> target;  // of a get
    Completion* completion = nullptr;
    uint64_t arrived = 0;       // bytes of a get
    uint64_t whole = 0;         // number of the card transfer that this is a part of, or 0
    RemoteSignal announcement;  // of a write
  };
  // Range of the peer's memory.
  struct Range {
    uint64_t key = 0, offset = 0;
  };
  void get(Range from, const Transfer& transfer);
  void write(Range to, std::span<const std::byte> source, const Transfer& transfer);
  // Expects the answer to a get that the peer was asked for in another way.
  void expectAnswer(uint64_t number, const Transfer& transfer);
  // Number of transfers without an end.
  size_t transfers() const { return transfers_.size(); }
  // Returns a number for a request, which is never used again.
  uint64_t nextNumber() { return ++lastNumber_; }
  // Returns the rail with which the next transfer begins, if several have equally little to do.
  uint64_t nextRail() { return nextRail_++; }
  // Returns from which size on a transfer goes over all paths.
  uint64_t splitBytes(bool isOneOfFew) const {
    return isOneOfFew ? options_.splitBytes / 16 : options_.splitBytes;
  }

  // The end of a part of a card transfer.
  struct PartEnd {
    uint64_t whole = 0;
    ErrorCode code = ErrorCode::kOk;
  };
  // Ends one transfer. Returns the end of the part, if the transfer is one.
  std::optional<PartEnd> finish(uint64_t transfer, ErrorCode code);
  // Ends all transfers. Returns the card transfers that have lost a part, one entry for each part.
  std::vector<uint64_t> finishAll(ErrorCode code);
  // Ends the transfers that count at this completion, except for parts of card transfers. The peer
  // is told that the rest of a write does not come.
  void cancel(const Completion* completion);
  // Answers a get of the peer, or refuses it if the peer has too many.
  void answer(uint64_t number, Range from, uint64_t bytes);

  // ---- received packets
  // The end of a transfer by a packet.
  struct End {
    uint64_t transfer = 0;
    ErrorCode code = ErrorCode::kOk;
  };
  // Effect of a received packet that the caller has to deal with.
  struct Effect {
    std::optional<size_t> answered;  // the path of a probe that the peer has answered
    bool isBack = false;             // that path is up again
    std::optional<End> end;          // to be given to finish()
    // An answer to an unknown get: the caller may call expectAnswer(), and then land() once more.
    bool isUnexpected = false;
  };
  // Takes a packet that came over this path. The data is copied.
  Effect receive(size_t path, const Packet& packet, ByteView data, Clock::time_point now);
  // Takes a put that came another way, ahead of the peer's goodbye.
  void receivePut(const Packet& packet, ByteView data);
  Effect land(const Packet& packet, ByteView data);
  // Takes the peer's word for the packets that have come: all below, and these.
  void acknowledge(uint64_t below, const std::vector<uint64_t>& above, Clock::time_point now) {
    sent_.acknowledge(below, above, now);
  }
  // Returns the packets of the peer that have come.
  const Serials& serials() const { return serials_; }

  // ---- packets that leave
  // Calls `submit(path, packet)` for each probe, answer to a probe and acknowledgement that is due.
  // They are not repeated. Only while the connection is open.
  template <typename Submit>
  void sendPlain(const Submit& submit) {
    while (const auto out = nextPlain()) (void)submit(out->path, out->packet);
  }
  // Calls `submit(path, packet)` for each other packet that may leave now. If that returns false,
  // the path leads nowhere and is left out.
  template <typename Submit>
  void send(Clock::time_point now, const Submit& submit) {
    const auto leave = [&](const Outgoing& out) {
      if (!submit(out.path, out.packet))
        leaveOut(out.path, now, "the peer's card has no address here");
    };
    for (uint64_t from = 0; const auto out = nextRepeated(from, now);) leave(*out);
    while (const auto out = nextNew(now)) leave(*out);
  }
  // Makes acknowledgements, probes and lost packets due, and frees buffers of a peer that
  // acknowledges nothing.
  void tick(Clock::time_point now);
  // Makes a probe of a path due that may be up.
  void probe(size_t path);
  // Returns whether something waits, or is under way, so that ticks are needed.
  bool isBusy() const;
  // Calls `tell(bytes)` for each packet of a put that may not have arrived.
  template <typename Tell>
  void flushPuts(const Tell& tell) {
    for (const auto& [serial, sent] : sent_) {
      if (sent.kind == Packet::Kind::kPut) tell(sent.packet->bytes());
    }
    for (Bytes room(packetBytes()); const auto bytes = nextFlushed(room);) tell(*bytes);
  }
  // Number of packets that the peer has not acknowledged.
  size_t unacknowledged() const { return sent_.size(); }
  uint64_t lastSerial() const { return lastSerial_; }
  // Returns whether pieces of writes up to this serial are not acknowledged.
  bool hasWritesUpTo(uint64_t serial) const;

  // ---- paths
  const Paths& paths() const { return paths_; }
  // Sends nothing over this path until a probe is answered; its packets leave again over another
  // one. `isAnew`: one of its cards was opened anew, so earlier failures count no more.
  void leaveOut(size_t path, Clock::time_point now, const std::string& why, bool isAnew = false);

 private:
  // The end of the peer, as it has described itself.
  struct Peer {
    uint64_t incarnation = 0;
    size_t packetBytes = 0;
  };
  struct Outgoing {
    size_t path = 0;
    std::shared_ptr<OutPacket> packet;
  };
  // A probe or an answer to one.
  struct Plain {
    Packet::Kind kind;
    uint64_t number = 0;
    size_t path = 0;
  };
  // Received packets that the peer has not heard of.
  struct Owed {
    size_t count = 0;
    Clock::time_point due;
    bool isWanted = false;  // an acknowledgement leaves with the next sendPlain()
  };

  uint64_t firstUnacknowledgedPut() const;
  bool putsCount() const { return !isOut_ && !isFenced_ && !isLost_; }
  size_t packetBytes() const;
  std::optional<Outgoing> nextPlain();
  std::optional<Outgoing> nextRepeated(uint64_t& from, Clock::time_point now);
  std::optional<Outgoing> nextNew(Clock::time_point now);
  std::optional<Outgoing> nextOf(PacketSource& source, Clock::time_point now, bool& isLast);
  std::optional<ByteView> nextFlushed(Bytes& room);
  std::shared_ptr<OutPacket> makePlain(Packet packet, std::span<const uint64_t> numbers);
  size_t fill(PacketSource& source, std::span<std::byte> out, bool& isLast);
  void moveSentOut(Clock::time_point now);
  void owe(Clock::time_point now);
  bool admit(const Packet& packet, size_t dataBytes);
  Effect landAnswer(const Packet& answer, ByteView data);
  void dropBulk();

  const Options options_;
  RegionTable& regions_;
  PacketPool& pool_;
  PacketPool::Share buffers_;  // of this channel's packets
  std::optional<Peer> peer_;   // empty before open()
  bool isLost_ = false;        // from breakOff() to restart()
  bool isFenced_ = false;
  bool isOut_ = false;

  // Packets that leave.
  Paths paths_;
  uint64_t nextRail_ = 0;
  PutQueue puts_;
  std::deque<PacketSource> bulk_;  // gets, answers and writes
  bool isBulksTurn_ = false;
  uint64_t lastNumber_ = 0, lastSerial_ = 0;
  SentPackets sent_{paths_};
  std::deque<Plain> plain_;
  std::map<uint64_t, Transfer> transfers_;  // ours, by number

  // Packets that arrive.
  Serials serials_;
  Incoming incoming_;
  bool isHeld_ = false;  // from restart() to release()
  std::vector<std::pair<Packet, Bytes>> held_;
  Owed owed_;
  size_t answering_ = 0;  // gets of the peer
  uint64_t bad_ = 0;      // packets that break the rules
};

}  // namespace mooncake
