#include "wires/stream/frame_receiver.h"

#include <cerrno>
#include <sys/socket.h>
#include <sys/uio.h>

#include "base/log.h"
#include "engine/memory/program_memory.h"

namespace mooncake {
namespace {

// Small frames come through a buffer of the thread, many in one system call. After the rest of a
// large frame, only its end and the next header are read into the buffer. The bytes after these are
// to go straight to their targets.
constexpr size_t kBufferBytes = size_t(64) << 10;
constexpr size_t kBulkBytes = size_t(16) << 10;
constexpr size_t kBehindBulk = 2 * wire::kHeaderBytes;
// Waiting for the rest of a frame pays if the rest is at least kLeastRest, and receive() has just
// taken kFast bytes. At most kMostAwaited bytes are waited for.
constexpr uint64_t kLeastRest = uint64_t(128) << 10;
constexpr size_t kFast = size_t(64) << 10;
constexpr uint64_t kMostAwaited = uint64_t(256) << 10;

std::span<std::byte> threadsBuffer() {
  thread_local std::vector<std::byte> buffer(kBufferBytes);
  return buffer;
}

Error protocolError(const char* what) { return {ErrorCode::kProtocol, what}; }

std::atomic<uint64_t>& wordAt(std::byte* address) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(address);
}

bool isAligned(const std::byte* address) { return reinterpret_cast<uintptr_t>(address) % 8 == 0; }

}  // namespace

Result<FrameReceiver::Stop> FrameReceiver::receive(int socket, size_t budget) {
  size_t taken = 0;
  endLanded();
  if (isBlocked()) return Stop::kDrained;
  blockedBy_ = {};
  if (!unread_.empty()) {
    reading_.swap(unread_);
    unread_.clear();
    MOONCAKE_TRY(consume(reading_));
    if (goodbye_) return Stop::kGoodbye;
  }
  for (bool drained = false; taken < budget && !drained && !blockedBy_;) {
    const auto got = readSome(socket, budget - taken, drained);
    if (!got.ok()) return got.error();
    taken += *got;
    if (goodbye_) return Stop::kGoodbye;
  }
  awaitRest(socket, taken);
  return taken < budget ? Stop::kDrained : Stop::kBudget;
}

// Sets how many bytes must come before the socket is readable again. Waking for each of the few
// packets that come at a time costs a fifth of the rate that two busy cores reach. The number never
// exceeds the frame's rest, or the wait for its end would never finish. It stays 1 on a slow link,
// where the peer's signs of life would be seen late.
void FrameReceiver::awaitRest(int socket, size_t taken) {
  const bool waits = inFrame_ && left_ >= kLeastRest && taken >= kFast;
  const int least = waits ? static_cast<int>(std::min(left_, kMostAwaited)) : 1;
  if (least == leastReadable_) return;
  leastReadable_ = least;
  ::setsockopt(socket, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof(least));
}

// One system call: the payload's rest goes straight to its target, the bytes after it into the
// buffer.
Result<size_t> FrameReceiver::readSome(int socket, size_t budget, bool& drained) {
  Sink sink;
  if (inFrame_) sink = openSink(std::min<uint64_t>(left_, budget));
  if (blockedBy_) return size_t(0);
  std::span<std::byte> buffer = threadsBuffer();
  std::memcpy(buffer.data(), start_.data(), kept_);  // start_ is empty inside a payload
  const bool isDropping = inFrame_ && left_ > 0 && !sink.data;
  const std::span<std::byte> room =
      buffer.subspan(kept_, isBulk_ && !isDropping ? kBehindBulk : kBufferBytes - kept_);
  iovec parts[2];
  size_t count = 0;
  if (sink.data) parts[count++] = {sink.data, sink.bytes};
  const bool buffers = !sink.data || sink.bytes == left_;
  if (buffers) parts[count++] = {room.data(), room.size()};

  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  const ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT);
  if (got < 0) {
    if (errno == EINTR) return size_t(0);
    if (errno == EFAULT && sink.data) {
      onFault();
      return size_t(0);
    }
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
  // A call that did not fill its vectors has emptied the socket. If more has come since, epoll
  // reports it.
  drained = bytes < sink.bytes + (buffers ? room.size() : 0);
  const size_t direct = std::min(bytes, sink.bytes);
  if (direct > 0) took(direct);
  sink.use = {};
  MOONCAKE_TRY(consume(buffer.first(kept_ + bytes - direct)));
  return bytes;
}

