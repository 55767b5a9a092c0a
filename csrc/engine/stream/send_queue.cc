#include "engine/stream/send_queue.h"

#include <cerrno>
#include <sys/socket.h>
#include <sys/uio.h>

namespace mooncake {
namespace {

constexpr size_t kMaxGather = 16;
constexpr std::array<std::byte, 4096> kZeros{};

iovec vectorOf(const std::byte* data, size_t bytes) {
  return {const_cast<std::byte*>(data), bytes};
}

// Bytes written; 0 when the socket is full.
Result<size_t> writeSome(int socket, iovec* parts, size_t count) {
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  for (;;) {
    const ssize_t written = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written >= 0) return static_cast<size_t>(written);
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return size_t(0);
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
  // A frame that has begun must end before anything else: nothing waits in front of it, because
  // betweenFrames() was true.
  frames_.push(std::move(rest));
  return {};
}

bool SendQueue::answer(const wire::Header& get) {
  if (answers_.size() == wire::kMaxGets) return false;
  auto status = wire::AnswerStatus::kOk;
  if (abortsAnswers_) {
    status = wire::AnswerStatus::kAborted;
  } else if (!regions_.open(get.key, get.offset, get.length, kRemoteRead)) {
    status = wire::AnswerStatus::kRefused;
  }
  answers_.push({get.request, get.key, get.offset, get.length, 0, status});
  return true;
}

void SendQueue::abortAnswers() {
  abortsAnswers_ = true;
  for (size_t i = 0; i < answers_.size(); ++i) answers_[i].status = wire::AnswerStatus::kAborted;
}

Result<size_t> SendQueue::sendSome(int socket) {
  // A half-sent frame that waits in frames_ implies !piece_: both cannot be under way.
  if (!piece_ && !frames_.empty()) return sendFrames(socket);
  if (!answers_.empty()) return sendAnswers(socket);
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

Result<size_t> SendQueue::sendAnswers(int socket) {
  Answer& answer = answers_.front();
  if (!piece_) beginPiece(answer);
  Piece& piece = *piece_;

  RegionTable::Use use;
  if (piece.left > 0 && answer.status == wire::AnswerStatus::kOk) {
    use = regions_.open(answer.key, answer.offset + piece.position, piece.left, kRemoteRead);
    // Revoked half way: the piece is filled up, the status says the rest.
    if (!use) answer.status = wire::AnswerStatus::kRefused;
  }
  iovec parts[3];
  size_t count = 0;
  if (piece.headerSent < wire::kHeaderBytes) {
    parts[count++] =
        vectorOf(piece.header.data() + piece.headerSent, wire::kHeaderBytes - piece.headerSent);
  }
  const size_t payload = use ? piece.left : std::min<uint64_t>(piece.left, kZeros.size());
  if (payload > 0) parts[count++] = vectorOf(use ? use.data() : kZeros.data(), payload);
  const Piece end = endOf(answer);
  const bool endsHere = !piece.last && payload == piece.left &&
                        (answer.begun == answer.length || answer.status != wire::AnswerStatus::kOk);
  if (endsHere) parts[count++] = vectorOf(end.header.data(), end.header.size());

  const auto written = writeSome(socket, parts, count);
  if (!written.ok()) return written;
  const size_t left = *written;
  const size_t ofHeader = std::min(left, wire::kHeaderBytes - piece.headerSent);
  const size_t ofPayload = std::min(left - ofHeader, payload);
  const size_t ofEnd = left - ofHeader - ofPayload;
  piece.headerSent += ofHeader;
  piece.position += ofPayload;
  piece.left -= ofPayload;
  if (ofEnd > 0) {
    piece = end;
    piece.headerSent = ofEnd;
  }
  if (piece.headerSent == 0) {  // nothing of it left: a put may still overtake
    if (!piece.last) answer.begun = piece.position;
    piece_.reset();
  } else if (piece.headerSent == wire::kHeaderBytes && piece.left == 0) {
    const bool done = piece.last;
    piece_.reset();
    if (done) answers_.pop();
  }
  return written;
}

void SendQueue::beginPiece(Answer& answer) {
  if (answer.status != wire::AnswerStatus::kOk || answer.begun == answer.length) {
    piece_ = endOf(answer);
    return;
  }
  wire::Header header;
  header.kind = wire::Kind::kPiece;
  header.request = answer.request;
  header.offset = answer.begun;
  header.length = std::min(answer.length - answer.begun, wire::kMaxPieceBytes);
  piece_ = Piece{wire::encode(header), 0, answer.begun, header.length, false};
  answer.begun += header.length;
}

SendQueue::Piece SendQueue::endOf(const Answer& answer) const {
  wire::Header header;
  header.kind = wire::Kind::kAnswer;
  header.request = answer.request;
  header.status = answer.status;
  return Piece{wire::encode(header), 0, 0, 0, true};
}

void SendQueue::clear() {
  frames_.clear();
  frameBytes_ = 0;
  answers_.clear();
  piece_.reset();
}

}  // namespace mooncake
