#pragma once

#include <optional>

#include "engine/memory/region_table.h"
#include "engine/stream/ring.h"
#include "engine/stream/wire.h"

namespace mooncake {

// What one connection has yet to send, in two classes: frames (puts, requests, goodbye) overtake
// answers that have not begun their next piece. Not thread-safe: the connection's send lock guards
// it.
//
// Answers point into registered memory. The region is opened anew for each system call and not held
// in between: a peer that does not read must not keep this rank from giving its memory back.
class SendQueue {
 public:
  static constexpr size_t kMaxQueuedBytes = size_t(256) << 20;

  explicit SendQueue(RegionTable& regions) : regions_(regions) {}

  // Sends a frame now as far as the socket takes it; the rest is copied and waits. kExhausted, with
  // nothing sent, when too much waits already; kPeerLost when the socket is broken.
  Status send(int socket, const wire::Header& header, ByteView payload);

  // An answer to the peer's GET. False when it has more gets under way than the protocol allows.
  bool answer(const wire::Header& get);
  // All answers from now on, also those under way, end with kAborted and touch no memory.
  void abortAnswers();

  // One system call's worth of what waits. Returns the bytes sent; 0: the socket is full or nothing
  // waits.
  Result<size_t> sendSome(int socket);
  bool empty() const { return frames_.empty() && answers_.empty(); }
  // Whether the peer stands between two frames, so that a new one could begin.
  bool betweenFrames() const { return frames_.empty() && !piece_; }
  void clear();

 private:
  struct Frame {
    Bytes bytes;
    size_t sent = 0;
  };
  struct Answer {
    uint64_t request = 0;
    uint64_t key = 0;
    uint64_t offset = 0;  // in the region
    uint64_t length = 0;
    uint64_t begun = 0;                                   // bytes in pieces that have been begun
    wire::AnswerStatus status = wire::AnswerStatus::kOk;  // else its pieces are filled up
  };
  // The frame of the first answer that is under way.
  struct Piece {
    wire::HeaderBytes header;
    size_t headerSent = 0;
    uint64_t position = 0;  // of the next byte, in the answer
    uint64_t left = 0;      // bytes of payload
    bool last = false;      // the ANSWER frame
  };

  Result<size_t> sendFrames(int socket);
  Result<size_t> sendAnswers(int socket);
  void beginPiece(Answer& answer);
  Piece endOf(const Answer& answer) const;

  RegionTable& regions_;
  Ring<Frame> frames_;
  size_t frameBytes_ = 0;  // that wait in frames_
  Ring<Answer> answers_;
  std::optional<Piece> piece_;
  bool abortsAnswers_ = false;
};

}  // namespace mooncake
