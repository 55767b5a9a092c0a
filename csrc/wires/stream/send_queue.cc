#include "wires/stream/send_queue.h"

#include <cerrno>
#include <sys/socket.h>
#include <sys/uio.h>
#include <utility>

#include "base/log.h"

namespace mooncake {
namespace {

constexpr size_t kMaxGather = 16;
// Most pieces of transfers in one system call.
constexpr size_t kMaxPieces = 64;
// Small waiting frames share memory up to this size.
constexpr size_t kSharedFrameBytes = 4096;
constexpr std::array<std::byte, 4096> kZeros{};

iovec vectorOf(const std::byte* data, size_t bytes) {
  return {const_cast<std::byte*>(data), bytes};
}

// Returns the number of bytes written; 0: the socket is full.
Result<size_t> writeSome(int socket, iovec* parts, size_t count) {
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  for (;;) {
    const ssize_t written = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written >= 0) return static_cast<size_t>(written);
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return size_t(0);
    if (errno == EFAULT) return Error{ErrorCode::kInvalidArgument, "memory is not mapped"};
    return Error{ErrorCode::kPeerLost, systemError("sendmsg", errno).message};
  }
}

}  // namespace

Status SendQueue::send(int socket, const wire::Header& header, ByteView payload) {
  const size_t total = wire::kHeaderBytes + payload.size();
  if (frameBytes_ > 0 && frameBytes_ + total > kMaxQueuedBytes) {
    return {ErrorCode::kExhausted, "256 MiB wait for a peer that does not read"};
  }
  const wire::HeaderBytes head = wire::encode(header);
  size_t sent = 0;
  if (betweenFrames()) {
    iovec parts[] = {vectorOf(head.data(), head.size()), vectorOf(payload.data(), payload.size())};
    const auto written = writeSome(socket, parts, payload.empty() ? 1 : 2);
    if (!written.ok()) return written.error();
    sent = *written;
    if (sent == total) return {};
  }
  Frame rest;
  rest.bytes.reserve(total - sent);
  const size_t headSent = std::min(sent, head.size());
  rest.bytes.insert(rest.bytes.end(), head.begin() + headSent, head.end());
  rest.bytes.insert(rest.bytes.end(), payload.begin() + (sent - headSent), payload.end());
  frameBytes_ += rest.bytes.size();
  // A frame that has begun must end before anything else. Nothing waits in front of it, because
  // betweenFrames() was true.
  frames_.push(std::move(rest));
  return {};
}

Status SendQueue::send(int socket, const PutRequest& request) {
  if (request.data.size() > wire::kMaxPutBytes) {
    return {ErrorCode::kInvalidArgument,
            "a put takes at most 64 MiB, not " + std::to_string(request.data.size())};
  }
  if (!wire::isSignalOffset(request.signal.offset)) {
    return {ErrorCode::kInvalidArgument,
            "a signal's word is 8-aligned and behind the doorbell, not at " +
                std::to_string(request.signal.offset)};
  }
  wire::Header header;
  header.kind = wire::Kind::kPut;
  header.request = request.signalRegion.key;
  header.key = request.region.key;
  header.offset = request.offset;
  header.length = request.data.size();
  header.signalOffset = request.signal.offset;
  header.stamp = request.signal.stamp;
  return send(socket, header, request.data);
}

void SendQueue::add(const wire::Header& header) {
  const wire::HeaderBytes head = wire::encode(header);
  frameBytes_ += head.size();
  if (!frames_.empty()) {
    Bytes& last = frames_[frames_.size() - 1].bytes;
    if (last.size() + head.size() <= kSharedFrameBytes) {
      last.insert(last.end(), head.begin(), head.end());
      return;
    }
  }
  frames_.push({.bytes = Bytes(head.begin(), head.end())});
}

bool SendQueue::answer(const wire::Header& get) {
  if (answers_ == wire::kMaxTransfers) return false;
  auto status = wire::AnswerStatus::kOk;
  MemoryOwner owner;
  if (abortsAnswers_) {
    status = wire::AnswerStatus::kAborted;
  } else if (const auto use = regions_.open(get.key, get.offset, get.length, kRemoteRead)) {
    owner = use.owner();
  } else {
    status = wire::AnswerStatus::kRefused;
  }
  ++answers_;
  add({.request = get.request,
       .key = get.key,
       .offset = get.offset,
       .length = get.length,
       .status = status,
       .owner = owner});
  return true;
}

