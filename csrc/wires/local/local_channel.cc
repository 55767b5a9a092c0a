#include "wires/local/local_channel.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/failpoint.h"
#include "base/log.h"
#include "engine/memory/program_memory.h"
#include "wires/local/shared_work.h"
#include "wires/stream/wire.h"

namespace mooncake {
namespace {

// A get checks for cancellation after this many bytes, so cancel() waits a few milliseconds at
// most.
constexpr size_t kPieceBytes = size_t(16) << 20;
// A write checks after this many bytes, also for a fence. Our fence waits for one piece of this
// size that we are pulling.
constexpr size_t kWritePieceBytes = size_t(1) << 20;
// Number of bytes of one pull before other pulls have their turn.
constexpr size_t kPullBytes = size_t(16) << 20;
// Gets of at least kLeastShared bytes are copied by two threads, in pieces of kSharedPieceBytes.
// Copying a piece takes about as long as waking the other thread. Larger pieces would prolong the
// wait for the other thread's last piece.
constexpr size_t kLeastShared = size_t(512) << 10;
constexpr size_t kSharedPieceBytes = size_t(256) << 10;
// A write of at least twice this size is pulled in two parts, by two threads.
constexpr size_t kLeastPullPart = size_t(1) << 20;
// Below this size, sending is cheaper than asking the peer to pull.
constexpr size_t kLeastPull = size_t(64) << 10;

bool isInside(uint64_t offset, uint64_t bytes, uint64_t whole) {
  return offset <= whole && bytes <= whole - offset;
}

}  // namespace

std::shared_ptr<LocalChannel> LocalChannel::start(const char* transportName, Mapped peer, Fd socket,
                                                  const EngineId& id,
                                                  const TransportContext& context) {
  auto channel = std::make_shared<LocalChannel>(transportName, std::move(peer), context);
  // The stream must not keep its owner alive. It may end before start() returns. While we are
  // closing, the peer's answer to our goodbye is not reported.
  channel->stream_ = StreamConnection::start(
      std::move(socket), context.loop, context.regions,
      {.onMessage = [id, &context](ByteView message) { context.onMessage(id, message); },
       .onClosed =
           [weak = channel->weak_from_this(), id, &context](const Status& how) {
             const auto self = weak.lock();
             if (!self || self->closing_.load(std::memory_order_relaxed)) return;
             context.onEnded(id, self->onEnded(how));
           },
       .onPull =
           [weak = channel->weak_from_this()](const PullRequest& pull) {
             if (const auto self = weak.lock()) self->onPull(pull);
           }});
  return channel;
}

LocalChannel::LocalChannel(const char* transportName, Mapped peer, const TransportContext& context)
    : transportName_(transportName), peer_(std::move(peer)), context_(context) {}

LocalChannel::~LocalChannel() { close(); }

Status LocalChannel::put(const PutRequest& request) {
  const Gate::Pass pass(puts_);
  if (!pass) return {ErrorCode::kAborted, "the channel is closed"};
  if (ended_.load(std::memory_order_acquire)) return why_;
  const Signal& signal = request.signal;
  const RemoteRegion& announced = request.regionOfSignal();
  if (signal.offset % sizeof(uint64_t) != 0 || signal.offset < sizeof(Doorbell)) {
    return {ErrorCode::kInvalidArgument,
            "a signal's word is 8-aligned and behind the doorbell, not at " +
                std::to_string(signal.offset)};
  }
  std::byte* const data = mapped(request.region);
  std::byte* const part = mapped(announced);
  if (!data || !part || permission(request.region.key, kRemoteWrite) == ErrorCode::kRefused ||
      permission(announced.key, kRemoteWrite) == ErrorCode::kRefused ||
      announced.address % alignof(Doorbell) != 0 ||
      !isInside(signal.offset, sizeof(uint64_t), announced.bytes) ||
      !isInside(request.offset, request.data.size(), request.region.bytes) ||
      (request.offset < sizeof(Doorbell) && !request.data.empty())) {
    return {ErrorCode::kRefused, "a put outside of the peer's registered memory"};
  }
  auto& word = *reinterpret_cast<std::atomic<uint64_t>*>(part + signal.offset);
  if (!canStamp(word, signal.stamp)) return {};  // late
  const auto isShutOut = [&] {
    return permission(request.region.key, kRemoteWrite) == ErrorCode::kAborted;
  };
  const Error shutOut{ErrorCode::kAborted, "the peer goes on without us"};
  if (isShutOut()) return shutOut;
  if (!request.data.empty()) {
    std::memcpy(data + request.offset, request.data.data(), request.data.size());
  }
  if (isShutOut()) return shutOut;
  if (tryStamp(word, signal.stamp)) bellOf(announced, part).ring();
  return {};
}

Status LocalChannel::get(const GetRequest& request) {
  if (!isInside(request.offset, request.target.size(), request.region.bytes)) {
    return {ErrorCode::kRefused, "a get outside of the peer's region"};
  }
  if (peer_.sharesCopies && request.target.size() >= kLeastShared) return getShared({&request, 1});
  const DirectTransfers::Running running(transfers_, request.completion);
  if (!running) return {ErrorCode::kAborted, "the channel is closed"};
  return end(request, readHere(request, running));
}

Status LocalChannel::get(std::span<const GetRequest> requests) {
  size_t bytes = 0;
  for (const GetRequest& request : requests) bytes += request.target.size();
  const bool isShared = peer_.sharesCopies && bytes >= kLeastShared;
  return isShared ? getShared(requests) : beginAll(requests);
}

// Called while the get still counts as running. A thread that cancels waits for that, and then
// finds the get in the stream.
Status LocalChannel::end(const GetRequest& request, ErrorCode code) {
  if (code == ErrorCode::kUnsupported) return getFromDevice(request);
  request.completion->begin();
  request.completion->end(code);
  return {};
}

// Between devices, else over the stream.
Status LocalChannel::getFromDevice(const GetRequest& request) {
  if (!request.owner || !peer_.devices || !isOfDevice(request.region)) return stream_->get(request);
  auto place = peer_.devices->find(request.region, request.owner);
  if (!place.ok()) {
    if (place.error().code == ErrorCode::kInterrupted) return getLater(request);
    if (place.error().code == ErrorCode::kUnsupported) return stream_->get(request);
    return place.status();
  }
  Completion* const completion = request.completion;
  completion->begin();
  peer_.devices->begin({.from = std::move(*place),
                        .offset = request.offset,
                        .target = request.target,
                        .owner = request.owner,
                        .completion = completion,
                        .use = {},
                        .onEnd = [this, completion, key = request.region.key](const Status& how) {
                          how.ok() ? completion->end(permission(key, kRemoteRead))
                                   : completion->end(how.error());
                        }});
  return {};
}

// When the peer has handed its memory over, or does not.
Status LocalChannel::getLater(const GetRequest& request) {
  request.completion->begin();
  peer_.devices->whenMapped(request.region, request.owner, request.completion,
                            [this, request](const Status& how) {
                              Status begun = how;
                              if (how.ok()) begun = getFromDevice(request);
                              if (how.code() == ErrorCode::kUnsupported)
                                begun = stream_->get(request);
                              begun.ok() ? request.completion->end(ErrorCode::kOk)
                                         : request.completion->end(begun.error());
                            });
  return {};
}

// Does all of them, piece by piece, on this thread and on another one.
Status LocalChannel::getShared(std::span<const GetRequest> requests) {
  struct One {
    One(DirectTransfers& transfers, const GetRequest& request)
        : request(request), running(transfers, request.completion) {}
    const GetRequest& request;
    const DirectTransfers::Running running;
    std::atomic<ErrorCode> code{ErrorCode::kOk};
  };
  struct Piece {
    One* one;
    size_t offset;
  };
  std::deque<One> all;
  std::vector<Piece> pieces;
  for (const GetRequest& request : requests) {
    One& one = all.emplace_back(transfers_, request);
    if (!one.running) {
      one.code = ErrorCode::kAborted;
    } else if (!isInside(request.offset, request.target.size(), request.region.bytes)) {
      one.code = ErrorCode::kRefused;
    } else {
      one.code = mayReadHere(request);
    }
    if (one.code != ErrorCode::kOk) continue;
    for (size_t at = 0; at < request.target.size(); at += kSharedPieceBytes)
      pieces.push_back({&one, at});
  }
  if (!all.front().running) return {ErrorCode::kAborted, "the channel is closed"};
  const auto work = std::make_shared<SharedWork>(pieces.size(), [this, &pieces](size_t index) {
    const auto [one, at] = pieces[index];
    if (one->code.load(std::memory_order_relaxed) != ErrorCode::kOk) return;
    const GetRequest& request = one->request;
    const auto target =
        request.target.subspan(at, std::min(kSharedPieceBytes, request.target.size() - at));
    const ErrorCode code = one->running.cancelled() ? ErrorCode::kAborted
                                                    : readPiece(request.region, request.offset + at,
                                                                target, request.isOfProgram);
    if (code != ErrorCode::kOk) one->code.store(code, std::memory_order_relaxed);
  });
  if (pieces.size() > 1) (void)peer_.copyLater([work] { work->help(); });
  work->finish();
  std::atomic_thread_fence(std::memory_order_acquire);  // the reads precede the check below
  for (One& one : all) {
    const GetRequest& request = one.request;
    ErrorCode code = one.code;
    if (code == ErrorCode::kOk) code = permission(request.region.key, kRemoteRead);
    const Status begun = end(request, code);
    if (begun.ok()) continue;
    request.completion->begin();
    request.completion->end(begun.code());
  }
  return {};
}

ErrorCode LocalChannel::mayReadHere(const GetRequest& request) const {
  if (!mapped(request.region) && !peer_.reader) return ErrorCode::kUnsupported;
  if (request.owner || isOfDevice(request.region)) return ErrorCode::kUnsupported;
  return permission(request.region.key, kRemoteRead);
}

// Does the whole get on this thread. kUnsupported: only the peer can answer it.
ErrorCode LocalChannel::readHere(const GetRequest& request,
                                 const DirectTransfers::Running& running) {
  if (const auto code = mayReadHere(request); code != ErrorCode::kOk) return code;
  for (size_t done = 0; done < request.target.size();) {
    if (running.cancelled()) return ErrorCode::kAborted;
    const auto piece =
        request.target.subspan(done, std::min(kPieceBytes, request.target.size() - done));
    const ErrorCode code =
        readPiece(request.region, request.offset + done, piece, request.isOfProgram);
    if (code != ErrorCode::kOk) return code;
    done += piece.size();
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // the reads precede the check below
  return permission(request.region.key, kRemoteRead);
}

ErrorCode LocalChannel::readPiece(const RemoteRegion& region, uint64_t offset,
                                  std::span<std::byte> target, bool isOfProgram) {
  const std::byte* place = mapped(region);
  if (!place)
    return peer_.reader ? peer_.reader->read(region, offset, target) : ErrorCode::kUnsupported;
  if (isOfProgram) {
    return copyIfMapped(target.data(), place + offset, target.size()) ? ErrorCode::kOk
                                                                      : ErrorCode::kInvalidArgument;
  }
  std::memcpy(target.data(), place + offset, target.size());
  return ErrorCode::kOk;
}

Status LocalChannel::write(const WriteRequest& request) {
  if (!isInside(request.offset, request.source.size(), request.region.bytes)) {
    return {ErrorCode::kRefused, "a write outside of the peer's region"};
  }
  const DirectTransfers::Running running(transfers_, request.completion);
  if (!running) return {ErrorCode::kAborted, "the channel is closed"};
  if (ended_.load(std::memory_order_acquire)) return why_;
  // As below, the stream takes it over while it still counts as running.
  if (request.owner || isOfDevice(request.region)) {
    const bool isMapped = request.owner && peer_.devices && mirror().exportOf(request.region.key);
    return isMapped && request.source.size() >= kLeastPull ? stream_->askToPull(request)
                                                           : stream_->write(request);
  }
  if (std::byte* const region = mapped(request.region)) {
    const ErrorCode code = writeHere(request, region, running);
    request.completion->begin();
    request.completion->end(code);
    return {};
  }
  // The write still counts as running. A thread that cancels waits for that, and then finds it in
  // the stream.
  if (!peer_.reader || request.source.size() < kLeastPull) return stream_->write(request);
  const size_t half = request.source.size() / 2 / kSharedPieceBytes * kSharedPieceBytes;
  if (!peer_.sharesCopies || half < kLeastPullPart) return stream_->askToPull(request);
  WriteRequest parts[] = {request, request};
  parts[0].source = request.source.first(half);
  parts[1].source = request.source.subspan(half);
  parts[1].offset += half;
  MOONCAKE_TRY(stream_->askToPull(parts[0]));
  const Status begun = stream_->askToPull(parts[1]);
  if (begun.ok()) return {};
  request.completion->begin();  // the first part is under way, so the write has begun
  request.completion->end(begun.code());
  return {};
}

// Does the whole write on this thread. The peer sees it as under way until it touches nothing more.
ErrorCode LocalChannel::writeHere(const WriteRequest& request, std::byte* region,
                                  const DirectTransfers::Running& running) {
  auto& word = *reinterpret_cast<std::atomic<uint32_t>*>(peer_.arena->base() + peer_.fence);
  const uint32_t before = word.fetch_add(FenceWords::kWrite, std::memory_order_seq_cst);
  const bool isShutOut = (before & (FenceWords::kFenced | FenceWords::kClosed)) != 0;
  const auto code = isShutOut ? ErrorCode::kAborted : writePieces(request, region, running);
  word.fetch_sub(FenceWords::kWrite, std::memory_order_seq_cst);
  return code;
}

ErrorCode LocalChannel::writePieces(const WriteRequest& request, std::byte* region,
                                    const DirectTransfers::Running& running) {
  const auto allowed = [&] {
    const bool isHungUp = (fenceWord()->load(std::memory_order_seq_cst) & FenceWords::kClosed) != 0;
    return isHungUp ? ErrorCode::kAborted : permission(request.region.key, kRemoteWrite);
  };
  for (size_t done = 0; done < request.source.size();) {
    if (running.cancelled()) return ErrorCode::kAborted;
    if (const auto code = allowed(); code != ErrorCode::kOk) return code;
    const size_t bytes = std::min(kWritePieceBytes, request.source.size() - done);
    failpoint("write-piece");
    std::byte* const target = region + request.offset + done;
    if (!request.isOfProgram) {
      std::memcpy(target, request.source.data() + done, bytes);
    } else if (!copyIfMapped(target, request.source.data() + done, bytes)) {
      return ErrorCode::kInvalidArgument;
    }
    done += bytes;
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);  // the writes precede the check below
  return allowed();
}

// On the loop's thread.
void LocalChannel::onPull(const PullRequest& request) {
  if (pulls_.fetch_add(1) < wire::kMaxTransfers) return pull(request, 0);
  --pulls_;
  stream_->answerPull(request.number, ErrorCode::kExhausted);
}

// Pulls the rest, in turns with other pulls.
void LocalChannel::pull(const PullRequest& request, uint64_t done) {
  const bool goesOn = peer_.copyLater([weak = weak_from_this(), request, done]() mutable {
    const auto self = weak.lock();
    if (!self || self->pullFromDevice(request)) return;
    auto code = ErrorCode::kOk;
    for (const uint64_t turn = done + kPullBytes; code == ErrorCode::kOk && done < turn;) {
      const size_t bytes = std::min<uint64_t>(kWritePieceBytes, request.length - done);
      code = self->pullPiece(request, done, bytes);
      done += bytes;
      if (done == request.length) break;
    }
    if (code == ErrorCode::kOk && done < request.length) return self->pull(request, done);
    self->endPull(request, code);
  });
  if (!goesOn) stream_->answerPull(request.number, ErrorCode::kAborted);
}

// Opens the region for each piece and does not hold it in between, as for frames over a socket.
ErrorCode LocalChannel::pullPiece(const PullRequest& request, uint64_t done, size_t bytes) {
  SharedLock lock(pullMutex_);
  if (refusesPulls_) return ErrorCode::kAborted;
  const auto use = context_.regions.open(request.key, request.offset, request.length, kRemoteWrite);
  if (!use) return ErrorCode::kRefused;
  if (use.owner() || isOfDevice(request.source)) return ErrorCode::kUnsupported;
  const auto allowed = [&] { return permission(request.source.key, kRemoteRead); };
  if (const auto code = allowed(); code != ErrorCode::kOk) return ErrorCode::kAborted;
  const auto code = readPiece(request.source, done, {use.data() + done, bytes}, use.isOfProgram());
  if (code == ErrorCode::kInvalidArgument) return ErrorCode::kRefused;
  if (code != ErrorCode::kOk) return code == ErrorCode::kRefused ? ErrorCode::kAborted : code;
  std::atomic_thread_fence(std::memory_order_acquire);
  return allowed() == ErrorCode::kOk ? ErrorCode::kOk : ErrorCode::kAborted;
}

// Returns false if this is no pull between devices.
bool LocalChannel::pullFromDevice(const PullRequest& pull) {
  if (!peer_.devices || !isOfDevice(pull.source)) return false;
  SharedLock lock(pullMutex_);
  auto use = context_.regions.open(pull.key, pull.offset, pull.length, kRemoteWrite);
  if (!use || !use.owner() || refusesPulls_) return false;
  auto place = peer_.devices->find(pull.source, use.owner());
  if (!place.ok()) {
    const ErrorCode code = place.error().code;
    endPull(pull, code == ErrorCode::kUnsupported ? code : ErrorCode::kAborted);
    return true;
  }
  const std::span target(use.data(), pull.length);
  const MemoryOwner owner = use.owner();
  peer_.devices->begin({.from = std::move(*place),
                        .target = target,
                        .owner = owner,
                        .completion = nullptr,
                        .use = std::move(use),
                        .onEnd = [this, pull](const Status& how) {
                          if (!how.ok()) {
                            log(LogLevel::kWarning, transportName_,
                                "a write of a peer to a device has failed: ", how.error().message);
                            return endPull(pull, ErrorCode::kRefused);
                          }
                          const bool isAllowed =
                              permission(pull.source.key, kRemoteRead) == ErrorCode::kOk;
                          endPull(pull, isAllowed ? ErrorCode::kOk : ErrorCode::kAborted);
                        }});
  return true;
}

void LocalChannel::endPull(const PullRequest& pull, ErrorCode code) {
  --pulls_;
  stream_->answerPull(pull.number, code);
}

Status LocalChannel::send(ByteView message) { return stream_->send(message); }

void LocalChannel::cancel(const Completion* completion) {
  transfers_.cancel(completion);
  if (peer_.devices) peer_.devices->await(completion);
  stream_->cancel(completion);
}

void LocalChannel::fence() {
  peer_.ours->fence();
  refusePulls();
  stream_->fence();
}

// When this returns, no byte is pulled any more.
void LocalChannel::refusePulls() {
  refusesPulls_ = true;  // comes first: the lock then waits for the last pieces
  Guard lock(pullMutex_);
  if (peer_.devices) peer_.devices->await(nullptr);
}

void LocalChannel::close() {
  closing_.store(true, std::memory_order_relaxed);
  puts_.close();
  transfers_.close();
  // A peer that has ended by itself writes nothing more.
  if (!ended_.load(std::memory_order_acquire)) peer_.ours->close();
  refusePulls();
  if (peer_.devices) peer_.devices->close();
  stream_->close();
}

Evidence LocalChannel::onEnded(const Status& how) {
  Evidence evidence;
  if (how.ok()) {
    evidence = {Evidence::Kind::kGoodbye, "the peer said goodbye"};
  } else {
    // The kernel marks the word before it closes the sockets. If the word is still held, something
    // else closed this socket. If the word is marked and the socket closed, the process has ended:
    // the end of a single thread closes no socket.
    const LifeWord& life = *peerLife().word;
    const uint32_t holder = life.holder.load(std::memory_order_acquire);
    const bool left = holder == LifeWord::kGone && life.beats.load(std::memory_order_relaxed) != 0;
    evidence = {LifeWord::isMarked(holder) ? Evidence::Kind::kExited
                : left                     ? Evidence::Kind::kGoodbye
                                           : Evidence::Kind::kUnreachable,
                how.error().message};
  }
  // The peer may live, and not know that the connection broke.
  if (evidence.kind == Evidence::Kind::kUnreachable) peer_.ours->close();
  // The peer has closed its channel, and had set kClosed in its word for us before the goodbye.
  if (how.ok()) peer_.ours->release();
  if (!ended_.load(std::memory_order_relaxed)) {
    why_ = {ErrorCode::kPeerLost, evidence.detail};
    ended_.store(true, std::memory_order_release);
  }
  return evidence;
}

PeerLife LocalChannel::peerLife() const {
  const auto* word = reinterpret_cast<const LifeWord*>(peer_.arena->base() + peer_.life);
  return {word, peer_.process};
}

const std::atomic<uint32_t>* LocalChannel::fenceWord() const {
  return reinterpret_cast<const std::atomic<uint32_t>*>(peer_.arena->base() + peer_.fence);
}

void LocalChannel::peerExited(const Error& why) {
  if (!ended_.load(std::memory_order_relaxed)) {
    why_ = why;
    ended_.store(true, std::memory_order_release);
  }
  refusePulls();
  stream_->close(why);
}

// kAborted: the peer has fenced us. kRefused: the region does not exist or lacks the right.
ErrorCode LocalChannel::permission(uint64_t key, uint32_t right) const {
  if ((fenceWord()->load(std::memory_order_seq_cst) & FenceWords::kFenced) != 0)
    return ErrorCode::kAborted;
  return mirror().allows(key, right) ? ErrorCode::kOk : ErrorCode::kRefused;
}

bool LocalChannel::isOfDevice(const RemoteRegion& region) const {
  return mirror().isOfDevice(region.key);
}

const RegionMirror& LocalChannel::mirror() const {
  return *reinterpret_cast<const RegionMirror*>(peer_.arena->base() + peer_.mirror);
}

Doorbell& LocalChannel::bellOf(const RemoteRegion& region, std::byte* start) const {
  const uint64_t offset = mirror().bellOf(region.key);
  const bool isThere = offset % alignof(Doorbell) == 0 &&
                       isInside(offset, sizeof(Doorbell), peer_.arena->capacity());
  return *reinterpret_cast<Doorbell*>(offset && isThere ? peer_.arena->base() + offset : start);
}

// Returns the start of the region in the mapping; null: it does not lie in the arena.
std::byte* LocalChannel::mapped(const RemoteRegion& region) const {
  const uint64_t offset =
      region.address - peer_.address;  // wraps to a huge number if it lies below
  if (!isInside(offset, region.bytes, peer_.arena->capacity())) return nullptr;
  return peer_.arena->base() + offset;
}

}  // namespace mooncake
