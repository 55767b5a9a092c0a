#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "engine/memory/region_table.h"
#include "engine/stream/transfer_table.h"
#include "engine/stream/wire.h"

namespace mooncake {

// Takes one connection's bytes apart and puts them where they belong, straight from the socket. Not
// thread-safe: the connection's receive lock guards it.
//
// A region is opened for each system call and not held in between, as in SendQueue. Memory that is
// revoked while a put arrives takes no further byte; the put's rest is read and dropped. Memory
// that is not mapped ends the transfer that arrives, likewise: the connection goes on.
class FrameReceiver {
 public:
  // Under the receive lock.
  struct Events {
    std::function<bool(const wire::Header& get)> onGet;  // false: the peer asks for too much
    // A write of the peer's has come to its end.
    std::function<void(uint64_t request, wire::AnswerStatus how)> onWritten;
    std::function<bool(const wire::Header& pull)> onPull;  // false: not over this wire
    std::function<void(uint64_t request)> onUnpullable;    // of ours: it must be sent
    // Returns when whoever was sending has noted what has left: an answer may be faster.
    std::function<void()> awaitSender;
  };

  FrameReceiver(RegionTable& regions, TransferTable& transfers, Events events)
      : regions_(regions), transfers_(transfers), events_(std::move(events)) {}

  enum class Stop { kDrained, kBudget, kGoodbye };
  // The messages that have arrived since the last call.
  std::vector<Bytes> takeMessages() { return std::exchange(messages_, {}); }
  // Whether the peer has asked for more connections since the last call.
  bool takeLanesWanted() { return std::exchange(lanesWanted_, false); }
  // Whether the peer has retired this connection since the last call.
  bool takeRetired() { return std::exchange(retired_, false); }
  // No put and no write changes anything any more, not even the rest of one that has begun.
  void refuseWrites() {
    refusesWrites_ = true;
    if (inFrame_ && frame_.kind == wire::Kind::kPut) dropped_ = true;
    if (isWriting_) writeStatus_ = wire::AnswerStatus::kAborted;
  }
  // The connection is another one: what has come of a frame goes, what is refused stays refused.
  void restart() {
    kept_ = 0;
    inFrame_ = dropped_ = goodbye_ = lanesWanted_ = retired_ = isWriting_ = false;
    left_ = 0;
    leastReadable_ = 1;
    arriving_.clear();
    messages_.clear();
  }
  // Of everything that ever came. Any thread.
  uint64_t receivedBytes() const { return received_.load(std::memory_order_relaxed); }
  // Reads until nothing is left, or about `budget` bytes. kPeerLost at the end of the stream,
  // kProtocol for bytes that do not decode.
  Result<Stop> receive(int socket, size_t budget);

 private:
  // Where the next bytes of the payload go; no data: they are dropped.
  struct Sink {
    std::byte* data = nullptr;
    size_t bytes = 0;
    RegionTable::Use use;
    bool isOfProgram = false;  // the memory may be unmapped
  };
  Sink openSink(size_t room);
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

  // The beginning of a header that has not come whole.
  wire::HeaderBytes start_;
  size_t kept_ = 0;
  bool isBulk_ = false;  // what came last was large

  wire::Header frame_;
  bool inFrame_ = false;
  uint64_t left_ = 0;      // bytes of the frame's payload
  int leastReadable_ = 1;  // of the socket: SO_RCVLOWAT
  bool dropped_ = false;   // the frame's payload has nowhere to go (any more)
  Bytes arriving_;         // the message whose frame this is
  std::vector<Bytes> messages_;
  bool refusesWrites_ = false;
  // The peer's write that is under way: its first header, and what has come of it.
  bool isWriting_ = false;
  wire::Header write_;
  uint64_t written_ = 0;
  wire::AnswerStatus writeStatus_ = wire::AnswerStatus::kOk;
  std::atomic<uint64_t> received_{0};
  bool goodbye_ = false;
  bool lanesWanted_ = false;
  bool retired_ = false;
  bool loggedRefusal_ = false;
  bool loggedFault_ = false;
};

}  // namespace mooncake
