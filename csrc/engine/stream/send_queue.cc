#include "engine/stream/send_queue.h"

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
  if (abortsAnswers_) {
    status = wire::AnswerStatus::kAborted;
  } else if (!regions_.open(get.key, get.offset, get.length, kRemoteRead)) {
    status = wire::AnswerStatus::kRefused;
  }
  ++answers_;
  jobs_.push({.request = get.request,
              .key = get.key,
              .offset = get.offset,
              .length = get.length,
              .status = status});
  return true;
}

void SendQueue::write(uint64_t number, const WriteRequest& request) {
  jobs_.push({.isWrite = true,
              .request = number,
              .key = request.region.key,
              .offset = request.offset,
              .length = request.source.size(),
              .source = request.source.data(),
              .completion = request.completion});
}

void SendQueue::abortAnswers() {
  abortsAnswers_ = true;
  for (size_t i = 0; i < jobs_.size(); ++i) {
    if (!jobs_[i].isWrite) jobs_[i].status = wire::AnswerStatus::kAborted;
  }
}

void SendQueue::cancelWrites(const Completion* completion) {
  for (size_t i = 0; i < jobs_.size(); ++i) {
    Job& job = jobs_[i];
    if (!job.isWrite || (completion && job.completion != completion)) continue;
    job.status = wire::AnswerStatus::kAborted;
    job.source = nullptr;
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
  size_t pieces = 0, count = 0, bytes = 0;
  uint64_t begun = jobs_.front().begun;
  for (size_t j = 0; j < jobs_.size() && pieces < mostPieces && bytes < most;) {
    Job& job = jobs_[j];
    Planned& planned = plan[pieces];
    const bool goesOn = pieces == 0 && piece_;
    planned.piece = goesOn ? *piece_ : pieceOf(job, begun);
    const std::byte* payload = payloadOf(job, planned, most - bytes);
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
const std::byte* SendQueue::payloadOf(Job& job, Planned& planned, size_t most) {
  const Piece& piece = planned.piece;
  planned.payload = std::min<uint64_t>(piece.left, most);
  if (piece.left == 0) return nullptr;
  if (job.status == wire::AnswerStatus::kOk) {
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
  jobs_.pop();
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
}

}  // namespace mooncake
