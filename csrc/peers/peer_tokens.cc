#include "peers/peer_tokens.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "base/hash.h"
#include "device/kernel_launch.h"

namespace mooncake {
namespace {

constexpr unsigned kMostBlocks = 16;        // see kernels::kMaxBlocks
constexpr size_t kBytesOfBlock = 16 << 10;  // less is not worth a further block

// Of facts beside rows in an inbox.
constexpr size_t kFactBytes = std::max(kernels::tokenChoicesAt(), kernels::answerRowsAt());

enum class Kind : uint64_t { kDispatch = 3, kDispatchAgain, kCombine };  // after experts' kinds

size_t ceilDiv(size_t number, size_t by) { return (number + by - 1) / by; }

Error tooSmall(size_t bytes, const std::string& what) {
  return {ErrorCode::kInvalidArgument, "the buffer has memory for " + std::to_string(bytes) +
                                           " bytes of a rank's rows at a time, too few for " +
                                           what + ": make it larger"};
}

}  // namespace

Result<std::unique_ptr<PeerTokens>> PeerTokens::make(std::unique_ptr<Group> control,
                                                     std::shared_ptr<ViewFeed> view,
                                                     Result<Accelerator*> accelerator,
                                                     DeviceStream stream, size_t bytes,
                                                     std::chrono::milliseconds timeout,
                                                     Deadline deadline) {
  // A combine sends a rank the rows of its own tokens.
  const size_t perRank = bytes / size_t(control->size());
  auto queue = PeerQueue::make(std::move(control), std::move(view), std::move(accelerator), stream,
                               {.banks = 2,
                                .bankBytes = bytes,
                                .inboxBankBytes = perRank + kFactBytes,
                                .mostBlocks = kMostBlocks,
                                .timeout = timeout},
                               deadline);
  if (!queue.ok()) return queue.error();
  return std::unique_ptr<PeerTokens>(new PeerTokens(std::move(*queue)));
}

size_t PeerTokens::inboxBytes() const {
  return queue_->spansHosts() ? queue_->area().inboxBankBytes() : SIZE_MAX;
}

size_t PeerTokens::roomIn(size_t bytes, size_t fixed, size_t each) {
  return bytes > fixed ? (bytes - fixed) / each : 0;
}

// Evenly cut pieces of `most` tokens or fewer.
Result<PeerTokens::Pieces> PeerTokens::piecesOf(const Shape& shape, size_t most,
                                                const char* what) const {
  if (most == 0) return tooSmall(std::min(queue_->area().bankBytes(), inboxBytes()), what);
  const size_t count = std::max<size_t>(ceilDiv(*shape.mostTokens, most), 1);
  return Pieces{unsigned(count), std::max<size_t>(ceilDiv(*shape.mostTokens, count), 1)};
}

Result<PeerTokens::Pieces> PeerTokens::piecesOfDispatch(const Shape& shape, size_t rowBytes,
                                                        size_t tokens) const {
  // All of them may go to one inbox.
  const size_t bytes = std::min(queue_->area().bankBytes(), inboxBytes());
  const size_t fixed = kernels::tokenRowsAt(0, 0) + kernels::kLine;
  const size_t most = roomIn(bytes, fixed, shape.width * sizeof(kernels::Choice) + rowBytes);
  if (shape.mostTokens) return piecesOf(shape, most, "one token");
  if (tokens > most) {
    return tooSmall(bytes,
                    std::to_string(tokens) + " tokens, which go at once with num_worst_tokens");
  }
  return Pieces{1, most};
}

Result<PeerTokens::Pieces> PeerTokens::piecesOfCombine(const Shape& shape, size_t rowBytes) const {
  const size_t bank = queue_->area().bankBytes(), fixed = kernels::answerRowsAt();
  const size_t most = roomIn(bank, fixed, rowBytes);
  // Of one rank's tokens, which go back to its inbox.
  const size_t mostThere = roomIn(inboxBytes(), fixed, rowBytes);
  if (shape.mostRows <= most && shape.mostTokens.value_or(0) <= mostThere)
    return Pieces{1, std::numeric_limits<size_t>::max()};
  if (!shape.mostTokens) {
    return tooSmall(bank, std::to_string(shape.mostRows) +
                              " rows, which come back at once with num_worst_tokens");
  }
  return piecesOf(shape, std::min(most / size_t(queue_->group().size()), mostThere),
                  "one token of each rank");
}

Status PeerTokens::checkCombine(const Shape& shape, size_t hidden, size_t weights) const {
  return piecesOfCombine(shape, kernels::answerRowBytes(hidden, weights)).status();
}

kernels::TokenCall PeerTokens::callOf(const Shape& shape, const Caller& caller,
                                      const Pieces& pieces, kernels::Readers readers,
                                      size_t rowBytes, uint32_t hash, Deadline deadline) const {
  kernels::Exchange exchange = queue_->exchange(
      fnv1a({pieces.count, pieces.step, rowBytes, shape.width, shape.mostRows}, hash), deadline);
  exchange.pieces = pieces.count;
  exchange.readers = readers;
  return {.exchange = exchange,
          .mask = {caller.mask, caller.activeRanks},
          .among = caller.among,
          .step = pieces.step,
          .rowBytes = rowBytes,
          .tokens = unsigned(caller.tokens),
          .width = shape.width,
          .choices = caller.choices};
}

// The number of blocks follows from numbers that are equal on all ranks.
template <typename Arguments>
Result<uint64_t> PeerTokens::enqueue(const char* name, KernelId kernel, const Shape& shape,
                                     const Arguments& arguments, Deadline deadline) {
  const size_t work = shape.mostTokens.value_or(shape.mostRows) * arguments.call.rowBytes;
  const auto blocks =
      unsigned(std::clamp<size_t>(ceilDiv(work, kBytesOfBlock), 1, queue_->mostBlocks()));
  const size_t vectors = work / blocks / 16;
  const auto threads =
      unsigned(std::clamp<size_t>(ceilDiv(vectors, 32) * 32, 64, PeerQueue::kMostThreads));
  const auto number = queue_->begin(name, deadline);
  if (!number.ok()) return number.error();
  MOONCAKE_TRY(queue_->launch(
      {.kernel = kernel, .grid = blocks, .block = threads, .arguments = bytesOf(arguments)}));
  return number;
}

Result<uint64_t> PeerTokens::dispatch(const Dispatch& given, Clock::duration limit) {
  if (given.fields.size() > kernels::kMostFields || given.shape.width > kernels::kMostOwners)
    return Error{ErrorCode::kInvalidArgument,
                 "kernels take at most " + std::to_string(kernels::kMostFields) +
                     " parts of a row, and " + std::to_string(kernels::kMostOwners) +
                     " ranks of a token"};
  size_t rowBytes = 0;
  uint32_t hash =
      fnv1a({uint64_t(given.earlier ? Kind::kDispatchAgain : Kind::kDispatch), given.agreed});
  for (const kernels::Field& field : given.fields) {
    rowBytes += kernels::toUnit(field.bytes);
    hash = fnv1a({field.bytes}, hash);
  }
  const auto pieces = piecesOfDispatch(given.shape, rowBytes, given.caller.tokens);
  if (!pieces.ok()) return pieces.error();
  const Deadline deadline = Deadline::after(limit);
  kernels::DispatchTokens arguments{
      .call = callOf(given.shape, given.caller, *pieces, kernels::Readers::kAll, rowBytes, hash,
                     deadline),
      .fields = {},
      .fieldCount = unsigned(given.fields.size()),
      .counts = given.counts,
      .capacity = given.capacity,
      .earlier = given.earlier,
      .earlierEnds = given.earlierEnds,
      .sources = given.sources,
      .ends = given.ends,
      .table = given.table,
      .dispatched = given.dispatched};
  std::ranges::copy(given.fields, arguments.fields);
  return enqueue("dispatch", KernelId::kDispatchTokens, given.shape, arguments, deadline);
}

Result<uint64_t> PeerTokens::combine(const Combine& given, Clock::duration limit) {
  const size_t rowBytes = kernels::answerRowBytes(given.hidden, given.weightCount);
  const auto pieces = piecesOfCombine(given.shape, rowBytes);
  if (!pieces.ok()) return pieces.error();
  const Deadline deadline = Deadline::after(limit);
  const uint32_t hash = fnv1a({uint64_t(Kind::kCombine), given.hidden, given.weightCount});
  kernels::CombineTokens arguments{
      .call = callOf(given.shape, given.caller, *pieces, kernels::Readers::kOwnPart, rowBytes, hash,
                     deadline),
      .hidden = given.hidden,
      .weightCount = given.weightCount,
      .x = static_cast<const unsigned char*>(given.x),
      .weights = given.weights,
      .capacity = given.capacity,
      .sources = given.sources,
      .ends = given.ends,
      .dispatched = given.dispatched,
      .biases = {},
      .biasCount = unsigned(given.biases.size()),
      .sums = static_cast<unsigned char*>(given.sums),
      .weightSums = given.weightSums,
      .missing = given.missing};
  for (size_t i = 0; i < given.biases.size(); ++i)
    arguments.biases[i] = static_cast<const unsigned char*>(given.biases[i]);
  return enqueue("combine", KernelId::kCombineTokens, given.shape, arguments, deadline);
}

}  // namespace mooncake
