#include "collectives/peer/peer_collectives.h"

#include <algorithm>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "base/failpoint.h"
#include "base/log.h"
#include "collectives/collectives.h"
#include "collectives/peer/allocation_exchange.h"
#include "device/kernel_launch.h"

namespace mooncake {
namespace {

using kernels::Combine;
using kernels::Exchange;
using kernels::MoveArguments;
using kernels::ReduceArguments;

constexpr unsigned kMostBlocks = 8;                // multiprocessors that a group takes at most
constexpr unsigned kMostThreads = 512;             // of a block: the bound in kernels/entries.cuh
constexpr size_t kBytesOfBlock = 16 << 10;         // less is not worth a further block
constexpr auto kGrace = std::chrono::seconds(10);  // for the host to decide after a timeout
// Most ranks that are late come within this time. A kernel that has stopped goes on with one block.
constexpr auto kPatience = std::chrono::milliseconds(50);

constexpr size_t kPieceUnit = 1024;  // bytes: pieces are cut evenly into parts for blocks
constexpr uint64_t kAllRanks = ~uint64_t(0);

std::optional<KernelId> reductionOf(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
      return KernelId::kReduceUint8;
    case DType::kInt8:
      return KernelId::kReduceInt8;
    case DType::kUInt16:
      return KernelId::kReduceUint16;
    case DType::kInt16:
      return KernelId::kReduceInt16;
    case DType::kUInt32:
      return KernelId::kReduceUint32;
    case DType::kInt32:
      return KernelId::kReduceInt32;
    case DType::kUInt64:
      return KernelId::kReduceUint64;
    case DType::kInt64:
      return KernelId::kReduceInt64;
    case DType::kFloat16:
      return KernelId::kReduceFloat16;
    case DType::kBFloat16:
      return KernelId::kReduceBfloat16;
    case DType::kFloat32:
      return KernelId::kReduceFloat32;
    case DType::kFloat64:
      return KernelId::kReduceFloat64;
    case DType::kBool:
      return KernelId::kReduceBool;
    case DType::kComplex64:
      return KernelId::kReduceComplex64;
    case DType::kComplex128:
      return KernelId::kReduceComplex128;
    default:
      return std::nullopt;
  }
}

Combine combinationOf(DType dtype, ReduceKind kind) {
  switch (kind) {
    case ReduceKind::kSum:
    case ReduceKind::kPremulSum:
      return dtype == DType::kBool ? Combine::kMax : Combine::kSum;
    case ReduceKind::kAvg:
      return Combine::kAverage;
    case ReduceKind::kProduct:
      return Combine::kProduct;
    case ReduceKind::kMin:
      return Combine::kMin;
    case ReduceKind::kMax:
      return Combine::kMax;
    case ReduceKind::kBitAnd:
      return Combine::kAnd;
    case ReduceKind::kBitOr:
      return Combine::kOr;
    case ReduceKind::kBitXor:
      return Combine::kXor;
  }
  return Combine::kSum;
}

// The host decides by then, unless it is out of order.
uint64_t decisionNs(Deadline deadline) {
  return uint64_t(std::min<int64_t>(deadline.left().count(), int64_t(1) << 62)) +
         uint64_t(std::chrono::nanoseconds(kGrace).count());
}

uint32_t mix(uint32_t hash, uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) hash = (hash ^ uint8_t(value >> shift)) * 16777619u;
  return hash;
}

}  // namespace

// What must be equal on all ranks.
struct PeerCollectives::Call {
  const char* name;
  size_t parts = 1;  // of the inputs of a rank that has any
  ReduceKind kind = ReduceKind::kSum;
  int root = -1;

  uint32_t hash(const Tensors& tensors) const {
    uint32_t hash = 2166136261u;
    for (const char* letter = name; *letter; ++letter) hash = mix(hash, uint64_t(*letter));
    hash = mix(mix(hash, uint64_t(tensors.dtype)), uint64_t(kind));
    return mix(mix(hash, uint64_t(root)), tensors.count);
  }
};

