#pragma once

#include "kernels/ep/common.cuh"
#include "kernels/ep/logfmt_rows.cuh"

// The combine, as in csrc/ep/combine.cc: each rank publishes the rows that its experts made. Then
// each rank adds up the rows of its tokens where they stand, in the order of top-k.
namespace mooncake::kernels {

// ---- sending

// Whether each choice is none, or as in the dispatch. The same on all threads of the block.
MC_DEVICE bool areOfDispatch(const Chosen& chosen, const Choice* choices) {
  bool areSame = true;
  for (size_t i = threadIdx.x; i < size_t(chosen.tokens) * chosen.topk; i += blockDim.x) {
    const int32_t expert = chosenAt(chosen, i);
    areSame = areSame && (expert == kNone || expert == choices[i].expert);
  }
  return __syncthreads_and(areSame);
}

// Publishes the facts beside a rank's rows. One block.
MC_DEVICE void publishRanges(const CombineSend& a, unsigned char* own) {
  const unsigned ranks = unsigned(a.call.exchange.state->ranks);
  uint32_t* const firstRows = reinterpret_cast<uint32_t*>(own + kLine);
  for (unsigned i = threadIdx.x; i < a.call.local * ranks; i += blockDim.x)
    firstRows[i] = uint32_t(a.ranges[i] >> 32);
  const Failure failure =
      areOfDispatch(a.chosen, a.choices) ? Failure::kNone : Failure::kOtherExpert;
  if (threadIdx.x >= kLanes) return;
  const uint64_t mask = ownMask(a.mask, int(ranks));
  if (lane() != 0) return;
  *reinterpret_cast<RowsHeader*>(own) = {mask, a.dispatched->number, a.chosen.tokens, a.chosen.topk,
                                         uint32_t(failure)};
}

// Publishes the rows that experts made. Rows of all experts take turns over the kernel's warps.
MC_DEVICE void sendAnswers(const CombineSend& a, unsigned char* rows, unsigned block) {
  const size_t rowBytes = 2 * a.call.hidden;
  const size_t perExpert = size_t(a.call.exchange.state->ranks) * a.call.maxTokens;
  size_t before = 0;
  for (unsigned begin = 0; begin < a.call.local; begin += kLanes) {
    const unsigned expert = begin + lane();
    // A dispatch of a graph that was never replayed has kept no counts.
    unsigned counted = expert < a.call.local ? unsigned(a.counts[expert]) : 0;
    if (counted > perExpert) counted = 0;
    for (unsigned i = 0; i < kLanes && begin + i < a.call.local; ++i) {
      const size_t count = __shfl_sync(kAllLanes, counted, int(i)), all = warps();
      for (size_t row = firstItem(block, before); row < count; row += all) {
        const size_t place = (begin + i) * perExpert + row;
        const unsigned char* const from = a.x + place * rowBytes;
        unsigned char* const to = rows + place * a.call.rowBytes;
        if (a.usesLogfmt) {
          encodeRow(to, reinterpret_cast<const uint16_t*>(from), a.call.hidden);
        } else {
          copyByWarp(to, from, rowBytes);
        }
      }
      before += count;
    }
  }
}

// Pushes the facts to a remote rank, and the rows for its tokens that sendAnswers() has written in
// this block. One warp.
MC_DEVICE void pushAnswers(const CombineSend& a, Pushes& pushes, unsigned block) {
  push(pushes, 0, 0, lane() == 0 && block == gridDim.x - 1 ? sizeof(RowsHeader) : 0);
  const size_t ranks = size_t(a.call.exchange.state->ranks), perExpert = ranks * a.call.maxTokens;
  const size_t some = blockDim.x / kLanes;  // rows side by side that the block has written
  size_t before = 0;
  for (size_t expert = 0; expert < a.call.local; ++expert) {
    const uint64_t range = uint64_t(a.ranges[expert * ranks + size_t(pushes.peer)]);
    size_t counted = uint32_t(a.counts[expert]), count = uint32_t(range);
    if (counted > perExpert) counted = 0;
    const size_t first = range >> 32;
    if (first > counted || count > counted - first || count > a.call.maxTokens) count = 0;
    // Numbers of the rows among the rows of all experts.
    const Part rows{before + first, before + first + count};
    const size_t turn = rows.begin / some, skipped = (block + gridDim.x - turn % gridDim.x);
    for (size_t i = turn + skipped % gridDim.x; i * some < rows.end; i += kLanes * gridDim.x) {
      const size_t begin = (i + lane() * gridDim.x) * some;
      const Part own = commonOf({begin, begin + some}, rows);
      const size_t from = expert * perExpert + own.begin - before;
      const size_t to = expert * a.call.maxTokens + own.begin - rows.begin;
      push(pushes, a.call.answersAt + from * a.call.rowBytes,
           a.call.answersAt + to * a.call.rowBytes, (own.end - own.begin) * a.call.rowBytes);
    }
    before += counted;
  }
}

MC_DEVICE void combineSend(const CombineSend& a) {
  const auto write = [&](unsigned char* own, unsigned block) {
    if (a.x) sendAnswers(a, own + a.call.answersAt, block);
    if (block == gridDim.x - 1) publishRanges(a, own);
  };
  sendAll(a.call.exchange, write,
          [&](Pushes& pushes, unsigned block) { pushAnswers(a, pushes, block); });
}

// ---- receiving

// A token's row of one expert. Each lane has one.
struct Answer {
  const unsigned char* row;  // null: nothing is added
  float weight;
};

// The rows of a token, one on each lane, and whether a contribution is missing. One warp.
MC_DEVICE Answer answersOf(const CombineReceive& a, const GroupState& state, const Turn& turn,
                           uint64_t participants, size_t token, bool& isMissing) {
  using mooncake::ep::product;
  using mooncake::ep::quotient;
  const unsigned topk = a.chosen.topk;
  const size_t place = token * topk + lane();
  Choice choice{kNone, 0};
  if (lane() < topk) choice = a.choices[place];
  const bool isWanted = choice.expert != kNone && chosenAt(a.chosen, place) != kNone;
  Answer answer{nullptr, isWanted ? a.weights[place] : 0};
  bool isHere = false;
  if (isWanted) {
    const Expert expert = a.experts[choice.expert];
    isHere = has(participants, state.rank) && has(participants, expert.owner);
    if (isHere) {
      const unsigned char* const theirs = bankAt(state, expert.owner, turn.serial);
      const bool isRemote = has(state.remote.ranks, expert.owner);
      const size_t local = size_t(expert.local), ranks = size_t(state.ranks);
      const size_t perExpert = isRemote ? a.call.maxTokens : ranks * a.call.maxTokens;
      const uint32_t* const firstRows = reinterpret_cast<const uint32_t*>(theirs + kLine);
      size_t row = choice.index;
      if (!isRemote) row += firstRows[local * ranks + size_t(state.rank)];
      // If this rank is out, the number may be another operation's.
      isHere = row < perExpert;
      if (isHere)
        answer.row = theirs + a.call.answersAt + (local * perExpert + row) * a.call.rowBytes;
    }
  }
  isMissing = __any_sync(kAllLanes, isWanted && !isHere);
  if (!a.renormalizes || !isMissing) return answer;
  float wanted = 0, arrived = 0;
  for (unsigned i = 0; i < topk; ++i) {
    const float weight = __shfl_sync(kAllLanes, answer.weight, int(i));
    if (__shfl_sync(kAllLanes, int(isWanted), int(i))) wanted += weight;
    if (__shfl_sync(kAllLanes, int(isHere), int(i))) arrived += weight;
  }
  if (arrived != 0) answer.weight = product(answer.weight, quotient(wanted, arrived));
  return answer;
}

template <unsigned kCount>
MC_DEVICE void storeSums(const float* sums, unsigned char* to, size_t first, size_t hidden) {
  uint16_t* const channels = reinterpret_cast<uint16_t*>(to);
  struct alignas(2 * kCount) Unit {
    uint16_t of[kCount];
  };
  if (first + kCount <= hidden && reinterpret_cast<size_t>(channels + first) % sizeof(Unit) == 0) {
    Unit unit;
    for (unsigned i = 0; i < kCount; ++i) unit.of[i] = mooncake::ep::floatToBf16(sums[i]);
    storeUnit(reinterpret_cast<Unit*>(channels + first), unit);
    return;
  }
  for (unsigned i = 0; i < kCount; ++i)
    if (first + i < hidden) channels[first + i] = mooncake::ep::floatToBf16(sums[i]);
}

constexpr size_t kChannelsAtOnce = 256;  // of a row, by a warp

// Adds up rows of bfloat16: the blocks of channels from `first` on, each `step`-th. `begin(sum,
// channel)` adds the numbers that come before the rows. One warp.
template <typename Begin>
MC_DEVICE void addRows(size_t hidden, const Answer& answer, unsigned char* to, size_t first,
                       size_t step, const Begin& begin) {
  struct alignas(16) Unit {
    uint16_t of[8];
  };
  constexpr size_t kEach = kChannelsAtOnce / kLanes;
  static_assert(sizeof(Unit) == kEach * sizeof(uint16_t));
  constexpr unsigned kAtOnce = 4;  // rows with channels on their way
  const unsigned rows = __ballot_sync(kAllLanes, answer.row != nullptr);
  for (size_t block = first; block * kChannelsAtOnce < hidden; block += step) {
    const size_t channel = block * kChannelsAtOnce + lane() * kEach;
    float sums[kEach] = {};
    for (unsigned k = 0; k < kEach; ++k)
      if (channel + k < hidden) begin(sums[k], channel + k);
    for (unsigned left = rows; left;) {
      Unit units[kAtOnce];
      float weights[kAtOnce];
      unsigned count = 0;
      for (; count < kAtOnce && left; ++count, left &= left - 1) {
        const int from = __ffs(int(left)) - 1;
        const uint64_t row = __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(answer.row), from);
        weights[count] = __shfl_sync(kAllLanes, answer.weight, from);
        if (channel < hidden)
          units[count] = loadUnit(reinterpret_cast<const Unit*>(row + 2 * channel));
      }
      for (unsigned i = 0; i < count && channel < hidden; ++i)
        for (unsigned k = 0; k < kEach; ++k)
          sums[k] = mooncake::ep::fusedSum(mooncake::ep::bf16ToFloat(units[i].of[k]), weights[i],
                                           sums[k]);
    }
    if (channel < hidden) storeSums<kEach>(sums, to, channel, hidden);
  }
}