// Counts bytes of the frame's payload.
void FrameReceiver::took(uint64_t bytes) {
  left_ -= bytes;
  if (frame_.kind == wire::Kind::kPiece)
    transfers_.received(*transfers_.find(frame_.request), bytes);
}

// Consumes everything but the beginning of a header.
Status FrameReceiver::consume(ByteView bytes) {
  kept_ = 0;
  for (;;) {
    if (!inFrame_) {
      if (bytes.size() < wire::kHeaderBytes) break;
      MOONCAKE_TRY(beginFrame(bytes.first(wire::kHeaderBytes)));
      bytes = bytes.subspan(wire::kHeaderBytes);
    }
    while (left_ > 0 && !bytes.empty()) {
      const Sink sink = openSink(std::min<uint64_t>(left_, bytes.size()));
      if (blockedBy_) {
        unread_.assign(bytes.begin(), bytes.end());
        return {};
      }
      const size_t taken = sink.data ? sink.bytes : std::min<uint64_t>(left_, bytes.size());
      if (sink.data && !copy(sink, bytes.first(taken))) onFault();
      bytes = bytes.subspan(taken);
      took(taken);
    }
    if (left_ > 0) return {};
    MOONCAKE_TRY(endFrame());
    if (goodbye_) return {};
  }
  std::copy(bytes.begin(), bytes.end(), start_.begin());
  kept_ = bytes.size();
  return {};
}

Status FrameReceiver::beginFrame(ByteView bytes) {
  const auto header = wire::decode(bytes);
  if (!header.ok()) return header.error();
  frame_ = *header;
  inFrame_ = true;
  dropped_ = refusesWrites_ && frame_.kind == wire::Kind::kPut;
  left_ = wire::hasPayload(frame_.kind) ? frame_.length : 0;
  if (left_ > 0) isBulk_ = left_ >= kBulkBytes;
  if (frame_.kind == wire::Kind::kMessage) arriving_.resize(frame_.length);
  if (frame_.kind == wire::Kind::kPiece) return beginPiece();
  if (frame_.kind == wire::Kind::kWrite) return beginWrite();
  return {};
}

Status FrameReceiver::beginPiece() {
  const TransferTable::Transfer* get = transfers_.find(frame_.request);
  if (!get || get->isWrite || get->isAnswered)
    return protocolError("an answer came that nobody asked for");
  if (frame_.offset != get->received || frame_.length > get->bytes - get->received) {
    return protocolError("an answer's piece does not fit");
  }
  return {};
}

Status FrameReceiver::beginWrite() {
  const uint64_t position = frame_.signalOffset, whole = frame_.stamp;
  if (!isWriting_) {
    if (position != 0) return protocolError("a write came without its beginning");
    isWriting_ = true;
    write_ = frame_;
    written_ = 0;
    ++writes_;
    writeStatus_ = refusesWrites_ ? wire::AnswerStatus::kAborted : wire::AnswerStatus::kOk;
    // Opens the whole range first: a write that leaves the region changes nothing, not even the
    // part inside.
    if (!refusesWrites_ && frame_.status == wire::AnswerStatus::kOk &&
        !regions_.open(frame_.key, frame_.offset, whole, kRemoteWrite)) {
      refuse("write");
    }
    return {};
  }
  if (frame_.request != write_.request || frame_.key != write_.key ||
      frame_.offset != write_.offset || whole != write_.stamp || position != written_) {
    return protocolError("a write's piece does not fit");
  }
  return {};
}

RegionTable::Use FrameReceiver::openSignal() {
  return regions_.open(wire::signalKey(frame_), frame_.signalOffset, 8, kRemoteWrite);
}