Result<std::unique_ptr<PeerCollectives>> PeerCollectives::make(std::unique_ptr<Group> control,
                                                               std::shared_ptr<ViewFeed> view,
                                                               Result<Accelerator*> accelerator,
                                                               DeviceStream stream,
                                                               const Settings& settings,
                                                               Deadline deadline) {
  MOONCAKE_TRY(agreeOnAll(*control, accelerator.status(), deadline));
  std::unique_ptr<PeerCollectives> made(
      new PeerCollectives(std::move(control), std::move(view), **accelerator, stream));
  // The host decides within the timeout, unless it is out of order.
  const auto decision = settings.timeout + kGrace;
  auto area = PeerArea::make(
      *made->control_, **accelerator, stream,
      {.halfBytes = settings.halfBytes, .patience = kPatience, .decision = decision}, deadline);
  if (!area.ok()) return area.error();
  made->area_ = std::move(*area);
  made->decisionNs_ = uint64_t(std::chrono::nanoseconds(decision).count());
  const Status started = made->start(settings.timeout);
  MOONCAKE_TRY(agreeOnAll(*made->control_, started, deadline));
  MOONCAKE_TRY(made->agreeOnBlocks(deadline));
  made->guard_->arm();
  return made;
}

Status PeerCollectives::start(std::chrono::milliseconds timeout) {
  const KernelLaunch largest{.kernel = KernelId::kMove, .grid = kMostBlocks, .block = kMostThreads};
  const auto room = accelerator_.roomFor(largest, stream_.device);
  if (!room.ok()) return room.error();
  mostBlocks_ = uint32_t(std::clamp(room->multiprocessors, 1, int(kMostBlocks)));
  auto guard = PeerGuard::make(
      *control_, *view_, area_->words(), [this] { return acknowledge(); }, timeout);
  if (!guard.ok()) return guard.error();
  guard_ = std::move(*guard);
  return {};
}

// The ranks' kernels must have as many blocks, and their devices may differ.
Status PeerCollectives::agreeOnBlocks(Deadline deadline) {
  return mooncake::allreduce(*control_, std::as_writable_bytes(std::span(&mostBlocks_, 1)),
                             {DType::kUInt32, ReduceKind::kMin}, deadline);
}

PeerCollectives::~PeerCollectives() {
  guard_.reset();  // first: it ends kernels that wait
  if (!area_) return;
  // Replays that come later find the refusal on the device. An error shows below.
  if (order_.hasGraphs()) (void)acknowledge();
  const Status over = accelerator_.synchronize(stream_);
  if (!over.ok()) {
    log(LogLevel::kWarning, accelerator_.name(),
        "kernels of a group may still run, so their memory stays: ", over.error().message);
  }
  if (!over.ok() || order_.hasGraphs()) (void)area_.release();
}

Status PeerCollectives::acknowledge() {
  kernels::AcknowledgeArguments arguments{area_->state()};
  return accelerator_.launch(stream_,
                             {.kernel = KernelId::kAcknowledge, .arguments = bytesOf(arguments)});
}

