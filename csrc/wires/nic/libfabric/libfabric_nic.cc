#include "wires/nic/libfabric/libfabric_nic.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/log.h"
#include "wires/nic/libfabric/completion_errors.h"

namespace mooncake {
namespace {

constexpr size_t kCompletionsAtOnce = 64;
// Within one time limit, overdue operations are looked for this many times. The clock moves in
// steps of at most one such part.
constexpr int kChecksPerTimeout = 8;
// A peer's progress keeps its other operations alive, but not longer than this many time limits: a
// single completion may be lost.
constexpr int kMostTimeouts = 16;
// Time allowed for each byte: 64 MB/s.
constexpr uint64_t kNanosecondsPerByte = 16;
// Pause while the provider does not take a begun operation; it may be connecting, for instance.
constexpr std::chrono::nanoseconds kRetryPause = std::chrono::microseconds(200);

// How long cards without a descriptor yield or nap.
constexpr std::chrono::nanoseconds kYieldFor = std::chrono::microseconds(50);
constexpr std::chrono::nanoseconds kShortestNap = std::chrono::microseconds(5);
constexpr std::chrono::nanoseconds kLongestBusyNap = std::chrono::microseconds(100);
constexpr std::chrono::nanoseconds kLongestNap = std::chrono::milliseconds(1);

// Provider rxm sends up to this many bytes at once, unless FI_OFI_RXM_BUFFER_SIZE says otherwise.
// It fetches longer packets by reads of its own. Over TCP (1.17), closing an endpoint during such a
// read ends the process in one of ten cases, so there no packet is longer.
constexpr size_t kRxmBufferBytes = 16384;

uint64_t mostSendBytes(const fi_info& info) {
  const bool isFetched = info.fabric_attr->prov_name == std::string_view("tcp;ofi_rxm");
  return isFetched ? std::min(info.ep_attr->max_msg_size, kRxmBufferBytes)
                   : info.ep_attr->max_msg_size;
}

NicLimits limitsOf(const fi_info& info, const FabricEnv& env) {
  const bool hasRma = (info.caps & FI_RMA) != 0;
  const size_t depth = info.tx_attr->size;
  const std::string_view provider = info.fabric_attr->prov_name;
  return {
      .mostSendBytes = mostSendBytes(info),
      .mostRmaBytes = hasRma ? info.ep_attr->max_msg_size : 0,
      .sendDepth = env.mostUnderWay == 0 ? depth : std::min(depth, env.mostUnderWay),
      .receiveDepth = info.rx_attr->size,
      .mostMemoryBytes = env.mostMemoryBytes,
      .remoteRead = hasRma,
      .remoteWrite = hasRma,
      .deviceMemory = (info.caps & FI_HMEM) != 0,
      .withdrawalStops = provider.starts_with("efa") || provider.starts_with("verbs"),
      // If a link is down, read requests stay in the provider's queue. Closing it (1.17) looks for
      // a context that they do not have.
      .closeEndsReads = !provider.starts_with("tcp"),
  };
}

bool isSerial(const fi_info& info) { return info.domain_attr->threading != FI_THREAD_SAFE; }

}  // namespace

Result<std::unique_ptr<Nic>> LibfabricNic::open(std::shared_ptr<const LibfabricLibrary> library,
                                                FabricInfo info, const std::string& name,
                                                const FabricEnv& env, const MemoryPlaces& places) {
  if (info->tx_attr->iov_limit < 2 || info->domain_attr->mr_key_size > sizeof(NicKey::key)) {
    return Error{ErrorCode::kUnsupported,
                 std::string("provider ") + info->fabric_attr->prov_name +
                     " cannot gather two pieces, or has keys of more than 64 "
                     "bits"};
  }
  auto endpoint = LibfabricEndpoint::open(std::move(library), std::move(info));
  if (!endpoint.ok()) return endpoint.error();
  Fd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake) return systemError("eventfd", errno);
  return std::unique_ptr<Nic>(
      new LibfabricNic(std::move(*endpoint), name, env, places, std::move(wake)));
}

LibfabricNic::LibfabricNic(std::unique_ptr<LibfabricEndpoint> endpoint, std::string name,
                           const FabricEnv& env, const MemoryPlaces& places, Fd wake)
    : name_(std::move(name)),
      provider_(endpoint->info().fabric_attr->prov_name),
      timeout_(env.timeout),
      link_(endpoint->info().domain_attr->name == nullptr ? ""
                                                          : endpoint->info().domain_attr->name),
      isSerialised_(isSerial(endpoint->info())),
      limits_(limitsOf(endpoint->info(), env)),
      address_(endpoint->address()),
      wake_(std::move(wake)),
      endpoint_(std::move(endpoint)),
      memories_(std::make_shared<LibfabricMemories>(*endpoint_, places)),
      transmits_(limits_.sendDepth),
      receives_(limits_.receiveDepth) {}

