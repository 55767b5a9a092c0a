#pragma once

#include <array>
#include <optional>
#include <span>

#include "engine/memory/device_copies.h"
#include "engine/memory/region_table.h"
#include "wires/stream/ring.h"
#include "wires/stream/transfer_table.h"
#include "wires/stream/wire.h"

namespace mooncake {

// The frames and transfers that one connection has yet to send. Frames are puts, requests, answers
// to writes, and the goodbye. Transfers are answers to gets, and our writes. A frame overtakes
// transfers that have not begun their next piece. Waiting frames go out many at a time. Not
// thread-safe: the connection's send lock guards it.
//
// Answers point into registered memory. The region is opened for each system call and not held in
// between: a peer that does not read must not keep this rank from releasing its memory. Writes
// point into the caller's memory until they have left or were cancelled.
//
// Memory of a device is copied to pinned buffers ahead, piece by piece in the order of sending. A
// piece leaves when its copy has ended, and the frames behind it wait. The region, or the
// write's completion, is held while a copy is under way, and not while its bytes wait for the peer.
class SendQueue {
 public:
  static constexpr size_t kMaxQueuedBytes = size_t(256) << 20;
  static constexpr size_t kMostBytesPerCall = size_t(1) << 20;

  SendQueue(RegionTable& regions, TransferTable& transfers)
      : regions_(regions), transfers_(transfers) {}

  // Sends as much of a frame as the socket takes; the rest is copied and waits. kExhausted, with
  // nothing sent: too much waits already. kPeerLost: the socket is broken.
  Status send(int socket, const wire::Header& header, ByteView payload);
  // Sends a put as such a frame. kInvalidArgument: it is too long, or has no place for its signal.
  Status send(int socket, const PutRequest& request);
  // Adds a frame without payload, which leaves with the next sendSome().
  void add(const wire::Header& header);

  // Adds an answer to the peer's GET. False: it has more gets under way than the protocol allows.
  bool answer(const wire::Header& get);
  // Adds a write of ours, which is in the table under that number.
  void write(uint64_t number, const WriteRequest& request);
  // All answers from now on, and answers under way, end with kAborted and touch no memory.
  void abortAnswers();
  // The sources of the writes of this completion are not read any more; null: of all writes. The
  // peer is told. Copies from devices that are under way go on: see copies().
  void cancelWrites(const Completion* completion);

  // Sends as much of the queue as one system call takes: of transfers about `most` bytes, at most 1
  // MiB. Returns the bytes sent; 0: the socket is full, the queue is empty, or awaitsCopy().
  Result<size_t> sendSome(int socket, size_t most = kMostBytesPerCall);
  bool empty() const { return frames_.empty() && jobs_.empty(); }
  // Returns whether nothing can be sent before a copy from a device has ended.
  bool awaitsCopy();
  // The copies from devices. The caller looks for ended ones.
  DeviceCopies& copies() { return copies_; }
  // Returns whether the peer is between two frames, so that a new one could begin.
  bool betweenFrames() const { return frames_.empty() && !piece_; }
  void clear();

 private:
  struct Frame {
    Bytes bytes;
    size_t sent = 0;
  };
  // An answer or a write: all its pieces and its ending.
  struct Job {
    bool isWrite = false;
    uint64_t number = 0;  // among all jobs, from 1 on
    uint64_t request = 0;
    uint64_t key = 0;
    uint64_t offset = 0;  // in the region
    uint64_t length = 0;
    uint64_t begun = 0;                                   // bytes in pieces that have begun
    wire::AnswerStatus status = wire::AnswerStatus::kOk;  // else zeros fill its piece
    const std::byte* source = nullptr;                    // for a write only
    const Completion* completion = nullptr;
    MemoryOwner owner = {};  // the device that owns the bytes
    uint64_t copied = 0;     // bytes in pieces whose copies from the device have begun
  };
  struct Piece {
    wire::HeaderBytes header;
    size_t headerSent = 0;
    uint64_t position = 0;  // of the next byte, in the job
    uint64_t left = 0;      // bytes of payload
    bool last = false;      // the job ends with this piece
  };
  // The part of a piece that one system call sends.
  struct Planned {
    Piece piece;
    uint64_t payload = 0;
    RegionTable::Use use;
    DeviceCopies::Copy* copy = nullptr;  // holds the bytes of a device
  };
  // A copy of a job's next piece that has not been sent.
  struct Ahead {
    DeviceCopies::Copy* copy = nullptr;
    uint64_t job = 0;
  };

  Result<size_t> sendFrames(int socket);
  Result<size_t> sendJobs(int socket, size_t most, size_t mostPieces);
  void failFirstJob();
  void add(Job job);
  void copyAhead();
  bool copyNext(Job& job);
  void failOfDevice(Job& job, const Error& cause);
  void dropCopies(const Job& job);
  const Error* failureOf(const Job& job);
  bool isReady(const Job& job, uint64_t begun, size_t ahead);
  const std::byte* payloadOf(Job& job, Planned& planned, size_t most, size_t& ahead);
  Piece pieceOf(const Job& job, uint64_t begun) const;
  void commit(std::span<Planned> plan, size_t sent);
  void endJob();

  RegionTable& regions_;
  TransferTable& transfers_;
  Ring<Frame> frames_;
  size_t frameBytes_ = 0;  // that wait in frames_
  Ring<Job> jobs_;
  size_t answers_ = 0;          // number of answers in jobs_
  std::optional<Piece> piece_;  // of the first job, if a part of it has been sent
  bool abortsAnswers_ = false;
  bool loggedFault_ = false;

  DeviceCopies copies_;
  Ring<Ahead> ahead_;        // in the order of sending
  size_t ofDevices_ = 0;     // number of jobs whose bytes a device owns
  uint64_t lastNumber_ = 0;  // of a job
  bool loggedDevice_ = false;
};

}  // namespace mooncake
