#include "engine/stream/frame_receiver.h"

#include <cerrno>
#include <sys/socket.h>
#include <sys/uio.h>

#include "base/log.h"

namespace mooncake {
namespace {

Error protocolError(const char* what) { return {ErrorCode::kProtocol, what}; }

std::atomic<uint64_t>& wordAt(std::byte* address) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(address);
}

bool isAligned(const std::byte* address) { return reinterpret_cast<uintptr_t>(address) % 8 == 0; }

}  // namespace

Result<FrameReceiver::Stop> FrameReceiver::receive(int socket, size_t budget) {
  for (size_t taken = 0; taken < budget;) {
    bool drained = false;
    const auto got = readSome(socket, budget - taken, drained);
    if (!got.ok()) return got.error();
    taken += *got;
    MOONCAKE_TRY(consumeBuffer());
    if (goodbye_) return Stop::kGoodbye;
    if (drained) return Stop::kDrained;
  }
  return Stop::kBudget;
}

// One system call: the payload's rest straight into its place, what follows into the buffer. The
// buffer holds less than a header here, and nothing at all inside a payload: consumeBuffer() sees
// to that.
Result<size_t> FrameReceiver::readSome(int socket, size_t budget, bool& drained) {
  Sink sink;
  if (inFrame_) sink = openSink(std::min<uint64_t>(left_, budget));
  iovec parts[2];
  size_t count = 0;
  if (sink.data) parts[count++] = {sink.data, sink.bytes};
  const bool buffers = !sink.data || sink.bytes == left_;
  if (buffers) parts[count++] = {buffer_.data() + end_, buffer_.size() - end_};

  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  const ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT);
  if (got < 0) {
    if (errno == EINTR) return size_t(0);
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      return Error{ErrorCode::kPeerLost, systemError("recvmsg", errno).message};
    }
    drained = true;
    return size_t(0);
  }
  if (got == 0)
    return Error{ErrorCode::kPeerLost, "the peer closed the connection without a goodbye"};

  const size_t bytes = static_cast<size_t>(got);
  received_.fetch_add(bytes, std::memory_order_relaxed);
  const size_t direct = std::min(bytes, sink.bytes);
  if (direct > 0) {
    left_ -= direct;
    if (frame_.kind == wire::Kind::kPiece) gets_.received(*gets_.find(frame_.request), direct);
  }
  end_ += bytes - direct;
  // A call that did not fill its vectors emptied the socket; should more have come since, epoll
  // tells.
  drained = bytes < sink.bytes + (buffers ? parts[count - 1].iov_len : 0);
  return bytes;
}

Status FrameReceiver::consumeBuffer() {
  for (;;) {
    if (!inFrame_) {
      if (buffered() < wire::kHeaderBytes) break;
      MOONCAKE_TRY(beginFrame());
    }
    while (left_ > 0 && buffered() > 0) {
      const Sink sink = openSink(std::min<uint64_t>(left_, buffered()));
      if (sink.data) std::memcpy(sink.data, buffer_.data() + begin_, sink.bytes);
      const size_t taken = sink.data ? sink.bytes : std::min<uint64_t>(left_, buffered());
      begin_ += taken;
      left_ -= taken;
      if (frame_.kind == wire::Kind::kPiece) gets_.received(*gets_.find(frame_.request), taken);
    }
    if (left_ > 0) break;
    MOONCAKE_TRY(endFrame());
    if (goodbye_) break;
  }
  std::memmove(buffer_.data(), buffer_.data() + begin_, buffered());
  end_ -= begin_;
  begin_ = 0;
  return {};
}

