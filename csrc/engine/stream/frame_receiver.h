#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "engine/memory/region_table.h"
#include "engine/stream/get_table.h"
#include "engine/stream/send_queue.h"
#include "engine/stream/wire.h"

namespace mooncake {

// Takes one connection's bytes apart and puts them where they belong, straight from the socket. Not
// thread-safe: the connection's receive lock guards it.
//
// A region is opened for each system call and not held in between, as in SendQueue. Memory that is
// revoked while a put arrives takes no further byte; the put's rest is read and dropped.
class FrameReceiver {
 public:
  // What a GET is handed to; false: the peer asks for more than it may.
  using OnGet = std::function<bool(const wire::Header&)>;

  FrameReceiver(RegionTable& regions, GetTable& gets, OnGet onGet)
      : regions_(regions), gets_(gets), onGet_(std::move(onGet)) {}

  enum class Stop { kDrained, kBudget, kGoodbye };
  // The messages that have arrived since the last call.
  std::vector<Bytes> takeMessages() { return std::exchange(messages_, {}); }
  // Whether the peer has asked for more connections since the last call.
  bool takeLanesWanted() { return std::exchange(lanesWanted_, false); }
  // No put is written any more, not even the rest of one that has begun.
  void refusePuts() {
    refusesPuts_ = true;
    if (inFrame_ && frame_.kind == wire::Kind::kPut) dropped_ = true;
  }
  // The connection is another one: what has come of a frame goes, what is refused stays refused.
  void restart() {
    begin_ = end_ = 0;
    inFrame_ = dropped_ = goodbye_ = lanesWanted_ = false;
    left_ = 0;
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
  };
  Sink openSink(size_t room);

  size_t buffered() const { return end_ - begin_; }
  Status consumeBuffer();
  Status beginFrame();
  Status endFrame();
  void refuse();
  Result<size_t> readSome(int socket, size_t budget, bool& drained);

  RegionTable& regions_;
  GetTable& gets_;
  OnGet onGet_;

  // Headers and small payloads come through here, so a small frame costs one system call.
  std::array<std::byte, 8192> buffer_;
  size_t begin_ = 0;
  size_t end_ = 0;

  wire::Header frame_;
  bool inFrame_ = false;
  uint64_t left_ = 0;     // bytes of the frame's payload
  bool dropped_ = false;  // the frame's payload has nowhere to go (any more)
  Bytes arriving_;        // the message whose frame this is
  std::vector<Bytes> messages_;
  bool refusesPuts_ = false;
  std::atomic<uint64_t> received_{0};
  bool goodbye_ = false;
  bool lanesWanted_ = false;
  bool loggedRefusal_ = false;
};

}  // namespace mooncake
