#include "peers/peer_collectives.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/hash.h"
#include "collectives/collectives.h"
#include "device/kernel_launch.h"

namespace mooncake {
namespace {

using kernels::AllToAllArguments;
using kernels::Combine;
using kernels::Exchange;
using kernels::MoveArguments;
using kernels::Readers;
using kernels::ReduceArguments;

constexpr size_t kBytesOfBlock = 16 << 10;  // less is not worth a further block

// Bytes that a rank reads from other ranks in the time of a further exchange: some microseconds. A
// two-shot operation that saves as many pays.
constexpr size_t kBytesOfExchange = 1 << 20;

// A block pushes its part of an input by one command of the proxy, which has a bound.
constexpr size_t kMostBetweenHosts = size_t{32} << 20;

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

// Ranks with other lines would run other kernels.
Status agreeOnTable(Group& group, const PeerTable& table, Deadline deadline) {
  // The largest and, as its complement, the smallest of all ranks.
  uint32_t hashes[] = {table.hash(), ~table.hash()};
  MOONCAKE_TRY(allreduce(group, std::as_writable_bytes(std::span(hashes)),
                         {DType::kUInt32, ReduceKind::kMax}, deadline));
  if (hashes[0] == ~hashes[1]) return {};
  return {ErrorCode::kMismatch, "MOONCAKE_PEER_TABLE has other lines on another rank"};
}

}  // namespace

// One call of a verb.
struct PeerCollectives::Call {
  const char* name;
  size_t parts = 1;  // of the inputs of a rank that has any
  ReduceKind kind = ReduceKind::kSum;
  int root = -1;
  Readers readers = Readers::kAll;  // of a rank's inputs
  bool isTwoShot = false;
  unsigned blocks = 0;  // 0: they follow from the size