FrameReceiver::Sink FrameReceiver::openSink(size_t room) {
  if (dropped_ || left_ == 0) return {};
  if (frame_.kind == wire::Kind::kPiece) {
    const TransferTable::Transfer* get = transfers_.find(frame_.request);
    if (!get->completion || get->failure.code != ErrorCode::kOk) return {};  // cancelled, or failed
    if (get->owner) return openBuffer(get->owner, room);
    return {get->target + get->received, room, {}, get->isOfProgram};
  }
  if (frame_.kind == wire::Kind::kMessage) {
    return {arriving_.data() + (frame_.length - left_), room, {}};
  }
  if (frame_.kind == wire::Kind::kWrite) {
    if (writeStatus_ != wire::AnswerStatus::kOk) return {};
    RegionTable::Use use = regions_.open(write_.key, write_.offset, write_.stamp, kRemoteWrite);
    if (!use) {
      refuse("write");
      return {};
    }
    if (use.owner()) return openBuffer(use.owner(), room);
    std::byte* data = use.data() + written_ + (frame_.length - left_);
    const bool isOfProgram = use.isOfProgram();
    return {data, room, std::move(use), isOfProgram};
  }
  const RegionTable::Use signal = openSignal();
  if (!signal || signal.isOfProgram() || signal.owner() || !isAligned(signal.data())) {
    refuse("put");
    return {};
  }
  if (!canStamp(wordAt(signal.data()), frame_.stamp)) {
    dropped_ = true;  // the put is late
    return {};
  }
  const uint64_t position = frame_.length - left_;
  // Opens the whole range: a put that leaves the region writes nothing, not even the part inside.
  RegionTable::Use use = regions_.open(frame_.key, frame_.offset, frame_.length, kRemoteWrite);
  if (!use || use.owner() || frame_.offset < sizeof(Doorbell)) {
    refuse("put");
    return {};
  }
  std::byte* data = use.data() + position;
  const bool isOfProgram = use.isOfProgram();
  return {data, room, std::move(use), isOfProgram};
}

Status FrameReceiver::endFrame() {
  inFrame_ = false;
  switch (frame_.kind) {
    case wire::Kind::kPut: {
      if (dropped_) return {};
      const RegionTable::Use use = openSignal();
      if (!use || use.isOfProgram() || use.owner() || !isAligned(use.data())) {
        refuse("put");
        return {};
      }
      if (tryStamp(wordAt(use.data()), frame_.stamp)) use.bell().ring();
      return {};
    }
    case wire::Kind::kGet:
      if (!events_.onGet(frame_)) return protocolError("the peer has too many gets under way");
      return {};
    case wire::Kind::kPiece:
      landPiece();
      return {};
    case wire::Kind::kAnswer:
      return endAnswer();
    case wire::Kind::kWrite:
      landWrite();
      endWrite();
      return {};
    case wire::Kind::kPull:
      if (!events_.onPull || !events_.onPull(frame_))
        return protocolError("the peer asked for a pull over a wire that has none");
      return {};
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
    case wire::Kind::kRetire:
      retired_ = true;
      return {};
  }
  return {};
}

Status FrameReceiver::endAnswer() {
  TransferTable::Transfer* transfer = transfers_.find(frame_.request);
  if (transfer && !transfers_.isAnswerable(*transfer)) events_.awaitSender();
  if (!transfer || !transfers_.isAnswerable(*transfer) || transfer->isAnswered)
    return protocolError("an answer came that nobody asked for");
  if (frame_.status == wire::AnswerStatus::kUnsupported) {
    if (!transfer->isWrite || !events_.onUnpullable)
      return protocolError("an answer came that nobody asked for");
    events_.onUnpullable(frame_.request);
    return {};
  }
  const bool isOk = frame_.status == wire::AnswerStatus::kOk;
  if (isOk && !transfer->isWrite && transfer->received != transfer->bytes)
    return protocolError("an answer ended too early");
  if (!transfer->isWrite && landings_.keep({.isWrite = false, .number = frame_.request},
                                           {.request = frame_.request, .status = frame_.status})) {
    transfer->isAnswered = true;
  } else {
    finish(frame_.request, frame_.status);
  }
  return {};
}

void FrameReceiver::finish(uint64_t request, wire::AnswerStatus status) {
  if (status == wire::AnswerStatus::kDeviceFailed) {
    transfers_.failLater(
        request,
        {ErrorCode::kSystem, "a device of the peer could not copy its memory: its log says why"});
  }
  transfers_.finish(request, status == wire::AnswerStatus::kOk        ? ErrorCode::kOk
                             : status == wire::AnswerStatus::kRefused ? ErrorCode::kRefused
                                                                      : ErrorCode::kAborted);
}

void FrameReceiver::endWrite() {
  written_ += frame_.length;
  const bool isGivenUp = frame_.status == wire::AnswerStatus::kAborted;
  if (!isGivenUp && written_ < write_.stamp) return;
  if (isGivenUp && writeStatus_ == wire::AnswerStatus::kOk)
    writeStatus_ = wire::AnswerStatus::kAborted;
  isWriting_ = false;
  if (landings_.keep({.isWrite = true, .number = writes_},
                     {.request = write_.request, .status = writeStatus_}))
    return;
  events_.onWritten(write_.request, writeStatus_);
}