void SendQueue::write(uint64_t number, const WriteRequest& request) {
  add({.isWrite = true,
       .request = number,
       .key = request.region.key,
       .offset = request.offset,
       .length = request.source.size(),
       .source = request.source.data(),
       .completion = request.completion,
       .owner = request.owner});
}

void SendQueue::add(Job job) {
  job.number = ++lastNumber_;
  if (job.owner) ++ofDevices_;
  jobs_.push(job);
}

void SendQueue::abortAnswers() {
  abortsAnswers_ = true;
  for (size_t i = 0; i < jobs_.size(); ++i) {
    if (jobs_[i].isWrite) continue;
    jobs_[i].status = wire::AnswerStatus::kAborted;
    dropCopies(jobs_[i]);
  }
}

void SendQueue::cancelWrites(const Completion* completion) {
  for (size_t i = 0; i < jobs_.size(); ++i) {
    Job& job = jobs_[i];
    if (!job.isWrite || (completion && job.completion != completion)) continue;
    job.status = wire::AnswerStatus::kAborted;
    job.source = nullptr;
    dropCopies(job);
  }
}

Result<size_t> SendQueue::sendSome(int socket, size_t most) {
  // A half-sent frame that waits in frames_ implies !piece_: both cannot be under way.
  if (!piece_ && !frames_.empty()) return sendFrames(socket);
  if (!jobs_.empty()) return sendJobs(socket, std::min(most, kMostBytesPerCall), kMaxPieces);
  return size_t(0);
}

Result<size_t> SendQueue::sendFrames(int socket) {
  iovec parts[kMaxGather];
  const size_t count = std::min(frames_.size(), kMaxGather);
  for (size_t i = 0; i < count; ++i) {
    Frame& frame = frames_[i];
    parts[i] = vectorOf(frame.bytes.data() + frame.sent, frame.bytes.size() - frame.sent);
  }
  const auto written = writeSome(socket, parts, count);
  if (!written.ok()) return written;
  frameBytes_ -= *written;
  for (size_t left = *written; left > 0;) {
    Frame& frame = frames_.front();
    const size_t taken = std::min(left, frame.bytes.size() - frame.sent);
    frame.sent += taken;
    left -= taken;
    if (frame.sent == frame.bytes.size()) frames_.pop();
  }
  return written;
}

Result<size_t> SendQueue::sendJobs(int socket, size_t most, size_t mostPieces) {
  std::array<Planned, kMaxPieces> plan;
  std::array<iovec, 2 * kMaxPieces> parts;
  size_t pieces = 0, count = 0, bytes = 0, ahead = 0;
  copyAhead();
  uint64_t begun = jobs_.front().begun;
  for (size_t j = 0; j < jobs_.size() && pieces < mostPieces && bytes < most;) {
    Job& job = jobs_[j];
    Planned& planned = plan[pieces];
    const bool goesOn = pieces == 0 && piece_;
    if (job.owner && !goesOn && !isReady(job, begun, ahead)) break;
    planned.piece = goesOn ? *piece_ : pieceOf(job, begun);
    const std::byte* payload = payloadOf(job, planned, most - bytes, ahead);
    if (!goesOn && job.status != wire::AnswerStatus::kOk) {  // payloadOf() may just have changed it
      planned.piece = pieceOf(job, begun);
      planned.payload = 0;
    }
    const Piece& piece = planned.piece;
    if (piece.headerSent < wire::kHeaderBytes) {
      parts[count++] =
          vectorOf(piece.header.data() + piece.headerSent, wire::kHeaderBytes - piece.headerSent);
    }
    if (planned.payload > 0) parts[count++] = vectorOf(payload, planned.payload);
    bytes += wire::kHeaderBytes + planned.payload;
    ++pieces;
    if (!frames_.empty()) break;  // frames come next, so no further piece must go before them
    // Either the call may send no more, or zeros fill the piece, a few bytes at a time.
    if (planned.payload < piece.left) break;
    begun = piece.position + piece.left;
    if (piece.last) {
      ++j;
      begun = 0;  // only the first job can have begun
    }
  }
  if (pieces == 0) return size_t(0);  // the first one awaits its copy
  const auto written = writeSome(socket, parts.data(), count);
  if (written.ok()) {
    commit({plan.data(), pieces}, *written);
    return written;
  }
  if (written.error().code != ErrorCode::kInvalidArgument) return written;
  if (pieces == 1) failFirstJob();
  return sendJobs(socket, most, 1);
}