  uint32_t hash(const Tensors& tensors) const {
    uint32_t hash = fnv1a({});
    for (const char* letter = name; *letter; ++letter) hash = fnv1a({uint64_t(*letter)}, hash);
    return fnv1a({uint64_t(tensors.dtype), uint64_t(kind), uint64_t(root), tensors.count}, hash);
  }
};

Result<std::unique_ptr<PeerCollectives>> PeerCollectives::make(
    std::unique_ptr<Group> control, std::shared_ptr<ViewFeed> view,
    Result<Accelerator*> accelerator, DeviceStream stream, Settings settings, Deadline deadline) {
  MOONCAKE_TRY(agreeOnTable(*control, settings.table, deadline));
  auto queue = PeerQueue::make(std::move(control), std::move(view), std::move(accelerator), stream,
                               {.bankBytes = settings.bankBytes + kernels::kSplitBytes,
                                .inboxBankBytes = settings.bankBytes + kernels::kSplitBytes,
                                .mostBlocks = PeerTable::kMostBlocks,
                                .timeout = settings.timeout,
                                .onLoss = settings.onLoss},
                               deadline);
  if (!queue.ok()) return queue.error();
  if ((*queue)->spansHosts() && settings.bankBytes > kMostBetweenHosts) {
    return Error{ErrorCode::kUnsupported, "MOONCAKE_PEER_BYTES is larger than " +
                                              std::to_string(kMostBetweenHosts) +
                                              ", and ranks are on several hosts"};
  }
  return std::unique_ptr<PeerCollectives>(
      new PeerCollectives(std::move(*queue), std::move(settings.table)));
}

template <typename Arguments>
Result<uint64_t> PeerCollectives::enqueue(KernelId kernel, const Call& call, size_t work,
                                          Arguments& arguments, Deadline deadline) {
  const size_t wanted = call.blocks ? call.blocks : (work + kBytesOfBlock - 1) / kBytesOfBlock;
  const auto blocks = unsigned(std::clamp<size_t>(wanted, 1, queue_->mostBlocks()));
  const size_t vectors = work / blocks / sizeof(uint64_t) / 2;
  const auto threads =
      unsigned(std::clamp<size_t>((vectors + 31) / 32 * 32, 64, PeerQueue::kMostThreads));
  const auto number = queue_->begin(call.name, deadline);
  if (!number.ok()) return number.error();
  MOONCAKE_TRY(queue_->launch(
      {.kernel = kernel, .grid = blocks, .block = threads, .arguments = bytesOf(arguments)}));
  return number;
}

// Bytes of each part that an exchange takes.
size_t PeerCollectives::pieceOf(const Call& call, size_t bytes) const {
  if (!hasPieces(bytes, call.parts)) return bytes;
  const size_t most = bankBytes() / call.parts;
  const size_t unit = most < kPieceUnit ? kSmallestPiece : kPieceUnit;
  return most / unit * unit;
}

// Whether all_reduce of `bytes` is two-shot. Then a rank reads 2 * (n - 1) / n times `bytes` from
// other ranks, in place of n - 1 times. Inputs that need pieces are large. The same on all ranks,
// also when some are lost.
bool PeerCollectives::isTwoShot(size_t bytes) const {
  const auto ranks = size_t(size());
  if (ranks < 3) return false;
  return hasPieces(bytes, 1) || bytes / ranks * (ranks - 1) * (ranks - 2) >= kBytesOfExchange;
}

// The form of a call follows from the table, or else from rules.
PeerCollectives::Call PeerCollectives::callOf(const Verb& verb, const Tensors& tensors,
                                              ReduceKind kind, int root) const {
  Call call{.name = verb.name, .kind = kind, .root = root};
  if (verb.isPerRank) call.parts = size_t(size());
  if (verb.isToRoot) call.readers = Readers::kRoot;
  if (verb.isPerRank) call.readers = Readers::kOwnPart;
  const size_t bytes = tensors.count * dtypeSize(tensors.dtype);
  const auto form = table_.find(call.name, size(), bytes * call.parts);
  if (form) {
    call.isTwoShot = form->isTwoShot;
    call.blocks = form->blocks;
  } else if (verb.mayBeTwoShot) {
    call.isTwoShot = isTwoShot(bytes);
  }
  return call;
}

Exchange PeerCollectives::exchangeOf(const Call& call, const Tensors& tensors,
                                     Deadline deadline) const {
  const size_t bytes = tensors.count * dtypeSize(tensors.dtype), piece = pieceOf(call, bytes);
  const bool isWhole = piece == bytes, isOne = tensors.inputs.size() == 1;
  Exchange exchange = queue_->exchange(call.hash(tensors), deadline);
  exchange.root = call.root;
  exchange.readers = call.readers;
  exchange.pieces = isWhole ? 1 : unsigned((bytes - 1) / piece + 1);
  exchange.piece = isWhole && isOne ? bytes * call.parts : piece;
  exchange.bytes = isWhole && isOne ? bytes * call.parts : bytes;
  exchange.isTwoShot = call.isTwoShot;
  exchange.inputCount = tensors.inputs.empty() ? 0 : unsigned(isWhole && isOne ? 1 : call.parts);
  exchange.scratch = static_cast<unsigned char*>(tensors.scratch);
  exchange.output = static_cast<unsigned char*>(tensors.scratch ? tensors.outputs[0] : nullptr);
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

Result<uint64_t> PeerCollectives::reduce(const Verb& verb, const Tensors& tensors, ReduceKind kind,
                                         int root, Deadline deadline) {
  MOONCAKE_TRY(checkReduction({tensors.dtype, kind}));
  const auto kernel = reductionOf(tensors.dtype);
  if (!kernel) return Error{ErrorCode::kInvalidArgument, "no kernel reduces this type"};
  const bool isTaken = !tensors.outputs.empty();
  const size_t bytes = tensors.count * dtypeSize(tensors.dtype);
  const Call call = callOf(verb, tensors, kind, root);
  ReduceArguments arguments{
      .exchange = exchangeOf(call, tensors, deadline),
      .offset = verb.isPerRank ? size_t(queue_->group().rank()) * pieceOf(call, bytes) : 0,
      .bytes = isTaken ? bytes : 0,
      .output = isTaken ? static_cast<unsigned char*>(tensors.outputs[0]) : nullptr,
      .by = combinationOf(tensors.dtype, call.kind)};
  if (arguments.exchange.pieces > 1) MOONCAKE_TRY(meet(call.name, deadline));
  return enqueue(*kernel, call, bytes * call.parts, arguments, deadline);
}

Result<uint64_t> PeerCollectives::move(const Verb& verb, const Tensors& tensors, int root,
                                       Deadline deadline) {
  const size_t bytes = tensors.count * dtypeSize(tensors.dtype);
  const Call call = callOf(verb, tensors, ReduceKind::kSum, root);
  const uint64_t sources = verb.isFromRoot ? uint64_t(1) << root : kAllRanks;
  const size_t outputs = tensors.outputs.size();
  MoveArguments arguments{
      .exchange = exchangeOf(call, tensors, deadline),
      .sources = outputs ? sources : 0,
      .offset = verb.isPerRank ? size_t(queue_->group().rank()) * pieceOf(call, bytes) : 0,
      .bytes = outputs ? bytes : 0,
      .outputs = {}};
  for (int rank = 0; outputs && rank < size(); ++rank) {
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

// The number of blocks cannot follow from the sizes, which other ranks do not know. For the same
// reason no kernel waits until all ranks have come.
Result<uint64_t> PeerCollectives::exchange(const Verb& verb, const Tensors& tensors,
                                           const Splits& splits, Deadline deadline) {
  misfits_.take();
  const Call call{.name = verb.name};
  AllToAllArguments arguments{.exchange = queue_->exchange(call.hash(tensors), deadline),
                              .exchanges = 0,
                              .to = {},
                              .from = {},
                              .outputs = {}};
  kernels::layOutSegments(arguments, splits.sends.data(), unsigned(splits.sends.size()),
                          queue_->area().bankBytes());
  const bool isOneInput = tensors.inputs.size() == 1, isOneOutput = tensors.outputs.size() == 1;
  size_t begin = 0;
  for (size_t i = 0; i < splits.sends.size(); ++i) {
    arguments.exchange.inputs[i] =
        static_cast<const unsigned char*>(tensors.inputs[isOneInput ? 0 : i]) + begin;
    begin += isOneInput ? splits.sends[i] : 0;
  }
  begin = 0;
  for (size_t i = 0; i < splits.receives.size(); ++i) {
    arguments.from[i] = splits.receives[i];
    arguments.outputs[i] =
        static_cast<unsigned char*>(tensors.outputs[isOneOutput ? 0 : i]) + begin;
    begin += isOneOutput ? splits.receives[i] : 0;
  }
  return enqueue(KernelId::kAllToAll, call, bankBytes(), arguments, deadline);
}

}  // namespace mooncake