LibfabricNic::~LibfabricNic() { close(); }

Result<NicPeer> LibfabricNic::insert(ByteView address) {
  // The provider would read past an address that is too short or, as text, has no end.
  const bool isText = !address_.empty() && address_.back() == std::byte{0};
  const bool fits = isText ? !address.empty() && address.back() == std::byte{0}
                           : address.size() == address_.size();
  if (!fits || address.size() > 256)
    return Error{ErrorCode::kInvalidArgument, "not an address of provider " + provider_};
  Lock lock(mutex_);
  if (!endpoint_) return Error{ErrorCode::kAborted, "the network card is closed"};
  return peers_.insert(Bytes(address.begin(), address.end()), [&](fi_addr_t& entry) -> Status {
    mutex_.assertHeld();
    const int count = ::fi_av_insert(endpoint_->addresses(), address.data(), 1, &entry, 0, nullptr);
    if (count == 1) return {};
    return {ErrorCode::kSystem,
            "fi_av_insert of provider " + provider_ + " took no address" +
                (count < 0 ? std::string(": ") + endpoint_->library().strerror(-count) : "")};
  });
}

void LibfabricNic::remove(NicPeer number) {
  Lock lock(mutex_);
  NicPeers::Peer* peer = peers_.find(number);
  if (peer == nullptr || peer->isRemoved || !endpoint_) return;
  peers_.remove(number);
  while (!peer->queue.empty()) {
    NicOperation& operation = *peer->queue.front();
    peer->queue.pop_front();
    end(operation, NicError::kCancelled, 0);
  }
  std::erase(queuedPeers_, number);
  peers_.letGo(*peer, [&](fi_addr_t entry) {
    mutex_.assertHeld();
    ::fi_av_remove(endpoint_->addresses(), &entry, 1, 0);
  });
  wakeLongSleeper();
}

Result<std::unique_ptr<NicMemory>> LibfabricNic::registerMemory(std::span<std::byte> memory,
                                                                uint32_t access) {
  // Not under our lock: a registration takes long, and other threads post meanwhile. A serialised
  // provider needs the lock all the same.
  if (!isSerialised_) return memories_->add(memory, access);
  Lock lock(mutex_);
  return memories_->add(memory, access);
}

Status LibfabricNic::send(NicPeer peer, NicBuffer header, NicBuffer body, void* context) {
  return begin(Kind::kSent, peer, std::array{header, body}, 0, 0, context);
}

Status LibfabricNic::receive(NicBuffer buffer, void* context) {
  return begin(Kind::kReceived, 0, std::array{buffer}, 0, 0, context);
}

Status LibfabricNic::read(NicPeer peer, NicBuffer target, NicKey from, uint64_t offset,
                          void* context) {
  return begin(Kind::kRead, peer, std::array{target}, from.base + offset, from.key, context);
}

Status LibfabricNic::write(NicPeer peer, NicBuffer source, NicKey to, uint64_t offset,
                           void* context) {
  return begin(Kind::kWritten, peer, std::array{source}, to.base + offset, to.key, context);
}