void PeerCollectives::drain(Deadline deadline) const {
  (void)guard_->await(guard_->lastCall(), deadline);
  while (guard_->usable().ok() && !deadline.passed()) {
    const auto isOver = order_.isOver();
    if (!isOver.ok() || *isOver) return;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

Status PeerCollectives::launchCall(const KernelLaunch& launch) {
  MOONCAKE_TRY(order_.beforeCall());
  MOONCAKE_TRY(accelerator_.launch(stream_, launch));
  return order_.afterCall();
}

Status PeerCollectives::record(const KernelLaunch& launch) {
  if (!isOrdered_) MOONCAKE_TRY(order_.beforeGraph(*recording_));
  isOrdered_ = true;
  MOONCAKE_TRY(accelerator_.launch(*recording_, launch));
  return order_.afterGraphs(*recording_);
}

template <typename Arguments>
Result<uint64_t> PeerCollectives::enqueue(KernelId kernel, const Call& call, size_t work,
                                          Arguments& arguments, Deadline deadline) {
  const auto blocks =
      unsigned(std::clamp<size_t>((work + kBytesOfBlock - 1) / kBytesOfBlock, 1, mostBlocks_));
  const size_t vectors = work / blocks / sizeof(uint64_t) / 2;
  const auto threads = unsigned(std::clamp<size_t>((vectors + 31) / 32 * 32, 64, kMostThreads));
  if (recording_) {
    arguments.exchange.isOfGraph = true;
    arguments.exchange.decisionNs = decisionNs_;
  }
  const KernelLaunch launch{
      .kernel = kernel, .grid = blocks, .block = threads, .arguments = bytesOf(arguments)};
  if (recording_) {
    MOONCAKE_TRY(record(launch));
    return 0;
  }
  const auto number = guard_->begin(call.name, deadline);
  if (!number.ok()) return number.error();
  failpoint("peers-launch");
  const Status launched = launchCall(launch);
  if (!launched.ok()) {
    guard_->fail(launched.error());  // the ranks would count differently
    return launched.error();
  }
  return number;
}

// Bytes of each part that an exchange takes.
size_t PeerCollectives::pieceOf(const Call& call, size_t bytes) const {
  if (!hasPieces(bytes, call.parts)) return bytes;
  const size_t most = area_->halfBytes() / call.parts;
  const size_t unit = most < kPieceUnit ? kSmallestPiece : kPieceUnit;
  return most / unit * unit;
}

Exchange PeerCollectives::exchangeOf(const Call& call, const Tensors& tensors,
                                     Deadline deadline) const {
  const size_t bytes = tensors.count * dtypeSize(tensors.dtype), piece = pieceOf(call, bytes);
  const bool isWhole = piece == bytes, isOne = tensors.inputs.size() == 1;
  Exchange exchange{
      .state = area_->state(),
      .call = call.hash(tensors),
      .decisionNs = decisionNs(deadline),
      .root = call.root,
      .pieces = isWhole ? 1 : unsigned((bytes - 1) / piece + 1),
      .piece = isWhole && isOne ? bytes * call.parts : piece,
      .bytes = isWhole && isOne ? bytes * call.parts : bytes,
      .inputCount = tensors.inputs.empty() ? 0 : unsigned(isWhole && isOne ? 1 : call.parts),
      .inputs = {},
      .scratch = static_cast<unsigned char*>(tensors.scratch),
      .output = static_cast<unsigned char*>(tensors.scratch ? tensors.outputs[0] : nullptr),
      .isOfGraph = false};
  for (unsigned i = 0; i < exchange.inputCount; ++i) {
    exchange.inputs[i] =
        static_cast<const unsigned char*>(tensors.inputs[isOne ? 0 : i]) + (isOne ? i * bytes : 0);
  }
  return exchange;
}

// Waits in a kernel of one block until all ranks have come. For a call with pieces, which else would
// hold more of the device until then, and go on with one block if a rank is late.
Status PeerCollectives::meet(const char* name, Deadline deadline) {
  const Call call{.name = name};
  MoveArguments arguments{.exchange = exchangeOf(call, {.dtype = DType::kUInt8}, deadline),
                          .sources = 0,
                          .offset = 0,
                          .bytes = 0,
                          .outputs = {}};
  return enqueue(KernelId::kMove, call, 0, arguments, deadline).status();
}

Result<uint64_t> PeerCollectives::reduceAny(const Call& call, const Tensors& tensors, size_t part,
                                            Deadline deadline) {
  MOONCAKE_TRY(checkReduction({tensors.dtype, call.kind}));
  const auto kernel = reductionOf(tensors.dtype);
  if (!kernel) return Error{ErrorCode::kInvalidArgument, "no kernel reduces this type"};
  const bool isTaken = !tensors.outputs.empty();
  const size_t bytes = tensors.count * dtypeSize(tensors.dtype);
  ReduceArguments arguments{
      .exchange = exchangeOf(call, tensors, deadline),
      .offset = part * pieceOf(call, bytes),
      .bytes = isTaken ? bytes : 0,
      .output = isTaken ? static_cast<unsigned char*>(tensors.outputs[0]) : nullptr,
      .by = combinationOf(tensors.dtype, call.kind)};
  if (arguments.exchange.pieces > 1) MOONCAKE_TRY(meet(call.name, deadline));
  return enqueue(*kernel, call, bytes * call.parts, arguments, deadline);
}

Result<uint64_t> PeerCollectives::moveAny(const Call& call, const Tensors& tensors,
                                          uint64_t sources, size_t part, Deadline deadline) {
  const size_t bytes = tensors.count * dtypeSize(tensors.dtype);
  const size_t outputs = tensors.outputs.size();
  MoveArguments arguments{.exchange = exchangeOf(call, tensors, deadline),
                          .sources = outputs ? sources : 0,
                          .offset = part * pieceOf(call, bytes),
                          .bytes = outputs ? bytes : 0,
                          .outputs = {}};
  for (int rank = 0; outputs && rank < control_->size(); ++rank) {
    if (!(sources >> rank & 1)) continue;
    // The outputs of all sources are one tensor, or one for each.
    auto* const output = static_cast<unsigned char*>(tensors.outputs[outputs == 1 ? 0 : rank]);
    const bool isPart = outputs == 1 && sources == kAllRanks;
    arguments.outputs[rank] = output + (isPart ? rank * bytes : 0);
  }
  if (arguments.exchange.pieces > 1) MOONCAKE_TRY(meet(call.name, deadline));
  // The number of blocks follows from numbers that are equal on all ranks.
  return enqueue(KernelId::kMove, call, bytes * call.parts, arguments, deadline);
}

Result<uint64_t> PeerCollectives::allreduce(const Tensors& tensors, ReduceKind kind,
                                            Deadline deadline) {
  return reduceAny({.name = "all_reduce", .kind = kind}, tensors, 0, deadline);
}

Result<uint64_t> PeerCollectives::reduceScatter(const Tensors& tensors, ReduceKind kind,
                                                Deadline deadline) {
  const Call call{.name = "reduce_scatter", .parts = size_t(control_->size()), .kind = kind};
  return reduceAny(call, tensors, size_t(control_->rank()), deadline);
}

Result<uint64_t> PeerCollectives::reduce(const Tensors& tensors, ReduceKind kind, int root,
                                         Deadline deadline) {
  return reduceAny({.name = "reduce", .kind = kind, .root = root}, tensors, 0, deadline);
}

Result<uint64_t> PeerCollectives::allgather(const Tensors& tensors, Deadline deadline) {
  return moveAny({.name = "all_gather"}, tensors, kAllRanks, 0, deadline);
}

Result<uint64_t> PeerCollectives::gather(const Tensors& tensors, int root, Deadline deadline) {
  return moveAny({.name = "gather", .root = root}, tensors, kAllRanks, 0, deadline);
}

Result<uint64_t> PeerCollectives::broadcast(const Tensors& tensors, int root, Deadline deadline) {
  return moveAny({.name = "broadcast", .root = root}, tensors, uint64_t(1) << root, 0, deadline);
}

Result<uint64_t> PeerCollectives::scatter(const Tensors& tensors, int root, Deadline deadline) {
  const Call call{.name = "scatter", .parts = size_t(control_->size()), .root = root};
  return moveAny(call, tensors, uint64_t(1) << root, size_t(control_->rank()), deadline);
}

}  // namespace mooncake