// The buffer for the payload of a device. Without one that is free, sets blockedBy_.
FrameReceiver::Sink FrameReceiver::openBuffer(const MemoryOwner& device, size_t room) {
  const auto buffer = landings_.buffer(device);
  if (!buffer.ok()) {
    failOfDevice(buffer.error());
    return {};
  }
  if (!*buffer) {
    blockedBy_ = device;
    return {};
  }
  return {*buffer + (frame_.length - left_), room, {}, false};
}

void FrameReceiver::landPiece() {
  if (!landings_.hasBuffer()) return;
  const TransferTable::Transfer& get = *transfers_.find(frame_.request);
  if (!get.completion || get.failure.code != ErrorCode::kOk) return landings_.drop();
  const Status begun =
      landings_.land({.isWrite = false, .number = frame_.request}, get.target + frame_.offset,
                     frame_.length, {}, get.completion);
  if (!begun.ok()) failOfDevice(begun.error());
}

void FrameReceiver::landWrite() {
  if (!landings_.hasBuffer()) return;
  if (writeStatus_ != wire::AnswerStatus::kOk) return landings_.drop();
  auto use = regions_.open(write_.key, write_.offset, write_.stamp, kRemoteWrite);
  if (!use) {  // revoked while the payload came
    landings_.drop();
    return refuse("write");
  }
  std::byte* const target = use.data() + written_;
  const Status begun = landings_.land({.isWrite = true, .number = writes_}, target, frame_.length,
                                      std::move(use), nullptr);
  if (!begun.ok()) failOfDevice(begun.error());
}

void FrameReceiver::endLanded() {
  while (const auto landed = landings_.next()) {
    const Landings::Transfer& transfer = landed->transfer;
    auto ending = landed->ending;
    if (landed->failure && transfer.isWrite) {
      logOfDevice(*landed->failure);
      if (ending) {
        ending->status = wire::AnswerStatus::kDeviceFailed;
      } else if (!landings_.setEnding(transfer, wire::AnswerStatus::kDeviceFailed)) {
        writeStatus_ = wire::AnswerStatus::kDeviceFailed;  // the write is still arriving
      }
    } else if (landed->failure) {
      transfers_.failLater(transfer.number, {ErrorCode::kSystem, landed->failure->message});
    }
    if (!ending) continue;
    if (transfer.isWrite) {
      events_.onWritten(ending->request, ending->status);
    } else {
      finish(ending->request, ending->status);
    }
  }
}

// The frame's payload cannot be copied to the device. Drops the rest of the transfer.
void FrameReceiver::failOfDevice(const Error& cause) {
  if (frame_.kind == wire::Kind::kPiece) {
    transfers_.failLater(frame_.request, {ErrorCode::kSystem, cause.message});
  } else {
    writeStatus_ = wire::AnswerStatus::kDeviceFailed;
    logOfDevice(cause);
  }
}

void FrameReceiver::logOfDevice(const Error& cause) {
  if (std::exchange(loggedDevice_, true)) return;
  log(LogLevel::kWarning, "stream",
      "a write of a peer ends: memory of a device cannot be written: ", cause.message,
      ". Further ones on this connection are not logged");
}

bool FrameReceiver::copy(const Sink& sink, ByteView bytes) {
  if (sink.isOfProgram) return copyIfMapped(sink.data, bytes.data(), bytes.size());
  std::memcpy(sink.data, bytes.data(), bytes.size());
  return true;
}

// The frame's payload goes to memory that is not mapped. Drops the rest of the payload.
void FrameReceiver::onFault() {
  if (frame_.kind == wire::Kind::kPiece) {
    transfers_.fail(frame_.request, ErrorCode::kInvalidArgument);
  } else if (frame_.kind == wire::Kind::kWrite) {
    writeStatus_ = wire::AnswerStatus::kRefused;
  } else {
    dropped_ = true;
  }
  if (std::exchange(loggedFault_, true)) return;
  log(LogLevel::kWarning, "stream",
      "a transfer ended: memory of this process that is registered is not mapped, or must not be "
      "written; unregister memory before it is freed. Further ones on this connection are not "
      "logged");
}

void FrameReceiver::refuse(const char* what) {
  dropped_ = true;
  if (frame_.kind == wire::Kind::kWrite) writeStatus_ = wire::AnswerStatus::kRefused;
  if (std::exchange(loggedRefusal_, true)) return;
  log(LogLevel::kWarning, "stream", "a ", what,
      " outside of the registered regions was refused: key ", frame_.key, ", offset ",
      frame_.offset, ", ", frame_.kind == wire::Kind::kWrite ? frame_.stamp : frame_.length,
      " bytes; further ones on this connection are only counted");
}

}  // namespace mooncake