// The same of rows in LogFMT: blocks [first, end).
MC_DEVICE void addLogfmtRows(const CombineReceive& a, const Answer& answer, unsigned char* to,
                             size_t first, size_t end) {
  const size_t hidden = a.call.hidden;
  const unsigned rows = __ballot_sync(kAllLanes, answer.row != nullptr);
  const auto countOf = [&](size_t block) {
    const size_t left = hidden - block * kLogfmtBlock;
    return left < kLogfmtBlock ? unsigned(left) : unsigned(kLogfmtBlock);
  };
  // Address of the next block of this lane's row. A number, because lanes without a row count, too.
  uint64_t next =
      reinterpret_cast<uint64_t>(answer.row) + mooncake::ep::logfmtHeaderBytes(uint32_t(hidden));
  for (size_t block = 0; answer.row && block < first; ++block) {
    const unsigned count = countOf(block);
    next += mooncake::ep::logfmtBlockBytes(headerAt(answer.row, block, count), count);
  }
  for (size_t block = first; block < end; ++block) {
    const unsigned count = countOf(block);
    LogfmtHeader own{0, 0};
    if (answer.row) own = headerAt(answer.row, block, count);
    float sums[kEachOfBlock] = {};
    for (unsigned left = rows; left; left &= left - 1) {
      const int from = __ffs(int(left)) - 1;
      const uint64_t at = __shfl_sync(kAllLanes, next, from);
      const uint32_t bits = __shfl_sync(kAllLanes, uint32_t(own.largest) << 16 | own.step, from);
      const float weight = __shfl_sync(kAllLanes, answer.weight, from);
      addBlock(reinterpret_cast<const unsigned char*>(at),
               {uint16_t(bits >> 16), uint16_t(bits & 0xffff)}, count, weight, sums);
    }
    next += mooncake::ep::logfmtBlockBytes(own, count);
    storeSums<kEachOfBlock>(sums, to, block * kLogfmtBlock + lane() * kEachOfBlock, hidden);
  }
}

