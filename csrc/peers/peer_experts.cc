#include "peers/peer_experts.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/hash.h"
#include "device/kernel_launch.h"

namespace mooncake {
namespace {

using kernels::Choice;
using kernels::Dispatched;
using kernels::Expert;
using kernels::toLine;

constexpr unsigned kMostBlocks = 16;             // see kernels::kMaxBlocks
constexpr size_t kBytesOfBlock = 16 << 10;       // less is not worth a further block
constexpr size_t kTableBytes = size_t(2) << 20;  // for tables that ranks publish beside rows

kernels::Chosen chosenOf(const PeerExperts::Caller& caller) {
  return {.experts = caller.topk,
          .areWide = caller.isTopkWide,
          .tokens = unsigned(caller.tokens),
          .topk = unsigned(caller.topks)};
}

}  // namespace

// The parts of a dispatch's memory.
struct PeerExperts::Kept {
  Dispatched* dispatched;
  Choice* choices;
  int32_t* counts;
  int64_t* ranges;
};

Result<std::unique_ptr<PeerExperts>> PeerExperts::make(std::unique_ptr<Group> control,
                                                       std::shared_ptr<ViewFeed> view,
                                                       Result<Accelerator*> accelerator,
                                                       DeviceStream stream, size_t bytes,
                                                       std::chrono::milliseconds timeout,
                                                       Deadline deadline) {
  // A combine sends a rank the rows of its own tokens, and a dispatch takes less.
  const size_t perRank = bytes / size_t(control->size());
  auto queue = PeerQueue::make(std::move(control), std::move(view), std::move(accelerator), stream,
                               {.banks = 2,
                                .bankBytes = bytes + kTableBytes,
                                .inboxBankBytes = perRank + kTableBytes,
                                .mostBlocks = kMostBlocks,
                                .maySkip = true,
                                .timeout = timeout},
                               deadline);
  if (!queue.ok()) return queue.error();
  return std::unique_ptr<PeerExperts>(new PeerExperts(std::move(*queue)));
}

std::vector<std::byte> PeerExperts::tableOf(std::span<const int> owners, int rank) {
  std::vector<int32_t> numbers;  // of experts that each owner has had so far
  std::vector<Expert> experts;
  std::vector<int32_t> mine;
  for (const int owner : owners) {
    if (size_t(owner) >= numbers.size()) numbers.resize(size_t(owner) + 1);
    if (owner == rank) mine.push_back(int32_t(experts.size()));
    experts.push_back({owner, numbers[size_t(owner)]++});
  }
  std::vector<std::byte> table(experts.size() * sizeof(Expert) + mine.size() * sizeof(int32_t));
  std::memcpy(table.data(), experts.data(), experts.size() * sizeof(Expert));
  if (!mine.empty()) {
    std::memcpy(table.data() + experts.size() * sizeof(Expert), mine.data(),
                mine.size() * sizeof(int32_t));
  }
  return table;
}

size_t PeerExperts::keptBytes(const Shape& shape, size_t tokens, size_t topk) const {
  return toLine(sizeof(Dispatched)) + toLine(tokens * topk * sizeof(Choice)) +
         toLine(shape.local * sizeof(int32_t)) + toLine(shape.local * ranks() * sizeof(int64_t));
}

PeerExperts::Kept PeerExperts::keptOf(const Shape& shape, const Caller& caller) const {
  std::byte* const choices = caller.kept + toLine(sizeof(Dispatched));
  std::byte* const counts = choices + toLine(caller.tokens * caller.topks * sizeof(Choice));
  std::byte* const ranges = counts + toLine(shape.local * sizeof(int32_t));
  return {.dispatched = reinterpret_cast<Dispatched*>(caller.kept),
          .choices = reinterpret_cast<Choice*>(choices),
          .counts = reinterpret_cast<int32_t*>(counts),
          .ranges = reinterpret_cast<int64_t*>(ranges)};
}

Status PeerExperts::check(const Shape& shape, const Caller& caller, size_t bytes,
                          size_t inboxBytes) const {
  const auto refused = [](const std::string& what, size_t found, size_t most) {
    return Error{ErrorCode::kInvalidArgument, "kernels take at most " + std::to_string(most) + " " +
                                                  what + ", and the call has " +
                                                  std::to_string(found)};
  };
  if (caller.topks > kernels::kMostTopk)
    return refused("experts of a token", caller.topks, kernels::kMostTopk);
  if (shape.experts > kernels::kMostExperts)
    return refused("experts", shape.experts, kernels::kMostExperts);
  const size_t bank = queue_->area().bankBytes();
  if (bytes > bank) return refused("published bytes in this buffer", bytes, bank);
  const size_t inbox = queue_->area().inboxBankBytes();
  if (queue_->spansHosts() && inboxBytes > inbox)
    return refused("bytes for a rank of another host in this buffer", inboxBytes, inbox);
  return {};
}

kernels::ExpertCall PeerExperts::callOf(const Shape& shape, size_t rowBytes, uint32_t hash,
                                        const Limits& limits) const {
  return {.exchange = queue_->exchange(hash, Deadline::after(limits.most), limits.skipAfter),
          .maxTokens = shape.maxTokens,
          .hidden = shape.hidden,
          .experts = shape.experts,
          .local = shape.local,
          .rowBytes = rowBytes,
          .answersAt = kernels::answersAt(shape.mostLocal, ranks())};
}

// The number of blocks follows from numbers that are equal on all ranks.
template <typename Send, typename Receive>
Result<uint64_t> PeerExperts::sendAny(const char* name, std::pair<KernelId, KernelId> ids,
                                      const Send& send, const Receive& receive, size_t sharedBytes,
                                      const Limits& limits) {
  const kernels::ExpertCall& call = send.call;
  const size_t work = call.maxTokens * call.hidden * sizeof(uint16_t);
  const auto blocks = unsigned(
      std::clamp<size_t>((work + kBytesOfBlock - 1) / kBytesOfBlock, 1, queue_->mostBlocks()));
  const size_t vectors = work / blocks / 16;
  const auto threads =
      unsigned(std::clamp<size_t>((vectors + 31) / 32 * 32, 64, PeerQueue::kMostThreads));
  MOONCAKE_TRY(this->receive());
  const auto number = queue_->begin(name, Deadline::at(Clock::time_point::max()));
  if (!number.ok()) return number.error();
  MOONCAKE_TRY(queue_->launch({.kernel = ids.first,
                               .grid = blocks,
                               .block = threads,
                               .sharedBytes = uint32_t(sharedBytes),
                               .arguments = bytesOf(send)}));
  ++sent_;
  pending_ = [=, this, kernel = ids.second, call = *number, most = limits.most] {
    if (call) guard().limit(call, Deadline::after(most));
    return queue_->launch(
        {.kernel = kernel, .grid = blocks, .block = threads, .arguments = bytesOf(receive)});
  };
  return number;
}

Status PeerExperts::receive() {
  const auto pending = std::exchange(pending_, nullptr);
  return pending ? pending() : Status();
}

Result<uint64_t> PeerExperts::send(const Dispatch& dispatch, const Limits& limits) {
  const auto& [shape, caller, x, kind, packsScales, rows, scales, counts, sources, ranges, added] =
      dispatch;
  const size_t row = kernels::sentRowBytes(shape.hidden, kind);
  const size_t bytes =
      kernels::tokensAt(shape.experts, shape.maxTokens, caller.topks) + shape.maxTokens * row;
  MOONCAKE_TRY(check(shape, caller, bytes, bytes));
  const uint32_t hash =
      fnv1a({1, shape.maxTokens, shape.hidden, shape.experts, shape.owners, uint64_t(kind)});
  const kernels::ExpertCall call = callOf(shape, row, hash, limits);
  const kernels::Mask mask{caller.mask, caller.activeRanks};
  const Kept kept = keptOf(shape, caller);
  const auto* const experts = reinterpret_cast<const Expert*>(caller.table);
  const kernels::DispatchSend send{.call = call,
                                   .mask = mask,
                                   .chosen = chosenOf(caller),
                                   .x = static_cast<const unsigned char*>(x),
                                   .kind = kind,
                                   .choices = kept.choices,
                                   .experts = experts};
  const kernels::DispatchReceive receive{
      .call = call,
      .mask = mask,
      .kind = kind,
      .packsScales = packsScales,
      .experts = experts,
      .mine = reinterpret_cast<const int32_t*>(experts + shape.experts),
      .rows = static_cast<unsigned char*>(rows),
      .scales = static_cast<uint32_t*>(scales),
      .counts = counts,
      .sources = sources,
      .ranges = ranges,
      .keptCounts = kept.counts,
      .keptRanges = kept.ranges,
      .dispatched = kept.dispatched,
      .addedCounts = added,
      .waits = caller.waits};
  return sendAny("dispatch", {KernelId::kDispatchSend, KernelId::kDispatchReceive}, send, receive,
                 shape.experts * sizeof(uint32_t), limits);
}

Result<uint64_t> PeerExperts::send(const Combine& combine, const Limits& limits) {
  const auto& [shape, caller, x, weights, usesLogfmt, renormalizes, sums, missing] = combine;
  const size_t answersAt = kernels::answersAt(shape.mostLocal, ranks());
  const size_t rowsOfRank = shape.maxTokens * shape.combineRow;
  MOONCAKE_TRY(check(shape, caller, answersAt + shape.local * ranks() * rowsOfRank,
                     answersAt + shape.mostLocal * rowsOfRank));
  const uint32_t hash =
      fnv1a({2, shape.maxTokens, shape.hidden, shape.experts, shape.owners, usesLogfmt});
  const kernels::ExpertCall call = callOf(shape, shape.combineRow, hash, limits);
  const kernels::Mask mask{caller.mask, caller.activeRanks};
  const Kept kept = keptOf(shape, caller);
  const kernels::CombineSend send{.call = call,
                                  .mask = mask,
                                  .chosen = chosenOf(caller),
                                  .choices = kept.choices,
                                  .x = static_cast<const unsigned char*>(x),
                                  .usesLogfmt = usesLogfmt,
                                  .counts = kept.counts,
                                  .ranges = kept.ranges,
                                  .dispatched = kept.dispatched};
  const kernels::CombineReceive receive{.call = call,
                                        .mask = mask,
                                        .chosen = chosenOf(caller),
                                        .choices = kept.choices,
                                        .weights = weights,
                                        .usesLogfmt = usesLogfmt,
                                        .renormalizes = renormalizes,
                                        .experts = reinterpret_cast<const Expert*>(caller.table),
                                        .dispatched = kept.dispatched,
                                        .combined = static_cast<unsigned char*>(sums),
                                        .missing = missing,
                                        .waits = caller.waits};
  return sendAny("combine", {KernelId::kCombineSend, KernelId::kCombineReceive}, send, receive, 0,
                 limits);
}

// Operations take turns with the two banks, also if ranks are lost meanwhile: an operation that
// begins anew has the bank that it had.
PeerExperts::NextRows PeerExperts::nextRows(const Shape& shape) const {
  if (queue_->hasGraphs()) return {};
  const uint64_t number = guard().lastCall() + 1;
  return {.rows = queue_->area().bank(number) + kernels::answersAt(shape.mostLocal, ranks()),
          .number = number};
}

}  // namespace mooncake
