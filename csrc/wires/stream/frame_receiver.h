#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "engine/memory/region_table.h"
#include "wires/stream/landings.h"
#include "wires/stream/transfer_table.h"
#include "wires/stream/wire.h"

namespace mooncake {

// Parses one connection's bytes and writes payloads to their targets, straight from the socket. Not
// thread-safe: the connection's receive lock guards it.
//
// A region is opened for each system call and not held in between, as in SendQueue. If memory is
// revoked while a put arrives, no further byte is written, and the put's rest is read and dropped.
// If memory is not mapped, the arriving transfer ends the same way. The connection goes on.
//
// Payloads for a device arrive in pinned buffers. If none is free, nothing more is read until a copy
// to the device has ended. A transfer ends, and is answered, after its last copy.
class FrameReceiver {
 public:
  // All of them run under the receive lock.
  struct Events {
    std::function<bool(const wire::Header& get)> onGet;  // false: too many gets
    // Called when a write of the peer has ended.
    std::function<void(uint64_t request, wire::AnswerStatus how)> onWritten;
    std::function<bool(const wire::Header& pull)> onPull;  // false: this wire has no pulls
    std::function<void(uint64_t request)> onUnpullable;    // our pull cannot be made: send it
    // Returns when a sending thread has noted which bytes have left: an answer may come before
    // that.
    std::function<void()> awaitSender;
  };

  FrameReceiver(RegionTable& regions, TransferTable& transfers, Events events)
      : regions_(regions), transfers_(transfers), events_(std::move(events)) {}

  // Ends the transfers whose copies to devices have ended.
  void endLanded();
  // Copies to devices. The caller looks for ended ones, by endLanded().
  DeviceCopies& copies() { return landings_.copies(); }
  // For a connection that has ended, when no copy is under way.
  void freeCopies() {
    landings_.clear();
    landings_.copies().free();
  }
  // Returns whether receive() reads nothing before a copy to a device has ended.
  bool isBlocked() { return blockedBy_ && !copies().hasRoom(blockedBy_); }

  enum class Stop { kDrained, kBudget, kGoodbye };
  // Returns the messages that have arrived since the last call.
  std::vector<Bytes> takeMessages() { return std::exchange(messages_, {}); }
  // Returns whether the peer has asked for more connections since the last call.
  bool takeLanesWanted() { return std::exchange(lanesWanted_, false); }
  // Returns whether the peer has retired this connection since the last call.
  bool takeRetired() { return std::exchange(retired_, false); }
  // From now on no put and no write changes memory, not even the rest of one that has begun.
  void refuseWrites() {
    refusesWrites_ = true;
    if (inFrame_ && frame_.kind == wire::Kind::kPut) dropped_ = true;
    if (isWriting_) writeStatus_ = wire::AnswerStatus::kAborted;
  }
  // For a new connection: drops a partly received frame. Writes stay refused.
  void restart() {
    kept_ = 0;
    inFrame_ = dropped_ = goodbye_ = lanesWanted_ = retired_ = isWriting_ = false;
    left_ = 0;
    leastReadable_ = 1;
    arriving_.clear();
    messages_.clear();
    landings_.clear();
    unread_.clear();
    blockedBy_ = {};
  }
  // Number of all bytes ever received. Any thread.
  uint64_t receivedBytes() const { return received_.load(std::memory_order_relaxed); }
  // Reads until nothing is left, or about `budget` bytes. kPeerLost: the stream has ended.
  // kProtocol: the bytes do not decode.
  Result<Stop> receive(int socket, size_t budget);

 private:
  // Target of the next payload bytes; no data: the bytes are dropped.
  struct Sink {
    std::byte* data = nullptr;
    size_t bytes = 0;
    RegionTable::Use use;
    bool isOfProgram = false;  // the memory may be unmapped
  };
  Sink openSink(size_t room);
  Sink openBuffer(const MemoryOwner& device, size_t room);
  void landPiece();
  void landWrite();
  void failOfDevice(const Error& cause);
  void logOfDevice(const Error& cause);
  void finish(uint64_t get, wire::AnswerStatus status);
  bool copy(const Sink& sink, ByteView bytes);
  void onFault();
  RegionTable::Use openSignal();

  Status consume(ByteView bytes);
  Status beginFrame(ByteView header);
  Status beginPiece();
  Status beginWrite();
  Status endFrame();
  Status endAnswer();
  void endWrite();
  void took(uint64_t bytes);
  void refuse(const char* what);
  Result<size_t> readSome(int socket, size_t budget, bool& drained);
  void awaitRest(int socket, size_t taken);

  RegionTable& regions_;
  TransferTable& transfers_;
  const Events events_;

  // The beginning of a header that has not arrived completely.
  wire::HeaderBytes start_;
  size_t kept_ = 0;
  bool isBulk_ = false;  // the last payload was large

  wire::Header frame_;
  bool inFrame_ = false;
  uint64_t left_ = 0;      // bytes of the frame's payload
  int leastReadable_ = 1;  // the socket's SO_RCVLOWAT
  bool dropped_ = false;   // the frame's payload has no target, or none any more
  Bytes arriving_;         // the message that this frame carries
  std::vector<Bytes> messages_;
  bool refusesWrites_ = false;
  // The peer's write under way: its first header, its bytes so far, and its outcome so far.
  bool isWriting_ = false;
  wire::Header write_;
  uint64_t written_ = 0;
  wire::AnswerStatus writeStatus_ = wire::AnswerStatus::kOk;
  uint64_t writes_ = 0;  // number of the peer's writes so far, with this one

  Landings landings_;
  MemoryOwner blockedBy_;  // the device whose buffers were all in use
  Bytes unread_;           // bytes from the socket that wait for a buffer
  Bytes reading_;          // the same while they are consumed
  std::atomic<uint64_t> received_{0};
  bool goodbye_ = false;
  bool lanesWanted_ = false;
  bool retired_ = false;
  bool loggedRefusal_ = false;
  bool loggedFault_ = false;
  bool loggedDevice_ = false;
};

}  // namespace mooncake