Status LibfabricNic::begin(Kind kind, NicPeer number, std::span<const NicBuffer> pieces,
                           uint64_t remoteAddress, uint64_t remoteKey, void* context) {
  Lock lock(mutex_);
  if (!endpoint_) return {ErrorCode::kAborted, "the network card is closed"};
  const bool isReceive = kind == Kind::kReceived;
  NicPeers::Peer* peer = isReceive ? nullptr : peers_.find(number);
  if (!isReceive && peer == nullptr) return {ErrorCode::kInvalidArgument, "no such peer"};
  if (peer != nullptr && peer->isRemoved) return {ErrorCode::kPeerLost, "the peer was removed"};
  NicOperations& operations = isReceive ? receives_ : transmits_;
  NicOperation* operation = operations.take();
  if (operation == nullptr) {
    if (!isReceive && countUnderWay() == 0)
      return {ErrorCode::kSystem, "network card " + name_ + " does not end its overdue operations"};
    return {ErrorCode::kExhausted, {}};
  }
  operation->kind = kind;
  operation->context = context;
  operation->peer = number;
  operation->begun = clock_;
  operation->bytes = 0;
  operation->pieceCount = 0;
  for (const NicBuffer& piece : pieces) {
    if (piece.bytes.empty() && operation->pieceCount > 0) continue;
    operation->pieces[operation->pieceCount] = {piece.bytes.data(), piece.bytes.size()};
    operation->descriptors[operation->pieceCount++] =
        piece.memory == nullptr ? nullptr : LibfabricMemories::descriptorOf(*piece.memory);
    operation->bytes += piece.bytes.size();
  }
  operation->remoteAddress = remoteAddress;
  operation->remoteKey = remoteKey;
  if (isLinkDown_ && !isReceive) {
    end(*operation, NicError::kDevice, ENETDOWN);
  } else if (isReceive ? !queuedReceives_.empty() : !peer->queue.empty()) {
    operation->state = State::kQueued;
    (isReceive ? queuedReceives_ : peer->queue).push_back(operation);
  } else if (!giveOrEnd(*operation)) {
    operation->state = State::kQueued;
    (isReceive ? queuedReceives_ : peer->queue).push_back(operation);
    if (!isReceive) queuedPeers_.push_back(number);
  }
  wakeLongSleeper();
  return {};
}

ssize_t LibfabricNic::give(NicOperation& operation) {
  fid_ep* endpoint = endpoint_->endpoint();
  if (operation.kind == Kind::kReceived) {
    return ::fi_recv(endpoint, operation.pieces[0].iov_base, operation.pieces[0].iov_len,
                     operation.descriptors[0], FI_ADDR_UNSPEC, &operation.provider);
  }
  const fi_addr_t peer = peers_.find(operation.peer)->address->entry;
  if (operation.kind == Kind::kSent) {
    const fi_msg message{.msg_iov = operation.pieces.data(),
                         .desc = operation.descriptors.data(),
                         .iov_count = operation.pieceCount,
                         .addr = peer,
                         .context = &operation.provider};
    return ::fi_sendmsg(endpoint, &message, FI_COMPLETION);
  }
  const fi_rma_iov remote{operation.remoteAddress, operation.bytes, operation.remoteKey};
  const fi_msg_rma message{.msg_iov = operation.pieces.data(),
                           .desc = operation.descriptors.data(),
                           .iov_count = operation.pieceCount,
                           .addr = peer,
                           .rma_iov = &remote,
                           .rma_iov_count = 1,
                           .context = &operation.provider};
  if (operation.kind == Kind::kRead) return ::fi_readmsg(endpoint, &message, FI_COMPLETION);
  // Without FI_DELIVERY_COMPLETE a provider may complete a write when its bytes have only left.
  return ::fi_writemsg(endpoint, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE);
}

bool LibfabricNic::giveOrEnd(NicOperation& operation) {
  const ssize_t result = give(operation);
  if (result == -FI_EAGAIN || result == -FI_ENOMEM) return false;
  if (result == 0) {
    operation.state = State::kUnderWay;
    if (operation.kind != Kind::kReceived) ++peers_.find(operation.peer)->underWay;
    return true;
  }
  const int error = static_cast<int>(-result);
  end(operation, nicErrorOf(provider_, error, 0), error);
  return true;
}

void LibfabricNic::giveQueued() {
  while (!queuedReceives_.empty() && giveOrEnd(*queuedReceives_.front()))
    queuedReceives_.pop_front();
  std::erase_if(queuedPeers_, [&](NicPeer number) REQUIRES(mutex_) {
    auto& queue = peers_.find(number)->queue;
    while (!queue.empty() && giveOrEnd(*queue.front())) queue.pop_front();
    return queue.empty();
  });
}

// Ends the operation for its owner. `isLeftBehind`: the provider still has it.
void LibfabricNic::end(NicOperation& operation, NicError error, int providerError,
                       bool isLeftBehind) {
  ended_.push_back({.kind = operation.kind,
                    .error = errorFor(operation, error),
                    .context = operation.context,
                    .providerError = providerError,
                    .abandoned = isLeftBehind});
  if (isLeftBehind) {
    operation.state = State::kAbandoned;
    ++abandoned_;
  } else {
    (operation.kind == Kind::kReceived ? receives_ : transmits_).giveBack(operation);
  }
}

NicError LibfabricNic::errorFor(const NicOperation& operation, NicError error) {
  if (operation.kind == Kind::kReceived || error == NicError::kNone) return error;
  return peers_.find(operation.peer)->isRemoved ? NicError::kCancelled : error;
}