Status FrameReceiver::beginFrame() {
  const auto header = wire::decode({buffer_.data() + begin_, wire::kHeaderBytes});
  if (!header.ok()) return header.error();
  begin_ += wire::kHeaderBytes;
  frame_ = *header;
  inFrame_ = true;
  dropped_ = refusesPuts_ && frame_.kind == wire::Kind::kPut;
  const bool hasPayload = frame_.kind != wire::Kind::kGet && frame_.kind != wire::Kind::kAnswer;
  left_ = hasPayload ? frame_.length : 0;
  if (frame_.kind == wire::Kind::kMessage) arriving_.resize(frame_.length);
  if (frame_.kind == wire::Kind::kPiece) {
    const GetTable::Get* get = gets_.find(frame_.request);
    if (!get) return protocolError("an answer came that nobody asked for");
    if (frame_.offset != get->received || frame_.length > get->bytes - get->received) {
      return protocolError("an answer's piece does not fit");
    }
  }
  return {};
}

FrameReceiver::Sink FrameReceiver::openSink(size_t room) {
  if (dropped_ || left_ == 0) return {};
  if (frame_.kind == wire::Kind::kPiece) {
    const GetTable::Get* get = gets_.find(frame_.request);
    if (!get->completion) return {};  // cancelled
    return {get->target + get->received, room, {}};
  }
  if (frame_.kind == wire::Kind::kMessage) {
    return {arriving_.data() + (frame_.length - left_), room, {}};
  }
  const RegionTable::Use signal = regions_.open(frame_.key, frame_.signalOffset, 8, kRemoteWrite);
  if (!signal || !isAligned(signal.data())) {
    refuse();
    return {};
  }
  if (!canStamp(wordAt(signal.data()), frame_.stamp)) {
    dropped_ = true;  // we are late
    return {};
  }
  const uint64_t position = frame_.length - left_;
  // The whole range first: a put that leaves the region writes nothing, not even the part inside.
  RegionTable::Use use = regions_.open(frame_.key, frame_.offset, frame_.length, kRemoteWrite);
  if (!use || frame_.offset < sizeof(Doorbell)) {
    refuse();
    return {};
  }
  std::byte* data = use.data() + position;
  return {data, room, std::move(use)};
}

Status FrameReceiver::endFrame() {
  inFrame_ = false;
  switch (frame_.kind) {
    case wire::Kind::kPut: {
      if (dropped_) return {};
      const RegionTable::Use use = regions_.open(frame_.key, frame_.signalOffset, 8, kRemoteWrite);
      if (!use || !isAligned(use.data())) {
        refuse();
        return {};
      }
      if (tryStamp(wordAt(use.data()), frame_.stamp))
        reinterpret_cast<Doorbell*>(use.regionStart())->ring();
      return {};
    }
    case wire::Kind::kGet:
      if (!onGet_(frame_)) return protocolError("the peer has too many gets under way");
      return {};
    case wire::Kind::kPiece:
      return {};
    case wire::Kind::kAnswer: {
      const GetTable::Get* get = gets_.find(frame_.request);
      if (!get) return protocolError("an answer came that nobody asked for");
      const bool ok = frame_.status == wire::AnswerStatus::kOk;
      if (ok && get->received != get->bytes) return protocolError("an answer ended too early");
      const bool aborted = frame_.status == wire::AnswerStatus::kAborted;
      gets_.finish(frame_.request, ok        ? ErrorCode::kOk
                                   : aborted ? ErrorCode::kAborted
                                             : ErrorCode::kRefused);
      return {};
    }
    case wire::Kind::kMessage:
      messages_.push_back(std::exchange(arriving_, {}));
      return {};
    case wire::Kind::kGoodbye:
      goodbye_ = true;
      return {};
    case wire::Kind::kBeat:
      return {};
    case wire::Kind::kLanes:
      lanesWanted_ = true;
      return {};
  }
  return {};
}

void FrameReceiver::refuse() {
  dropped_ = true;
  if (std::exchange(loggedRefusal_, true)) return;
  log(LogLevel::kWarning, "stream", "a put outside of the registered regions was refused: key ",
      frame_.key, ", offset ", frame_.offset, ", ", frame_.length,
      " bytes; further ones on this connection are only counted");
}

}  // namespace mooncake