// The job's memory is not mapped. Zeros fill the piece that has begun; the status tells the peer.
void SendQueue::failFirstJob() {
  Job& job = jobs_.front();
  job.status = job.isWrite ? wire::AnswerStatus::kAborted : wire::AnswerStatus::kRefused;
  job.source = nullptr;
  if (job.isWrite) transfers_.fail(job.request, ErrorCode::kInvalidArgument);
  if (std::exchange(loggedFault_, true)) return;
  log(LogLevel::kWarning, "stream", "a ", job.isWrite ? "write to" : "read by",
      " a peer ended: memory of this process that is registered is not mapped; unregister memory "
      "before it is freed. Further ones on this connection are not logged");
}

// Returns the piece's bytes, valid as long as the plan; sets their number, at most `most`.
const std::byte* SendQueue::payloadOf(Job& job, Planned& planned, size_t most, size_t& ahead) {
  const Piece& piece = planned.piece;
  planned.payload = std::min<uint64_t>(piece.left, most);
  if (piece.left == 0) return nullptr;
  if (job.status == wire::AnswerStatus::kOk) {
    if (job.owner) {
      planned.copy = ahead_[ahead++].copy;
      return planned.copy->buffer() + (planned.copy->bytes() - piece.left);
    }
    if (job.isWrite) return job.source + piece.position;
    planned.use = regions_.open(job.key, job.offset + piece.position, planned.payload, kRemoteRead);
    if (planned.use) return planned.use.data();
    // Revoked half-way: zeros fill the piece, and the status tells the peer.
    job.status = wire::AnswerStatus::kRefused;
  }
  planned.payload = std::min<uint64_t>(planned.payload, kZeros.size());
  return kZeros.data();
}

// Records how much of the plan was sent. Its pieces belong to the first jobs, in their order.
void SendQueue::commit(std::span<Planned> plan, size_t sent) {
  piece_.reset();
  for (Planned& planned : plan) {
    Piece& piece = planned.piece;
    const size_t ofHeader = std::min(sent, wire::kHeaderBytes - piece.headerSent);
    const size_t ofPayload = std::min<uint64_t>(sent - ofHeader, planned.payload);
    sent -= ofHeader + ofPayload;
    piece.headerSent += ofHeader;
    if (piece.headerSent == 0) return;  // no byte of it has left: a put may still overtake it
    piece.position += ofPayload;
    piece.left -= ofPayload;
    jobs_.front().begun = piece.position + piece.left;
    if (piece.headerSent < wire::kHeaderBytes || piece.left > 0) {
      piece_ = piece;
      return;
    }
    if (planned.copy) {
      copies_.giveBack(*planned.copy);
      ahead_.pop();
    }
    if (piece.last) endJob();
  }
}

void SendQueue::endJob() {
  const Job& job = jobs_.front();
  if (job.isWrite) {
    transfers_.hasLeft(job.request);
  } else {
    --answers_;
  }
  if (job.owner) --ofDevices_;
  jobs_.pop();
}

// Begins the copies of the next pieces, as far as there are buffers.
void SendQueue::copyAhead() {
  if (ofDevices_ == 0) return;
  copies_.look();
  const size_t most = std::min(jobs_.size(), kMaxPieces);
  for (size_t j = 0; j < most; ++j) {
    Job& job = jobs_[j];
    if (!job.owner) continue;
    if (const Error* failure = failureOf(job)) failOfDevice(job, *failure);
    while (job.status == wire::AnswerStatus::kOk && job.copied < job.length) {
      if (!copyNext(job)) return;
    }
  }
}

// Returns the failure of a copy whose piece has not been sent; null: there is none.
const Error* SendQueue::failureOf(const Job& job) {
  for (size_t i = 0; i < ahead_.size(); ++i) {
    const DeviceCopies::Copy& copy = *ahead_[i].copy;
    if (ahead_[i].job == job.number && copy.state() == DeviceCopies::Copy::State::kFailed)
      return &copy.failure();
  }
  return nullptr;
}