size_t LibfabricNic::poll(std::span<NicCompletion> into) {
  size_t count = 0;
  {
    Lock lock(mutex_);
    advanceClock();
    if (endpoint_) {
      if (clock_ >= nextCheck_) giveUpOverdue();
      if (hasQueued()) giveQueued();
    }
    count = takeEnded(into);
    if (!endpoint_) return count;
    if (isSerialised_) count += takeCompletions(into.subspan(count));
  }
  if (!isSerialised_) count += takeCompletions(into.subspan(count));
  if (count > 0) {
    nap_ = {};
    lastFound_ = Clock::now();
  }
  return count;
}

size_t LibfabricNic::takeEnded(std::span<NicCompletion> into) {
  const size_t count = std::min(into.size(), ended_.size());
  std::copy_n(ended_.begin(), count, into.begin());
  ended_.erase(ended_.begin(), ended_.begin() + static_cast<ptrdiff_t>(count));
  return count;
}

size_t LibfabricNic::takeCompletions(std::span<NicCompletion> into) {
  std::array<fi_cq_msg_entry, kCompletionsAtOnce> entries;
  size_t count = 0;
  while (count < into.size()) {
    const ssize_t got = ::fi_cq_read(endpoint_->completions(), entries.data(),
                                     std::min(entries.size(), into.size() - count));
    if (got == 0 || got == -FI_EAGAIN) break;
    std::unique_lock lock(mutex_, std::defer_lock);
    if (!isSerialised_) lock.lock();
    if (got == -FI_EAVAIL) {
      if (finishFailed(into[count])) ++count;
      continue;
    }
    if (got < 0) {
      giveUpAll(NicError::kDevice, static_cast<int>(-got));
      break;
    }
    for (const fi_cq_msg_entry& entry : std::span(entries).first(static_cast<size_t>(got))) {
      into[count] = {.bytes = entry.len};
      if (finish(entry.op_context, into[count])) ++count;
    }
    if (static_cast<size_t>(got) < entries.size()) break;
  }
  return count;
}

bool LibfabricNic::finish(const void* provider, NicCompletion& completion) {
  NicOperation* operation = transmits_.find(provider);
  if (operation == nullptr) operation = receives_.find(provider);
  if (operation == nullptr) return false;
  const bool isAwaited = operation->state == State::kUnderWay;
  completion.kind = operation->kind;
  completion.context = operation->context;
  completion.error = errorFor(*operation, completion.error);
  if (completion.kind != Kind::kReceived) completion.bytes = operation->bytes;
  if (operation->state == State::kUnderWay || operation->state == State::kAbandoned) {
    if (!isAwaited) --abandoned_;
    leave(*operation);
  }
  return isAwaited;
}

// The provider is done with the operation.
void LibfabricNic::leave(NicOperation& operation) {
  if (operation.kind == Kind::kReceived) {
    receives_.giveBack(operation);
    return;
  }
  NicPeers::Peer& peer = *peers_.find(operation.peer);
  peer.lastProgress = clock_;
  --peer.underWay;
  transmits_.giveBack(operation);
  peers_.letGo(peer, [&](fi_addr_t entry) {
    mutex_.assertHeld();
    ::fi_av_remove(endpoint_->addresses(), &entry, 1, 0);
  });
}

bool LibfabricNic::finishFailed(NicCompletion& completion) {
  fi_cq_err_entry failed{};
  if (::fi_cq_readerr(endpoint_->completions(), &failed, 0) <= 0) return false;
  completion = {.error = nicErrorOf(provider_, failed.err, failed.prov_errno),
                .providerError = failed.err};
  const bool isAwaited = finish(failed.op_context, completion);
  log(LogLevel::kDebug, name_, "provider ", provider_, ": ",
      endpoint_->library().strerror(failed.err), " (", failed.prov_errno, ")",
      isAwaited ? "" : ", of an operation that no caller waits for");
  return isAwaited;
}

void LibfabricNic::advanceClock() {
  const auto now = Clock::now();
  const auto most = timeout_ / kChecksPerTimeout;
  clock_ +=
      static_cast<uint64_t>(std::min<std::chrono::nanoseconds>(now - lastTick_, most).count());
  lastTick_ = now;
}

bool LibfabricNic::isOverdue(const NicOperation& operation) {
  const auto timeout = static_cast<uint64_t>(timeout_.count());
  const uint64_t budget = timeout + operation.bytes * kNanosecondsPerByte;
  const uint64_t since = std::max(operation.begun, peers_.find(operation.peer)->lastProgress);
  return clock_ > since + budget || clock_ > operation.begun + kMostTimeouts * budget;
}

