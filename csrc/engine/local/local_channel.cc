#include "engine/local/local_channel.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace mooncake {
namespace {

// A get asks whether it was cancelled after so many bytes: cancelGets() waits a few milliseconds at
// most.
constexpr size_t kPieceBytes = size_t(16) << 20;

bool isInside(uint64_t offset, uint64_t bytes, uint64_t whole) {
  return offset <= whole && bytes <= whole - offset;
}

}  // namespace

std::shared_ptr<LocalChannel> LocalChannel::start(const char* transportName, Mapped peer, Fd socket,
                                                  const EngineId& id,
                                                  const TransportContext& context) {
  auto channel = std::make_shared<LocalChannel>(transportName, std::move(peer));
  // The stream must not keep its owner alive. It may end before the next line has run. While we are
  // closing, the peer's answer to our goodbye is no news.
  channel->stream_ = StreamConnection::start(
      std::move(socket), context.loop, context.regions,
      {.onMessage = [id, &context](ByteView message) { context.onMessage(id, message); },
       .onClosed =
           [weak = channel->weak_from_this(), id, &context](const Status& how) {
             const auto self = weak.lock();
             if (!self || self->closing_.load(std::memory_order_relaxed)) return;
             context.onEnded(id, self->onEnded(how));
           }});
  return channel;
}

LocalChannel::LocalChannel(const char* transportName, Mapped peer)
    : transportName_(transportName), peer_(std::move(peer)) {}

LocalChannel::~LocalChannel() { close(); }

Status LocalChannel::put(const PutRequest& request) {
  const Gate::Pass pass(puts_);
  if (!pass) return {ErrorCode::kAborted, "the channel is closed"};
  if (ended_.load(std::memory_order_acquire)) return why_;
  const Signal& signal = request.signal;
  const uint64_t bytes = request.region.bytes;
  if (signal.offset % sizeof(uint64_t) != 0 || signal.offset < sizeof(Doorbell)) {
    return {ErrorCode::kInvalidArgument,
            "a signal's word is 8-aligned and behind the doorbell, not at " +
                std::to_string(signal.offset)};
  }
  std::byte* region = mapped(request.region);
  if (!region || permission(request.region.key, kRemoteWrite) == ErrorCode::kRefused ||
      request.region.address % alignof(Doorbell) != 0 ||
      !isInside(signal.offset, sizeof(uint64_t), bytes) ||
      !isInside(request.offset, request.data.size(), bytes) ||
      (request.offset < sizeof(Doorbell) && !request.data.empty())) {
    return {ErrorCode::kRefused, "a put outside of the peer's window part"};
  }
  auto& word = *reinterpret_cast<std::atomic<uint64_t>*>(region + signal.offset);
  if (!canStamp(word, signal.stamp)) return {};  // late
  const auto isShutOut = [&] {
    return permission(request.region.key, kRemoteWrite) == ErrorCode::kAborted;
  };
  const Error shutOut{ErrorCode::kAborted, "the peer goes on without us"};
  if (isShutOut()) return shutOut;
  if (!request.data.empty()) {
    std::memcpy(region + request.offset, request.data.data(), request.data.size());
  }
  if (isShutOut()) return shutOut;
  if (tryStamp(word, signal.stamp)) reinterpret_cast<Doorbell*>(region)->ring();
  return {};
}

Status LocalChannel::get(const GetRequest& request) {
  if (!isInside(request.offset, request.target.size(), request.region.bytes)) {
    return {ErrorCode::kRefused, "a get outside of the peer's region"};
  }
  const DirectGets::Running running(gets_, request.completion);
  if (!running) return {ErrorCode::kAborted, "the channel is closed"};
  const ErrorCode code = readHere(request, running);
  // Still counted as running: whoever cancels waits for that, and then finds the get in the stream.
  if (code == ErrorCode::kUnsupported) return stream_->get(request);
  request.completion->begin();
  request.completion->end(code);
  return {};
}

// The whole get on this thread; kUnsupported when only the peer can answer it.
ErrorCode LocalChannel::readHere(const GetRequest& request, const DirectGets::Running& running) {
  const std::byte* region = mapped(request.region);
  if (!region && !peer_.reader) return ErrorCode::kUnsupported;
  const auto allowed = [&] { return permission(request.region.key, kRemoteRead); };
  if (const auto code = allowed(); code != ErrorCode::kOk) return code;
  for (size_t done = 0; done < request.target.size();) {
    if (running.cancelled()) return ErrorCode::kAborted;
    const auto piece =
        request.target.subspan(done, std::min(kPieceBytes, request.target.size() - done));
    const uint64_t offset = request.offset + done;
    if (region) {
      std::memcpy(piece.data(), region + offset, piece.size());
    } else if (const auto code = peer_.reader->read(request.region, offset, piece);
               code != ErrorCode::kOk) {
      return code;
    }
    done += piece.size();
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // first what was read, then if it counts
  return allowed();
}

Status LocalChannel::send(ByteView message) { return stream_->send(message); }

void LocalChannel::cancelGets(const Completion* completion) {
  gets_.cancel(completion);
  stream_->cancelGets(completion);
}

void LocalChannel::fence() {
  peer_.ours->close();
  stream_->fence();
}

void LocalChannel::close() {
  closing_.store(true, std::memory_order_relaxed);
  puts_.close();
  gets_.close();
  stream_->close();
}

Evidence LocalChannel::onEnded(const Status& how) {
  Evidence evidence;
  if (how.ok()) {
    evidence = {Evidence::Kind::kGoodbye, "the peer said goodbye"};
  } else {
    // The kernel marks the word before it closes the sockets: as long as it is held, it was
    // something else that closed this one. Marked and closed it is the process's end: a thread that
    // was killed alone takes no socket with it.
    const LifeWord& life = *peerLife().word;
    const uint32_t holder = life.holder.load(std::memory_order_acquire);
    const bool left = holder == LifeWord::kGone && life.beats.load(std::memory_order_relaxed) != 0;
    evidence = {LifeWord::isMarked(holder) ? Evidence::Kind::kExited
                : left                     ? Evidence::Kind::kGoodbye
                                           : Evidence::Kind::kUnreachable,
                how.error().message};
  }
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
  stream_->close(why);
}

// kAborted: the peer has shut us out; kRefused: that region is not there for this.
ErrorCode LocalChannel::permission(uint64_t key, uint32_t right) const {
  if (fenceWord()->load(std::memory_order_seq_cst) != 0) return ErrorCode::kAborted;
  const auto& mirror = *reinterpret_cast<const RegionMirror*>(peer_.arena->base() + peer_.mirror);
  return mirror.allows(key, right) ? ErrorCode::kOk : ErrorCode::kRefused;
}

// Where the region begins in the mapping; null when it does not lie in the arena.
std::byte* LocalChannel::mapped(const RemoteRegion& region) const {
  const uint64_t offset =
      region.address - peer_.address;  // wraps around, far out, when it lies below
  if (!isInside(offset, region.bytes, peer_.arena->capacity())) return nullptr;
  return peer_.arena->base() + offset;
}

}  // namespace mooncake