// Adds up the rows of the block's tokens. Where there are few, several warps share a token.
MC_DEVICE void addTokens(const CombineReceive& a, const GroupState& state, const Turn& turn,
                         uint64_t participants, unsigned block) {
  const size_t hidden = a.call.hidden, tokens = a.chosen.tokens;
  const size_t blocks = (hidden + kLogfmtBlock - 1) / kLogfmtBlock;
  size_t parts = tokens ? warps() / tokens : 1;
  if (parts > blocks) parts = blocks;
  if (parts == 0) parts = 1;
  for (size_t i = warpOf(block); i < tokens * parts; i += warps()) {
    const size_t token = i / parts, part = i % parts;
    bool isMissing = false;
    const Answer answer = answersOf(a, state, turn, participants, token, isMissing);
    if (part == 0 && lane() == 0) a.missing[token] = isMissing;
    unsigned char* const to = a.combined + token * 2 * hidden;
    if (a.usesLogfmt) {
      addLogfmtRows(a, answer, to, blocks * part / parts, blocks * (part + 1) / parts);
    } else {
      addRows(hidden, answer, to, part, parts, [](float&, size_t) {});
    }
  }
}

MC_DEVICE void combineReceive(const CombineReceive& a) {
  MC_SHARED(Waits, waits);
  const ExpertCall& call = a.call;
  const auto with = [&](const GroupState& state, const Turn& turn) {
    Together found = together(state, turn, a.dispatched->number);
    found.participants &= a.dispatched->participants;
    return found;
  };
  receiveAll(
      call.exchange,
      [&](const Turn& turn) {
        if (a.waits) measureWaits(call.exchange, turn, waits);
      },
      [&](const GroupState& state, const Turn& turn, unsigned block) {
        const Together found = with(state, turn);
        if (found.failure == uint32_t(Failure::kNone))
          addTokens(a, state, turn, found.participants, block);
      },
      [&](const Turn& turn) {
        const Together found = with(*call.exchange.state, turn);
        if (!succeeds(call.exchange, found)) return false;
        tellCaller(call.exchange, a.mask, found.participants);
        tellWaits(call.exchange, turn, a.waits, waits);
        __syncthreads();
        return true;
      });
}

}  // namespace mooncake::kernels