void LibfabricNic::giveUpOverdue() {
  nextCheck_ = clock_ + static_cast<uint64_t>(timeout_.count() / kChecksPerTimeout);
  isLinkDown_ = countUnderWay() > 0 ? link_.isDown() : isLinkDown_ && link_.isDown();
  if (isLinkDown_) return giveUpAll(NicError::kDevice, ENETDOWN);
  for (NicOperation& operation : transmits_.all()) {
    if (operation.state == State::kUnderWay && isOverdue(operation)) {
      end(operation, NicError::kUnreachable, ETIMEDOUT, /*isLeftBehind=*/true);
    } else if (operation.state == State::kQueued && isOverdue(operation)) {
      std::erase(peers_.find(operation.peer)->queue, &operation);
      end(operation, NicError::kUnreachable, ETIMEDOUT);
    }
  }
}

// Receives stay, because peers may come back with the link.
void LibfabricNic::giveUpAll(NicError error, int providerError) {
  for (NicOperation& operation : transmits_.all()) {
    if (operation.state == State::kUnderWay) end(operation, error, providerError, true);
    if (operation.state == State::kQueued) {
      std::erase(peers_.find(operation.peer)->queue, &operation);
      end(operation, error, providerError);
    }
  }
}

void LibfabricNic::wait(Deadline deadline) {
  const NicSleep sleep = fallAsleep(deadline);
  const auto left = Deadline::at(sleep.until).left();
  if (sleep.yields) {
    ::sched_yield();
  } else if (left.count() > 0) {
    std::array<pollfd, 2> events{
        {{sleep.descriptors[0], POLLIN, 0}, {sleep.descriptors[1], POLLIN, 0}}};
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    const timespec limit{seconds.count(), (left - seconds).count()};
    ::ppoll(events.data(), events.size(), &limit, nullptr);
  }
  awake();
}

NicSleep LibfabricNic::fallAsleep(Deadline deadline) {
  const auto now = Clock::now();
  Lock lock(mutex_);
  if (!ended_.empty() || !endpoint_) return {.until = now};
  std::chrono::nanoseconds most = deadline.left();
  const bool isBusy = countUnderWay() > 0;
  if (isBusy) most = std::min(most, timeout_ / kChecksPerTimeout);
  if (hasQueued()) most = std::min(most, kRetryPause);
  const int descriptor = endpoint_->waitDescriptor();
  if (descriptor >= 0) {
    fid* waited = &endpoint_->completions()->fid;
    if (::fi_trywait(endpoint_->fabric(), &waited, 1) != 0) return {.until = now};
  } else if (now - lastFound_ < kYieldFor) {
    // A nap would take longer than the next completion is likely to take.
    return {.until = now, .yields = true};
  } else {
    nap_ = std::clamp(nap_ * 2, kShortestNap, isBusy ? kLongestBusyNap : kLongestNap);
    most = std::min(most, nap_);
  }
  sleepsLong_ = !isBusy;
  return {.until = now + most, .descriptors = {wake_.get(), descriptor}};
}

void LibfabricNic::awake() {
  if (isWoken_.exchange(false)) {
    uint64_t wakes = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &wakes, sizeof(wakes));
  }
  Lock lock(mutex_);
  sleepsLong_ = false;
}

void LibfabricNic::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t done = ::write(wake_.get(), &one, sizeof(one));
  isWoken_.store(true);  // comes last: a thread that sees it can read the eventfd
}

// A thread that fell asleep with nothing under way has a timeout that is too
// long now.
void LibfabricNic::wakeLongSleeper() {
  if (!sleepsLong_) return;
  sleepsLong_ = false;
  wake();
}

void LibfabricNic::close() {
  Lock lock(mutex_);
  if (!endpoint_) return;
  // Registrations that are bound to the endpoint must be closed first.
  const bool areBound = (endpoint_->info().domain_attr->mr_mode & FI_MR_ENDPOINT) != 0;
  if (areBound) memories_->closeAll();
  endpoint_->closeEndpoint();
  memories_->closeAll();
  for (NicOperations* operations : {&transmits_, &receives_}) {
    for (NicOperation& operation : operations->all()) {
      if (operation.state == State::kUnderWay || operation.state == State::kQueued)
        end(operation, NicError::kCancelled, 0);
    }
  }
  queuedPeers_.clear();
  queuedReceives_.clear();
  endpoint_.reset();
}

}  // namespace mooncake