// Returns false if no buffer is free. Later pieces must not take it before this one.
bool SendQueue::copyNext(Job& job) {
  const auto lent = copies_.lend(job.owner);
  if (!lent.ok()) {
    failOfDevice(job, lent.error());
    return true;
  }
  if (!*lent) return false;
  DeviceCopies::Copy& copy = **lent;
  const size_t bytes = std::min(job.length - job.copied, wire::kMaxPieceBytes);
  DeviceCopies::Origin origin{.completion = job.completion, .transfer = job.number};
  const std::byte* from = nullptr;
  if (job.isWrite) {
    from = job.source + job.copied;
  } else if ((origin.use = regions_.open(job.key, job.offset + job.copied, bytes, kRemoteRead))) {
    from = origin.use.data();
  } else {  // revoked half-way
    copies_.giveBack(copy);
    dropCopies(job);
    job.status = wire::AnswerStatus::kRefused;
    return true;
  }
  if (const Status begun = copies_.toBuffer(copy, from, bytes, std::move(origin)); !begun.ok()) {
    copies_.giveBack(copy);
    failOfDevice(job, begun.error());
    return true;
  }
  ahead_.push({&copy, job.number});
  job.copied += bytes;
  return true;
}

// No piece of the job has begun whose copy has not ended, so none has to be filled up.
void SendQueue::failOfDevice(Job& job, const Error& cause) {
  job.status = job.isWrite ? wire::AnswerStatus::kAborted : wire::AnswerStatus::kDeviceFailed;
  job.source = nullptr;
  dropCopies(job);
  if (job.isWrite) transfers_.failLater(job.request, {ErrorCode::kSystem, cause.message});
  if (std::exchange(loggedDevice_, true)) return;
  log(LogLevel::kWarning, "stream", "a ", job.isWrite ? "write to" : "read by",
      " a peer ends: memory of device ", job.owner.device, " cannot be copied: ", cause.message,
      ". Further ones on this connection are not logged");
}

void SendQueue::dropCopies(const Job& job) {
  if (!job.owner) return;
  for (size_t left = ahead_.size(); left > 0; --left) {
    const Ahead one = ahead_.front();
    ahead_.pop();
    if (one.job == job.number) {
      copies_.giveBack(*one.copy);
    } else {
      ahead_.push(one);
    }
  }
}

// Returns whether the job's piece at `begun` can be sent; `ahead` is the place of its copy. A job that
// has failed ends only when no copy of it is under way.
bool SendQueue::isReady(const Job& job, uint64_t begun, size_t ahead) {
  if (job.status != wire::AnswerStatus::kOk) return !copies_.isUnderWay(job.number);
  if (begun == job.length) return true;  // nothing but the end is left
  return ahead < ahead_.size() && ahead_[ahead].job == job.number &&
         ahead_[ahead].copy->state() == DeviceCopies::Copy::State::kDone;
}

bool SendQueue::awaitsCopy() {
  return frames_.empty() && !jobs_.empty() && !piece_ && jobs_.front().owner &&
         !isReady(jobs_.front(), jobs_.front().begun, 0);
}

SendQueue::Piece SendQueue::pieceOf(const Job& job, uint64_t begun) const {
  const bool ok = job.status == wire::AnswerStatus::kOk;
  const uint64_t bytes = ok ? std::min(job.length - begun, wire::kMaxPieceBytes) : 0;
  wire::Header header;
  header.request = job.request;
  if (job.isWrite) {
    header.kind = wire::Kind::kWrite;
    header.status = job.status;
    header.key = job.key;
    header.offset = job.offset;
    header.length = bytes;
    header.signalOffset = begun;
    header.stamp = job.length;
  } else if (bytes > 0) {
    header.kind = wire::Kind::kPiece;
    header.offset = begun;
    header.length = bytes;
  } else {
    header.kind = wire::Kind::kAnswer;
    header.status = job.status;
  }
  const bool last = job.isWrite ? !ok || begun + bytes == job.length : bytes == 0;
  return {wire::encode(header), 0, begun, bytes, last};
}

void SendQueue::clear() {
  frames_.clear();
  frameBytes_ = 0;
  jobs_.clear();
  answers_ = 0;
  piece_.reset();
  for (; !ahead_.empty(); ahead_.pop()) copies_.giveBack(*ahead_.front().copy);
  ofDevices_ = 0;
}

}  // namespace mooncake
