#pragma once

#include "kernels/common/fp8.h"
#include "kernels/ep/common.cuh"

// The dispatch, as in csrc/ep/dispatch.cc: each rank casts its rows once into its own memory, and
// publishes which experts its tokens chose. Then each rank takes the rows for its experts. Each row
// crosses once for each choice of an expert, straight to its place.
namespace mooncake::kernels {

// ---- sending

// Numbers the choices of the tokens up to `end`, writes the choices from `first` on, and counts
// each expert's choices. Returns whether an expert does not exist. One warp; `counts` begin as 0.
MC_DEVICE bool numberChoices(const DispatchSend& a, unsigned char* own, size_t first, size_t end,
                             uint32_t* counts) {
  const Chosen& chosen = a.chosen;
  Choice* const theirs = reinterpret_cast<Choice*>(own + choicesAt(a.call.experts));
  bool isWrong = false;
  for (size_t begin = 0; begin < end * chosen.topk; begin += kLanes) {
    const size_t place = begin + lane();
    const bool isIn = place < end * chosen.topk;
    const int32_t expert = isIn ? chosenAt(chosen, place) : kNone;
    const bool isChosen = expert >= 0 && unsigned(expert) < a.call.experts;
    isWrong |= !isChosen && expert != kNone;
    const unsigned alike = __match_any_sync(kAllLanes, unsigned(isChosen ? expert : kNone));
    const unsigned before = unsigned(__popc(alike & lanesBelow()));
    const uint32_t count = isChosen ? counts[expert] : 0;
    __syncwarp();
    if (isChosen && before == 0) counts[expert] = count + unsigned(__popc(alike));
    __syncwarp();
    if (!isIn || place < first * chosen.topk) continue;
    const Choice choice{isChosen ? expert : kNone, count + before};
    theirs[place] = choice;
    a.choices[place] = choice;
  }
  return __any_sync(kAllLanes, isWrong);
}

// Publishes the facts beside a rank's rows. The warp that has numbered all choices.
MC_DEVICE void publishCounts(const DispatchSend& a, unsigned char* own, const uint32_t* counts,
                             bool isWrong) {
  bool areTooMany = false;
  uint32_t* const theirs = reinterpret_cast<uint32_t*>(own + countsAt());
  for (unsigned e = lane(); e < a.call.experts; e += kLanes) {
    theirs[e] = counts[e];
    areTooMany |= counts[e] > a.call.maxTokens;
  }
  areTooMany = __any_sync(kAllLanes, areTooMany);
  const uint64_t mask = ownMask(a.mask, a.call.exchange.state->ranks);
  const Failure failure = isWrong      ? Failure::kNoSuchExpert
                          : areTooMany ? Failure::kTooManyRows
                                       : Failure::kNone;
  if (lane() != 0) return;
  *reinterpret_cast<RowsHeader*>(own) = {mask, 0, a.chosen.tokens, a.chosen.topk,
                                         uint32_t(failure)};
}

constexpr size_t kCopiedAtOnce = 2048;  // bytes of a row, by a warp

// Casts a block of a row. A lane has four channels side by side.
MC_DEVICE void castBlock(const uint16_t* block, unsigned channels, bool rounds,
                         unsigned char* codes, float* scale) {
  using namespace mooncake::ep;
  constexpr unsigned kEach = kFp8Block / kLanes;
  const unsigned first = lane() * kEach;
  uint16_t values[kEach] = {};
  uint16_t largest = 0;
  for (unsigned i = 0; i < kEach; ++i) {
    if (first + i < channels) values[i] = block[first + i];
    largest = largerMagnitude(largest, values[i]);
  }
  largest = combineLanes(largest, [](uint16_t a, uint16_t b) { return a > b ? a : b; });
  const Fp8Scale chosen = fp8Scale(bf16ToFloat(largest), rounds);
  if (channels == kFp8Block) {
    uint32_t word = 0;
    for (unsigned i = 0; i < kEach; ++i) word |= uint32_t(castToE4m3(values[i], chosen)) << (8 * i);
    *reinterpret_cast<uint32_t*>(codes + first) = word;
  } else {
    for (unsigned i = 0; i < kEach; ++i)
      if (first + i < channels) codes[first + i] = castToE4m3(values[i], chosen);
  }
  if (lane() == 0) *scale = chosen.scale;
}

// Writes the rows of these tokens in sent form, with the block's warps from number `skipped` on.
MC_DEVICE void sendRows(const DispatchSend& a, unsigned char* rows, const Part& tokens,
                        unsigned skipped) {
  using mooncake::ep::kFp8Block;
  const size_t hidden = a.call.hidden, rowBytes = 2 * hidden;
  const bool isCast = a.kind != RowKind::kBf16;
  const size_t step = isCast ? 2 * kFp8Block : kCopiedAtOnce;
  const size_t steps = (rowBytes + step - 1) / step, all = (tokens.end - tokens.begin) * steps;
  const unsigned warp = threadIdx.x / kLanes, warpsHere = blockDim.x / kLanes;
  if (warp < skipped) return;
  for (size_t i = warp - skipped; i < all; i += warpsHere - skipped) {
    const size_t token = tokens.begin + i / steps, at = i % steps * step;
    const size_t left = rowBytes - at;
    const unsigned char* const from = a.x + token * rowBytes + at;
    unsigned char* const row = rows + token * a.call.rowBytes;
    if (!isCast) {
      copyByWarp(row + at, from, left < step ? left : step);
      continue;
    }
    castBlock(reinterpret_cast<const uint16_t*>(from), unsigned((left < step ? left : step) / 2),
              a.kind == RowKind::kFp8Rounded, row + sentScaleBytes(hidden) + at / 2,
              reinterpret_cast<float*>(row) + at / step);
  }
}

// Pushes the facts and the block's choices to a remote rank, and each row once of which one of the
// rank's experts is chosen. One warp.
MC_DEVICE void pushTokens(const DispatchSend& a, Pushes& pushes, unsigned block) {
  const size_t topk = a.chosen.topk, rowBytes = a.call.rowBytes;
  const Part tokens = partOf(a.chosen.tokens, block, gridDim.x, 1);
  const size_t choices = choicesAt(a.call.experts) + tokens.begin * topk * sizeof(Choice);
  const size_t facts = block == gridDim.x - 1 ? choicesAt(a.call.experts) : 0;
  const bool isFirst = lane() == 0;
  const size_t bytes = isFirst       ? facts
                       : lane() == 1 ? (tokens.end - tokens.begin) * topk * sizeof(Choice)
                                     : 0;
  push(pushes, isFirst ? 0 : choices, isFirst ? 0 : choices, bytes);
  const size_t rows = tokensAt(a.call.experts, a.chosen.tokens, topk);
  pushRows(pushes, rows, rowBytes, tokens, [&](size_t token) {
    bool isWanted = false;
    for (size_t k = 0; k < topk; ++k) {
      const int32_t expert = a.choices[token * topk + k].expert;
      isWanted |= expert != kNone && a.experts[expert].owner == pushes.peer;
    }
    return isWanted;
  });
}

MC_DEVICE void dispatchSend(const DispatchSend& a) {
  MC_DYNAMIC_SHARED(uint32_t, counts);
  const auto write = [&](unsigned char* own, unsigned block) {
    for (unsigned e = threadIdx.x; e < a.call.experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    const Part tokens = partOf(a.chosen.tokens, block, gridDim.x, 1);
    // Where there are several warps, the first has the choices alone.
    const unsigned skipped = blockDim.x > kLanes ? 1 : 0;
    if (threadIdx.x < kLanes) {
      const bool isWrong = numberChoices(a, own, tokens.begin, tokens.end, counts);
      if (block == gridDim.x - 1) publishCounts(a, own, counts, isWrong);
    }
    sendRows(a, own + tokensAt(a.call.experts, a.chosen.tokens, a.chosen.topk), tokens, skipped);
  };
  sendAll(a.call.exchange, write,
          [&](Pushes& pushes, unsigned block) { pushTokens(a, pushes, block); });
}

// ---- receiving

// Begin and number of the rows of each of this rank's experts, by rank.
MC_DEVICE void writeRanges(const DispatchReceive& a, const GroupState& state, const Turn& turn,
                           uint64_t participants, unsigned block) {
  const unsigned ranks = unsigned(state.ranks), rank = lane();
  const bool isSource =
      rank < ranks && has(participants, int(rank)) && has(participants, state.rank);
  for (unsigned local = warpOf(block); local < a.call.local; local += warps()) {
    unsigned count = 0;
    if (isSource) {
      const unsigned char* const theirs = bankAt(state, int(rank), turn.serial);
      count = reinterpret_cast<const uint32_t*>(theirs + countsAt())[a.mine[local]];
    }
    const unsigned end = sumUpTo(count);
    const int64_t range = isSource ? int64_t(end - count) << 32 | int64_t(count) : 0;
    if (rank < ranks) {
      a.ranges[local * ranks + rank] = range;
      a.keptRanges[local * ranks + rank] = range;
    }
    if (rank == kLanes - 1) a.counts[local] = a.keptCounts[local] = int32_t(end);
  }
}

MC_DEVICE uint32_t scaleWord(const DispatchReceive& a, const float* scales, unsigned count,
                             unsigned word) {
  if (!a.packsScales) return mooncake::ep::bitsOf(scales[word]);
  uint32_t packed = 0;
  for (unsigned i = 0; i < 4 && 4 * word + i < count; ++i)
    packed |= uint32_t(mooncake::ep::ue8m0Of(scales[4 * word + i])) << (8 * i);
  return packed;
}

// Takes one row to its place. One warp.
MC_DEVICE void takeRow(const DispatchReceive& a, const unsigned char* row, size_t local,
                       size_t perExpert, size_t place) {
  const size_t hidden = a.call.hidden;
  if (a.kind == RowKind::kBf16) {
    copyByWarp(a.rows + (local * perExpert + place) * 2 * hidden, row, 2 * hidden);
    return;
  }
  const unsigned scales = unsigned(scalesOf(hidden));
  const unsigned words = a.packsScales ? (scales + 3) / 4 : scales;
  for (unsigned word = lane(); word < words; word += kLanes) {
    a.scales[(local * words + word) * perExpert + place] =
        scaleWord(a, reinterpret_cast<const float*>(row), scales, word);
  }
  copyByWarp(a.rows + (local * perExpert + place) * hidden, row + sentScaleBytes(hidden), hidden);
}

// Place of a rank's first row among an expert's rows.
MC_DEVICE unsigned firstRow(const GroupState& state, const Turn& turn, uint64_t participants,
                            int source, int32_t expert) {
  unsigned first = 0;
  for (int rank = 0; rank < source; ++rank) {
    if (!has(participants, rank)) continue;
    const unsigned char* const theirs = bankAt(state, rank, turn.serial);
    first += reinterpret_cast<const uint32_t*>(theirs + countsAt())[expert];
  }
  return first;
}

// Takes the rows that tokens of one rank sent to this rank's experts. Each warp looks at 32 choices
// at a time; `before` of the kernel's warps have had their turn.
MC_DEVICE size_t takeRows(const DispatchReceive& a, const GroupState& state, const Turn& turn,
                          uint64_t participants, int source, unsigned block, size_t before) {
  const unsigned char* const theirs = bankAt(state, source, turn.serial);
  const RowsHeader& about = headerOf(turn, source);
  // Read over the wire, so only once. If this rank is out, these may be another operation's. Lanes
  // must not find different numbers then, and no number may lead astray.
  const unsigned tokens = ofFirstLane(about.tokens), topk = ofFirstLane(about.topk);
  const bool areSound = tokens <= a.call.maxTokens && topk <= kMostTopk &&
                        tokensAt(a.call.experts, tokens, topk) + tokens * a.call.rowBytes <=
                            bankBytesOf(state, source);
  const size_t choices = areSound ? size_t(tokens) * topk : 0;
  const Choice* const chosen = reinterpret_cast<const Choice*>(theirs + choicesAt(a.call.experts));
  const unsigned char* const rows = theirs + tokensAt(a.call.experts, tokens, topk);
  const size_t perExpert = size_t(state.ranks) * a.call.maxTokens;
  const size_t groups = (choices + kLanes - 1) / kLanes, all = warps();
  for (size_t group = firstItem(block, before); group < groups; group += all) {
    const size_t place = group * kLanes + lane();
    Choice choice{kNone, 0};
    if (place < choices) choice = chosen[place];
    Expert expert{-1, 0};
    if (choice.expert >= 0 && unsigned(choice.expert) < a.call.experts)
      expert = a.experts[choice.expert];
    unsigned row = 0;
    if (expert.owner == state.rank)
      row = firstRow(state, turn, participants, source, choice.expert) + choice.index;
    const bool isOurs = expert.owner == state.rank && row < perExpert;
    if (isOurs) {
      a.sources[size_t(expert.local) * perExpert + row] = int32_t(place / topk);
    }
    for (unsigned ours = __ballot_sync(kAllLanes, isOurs); ours; ours &= ours - 1) {
      const int from = __ffs(int(ours)) - 1;
      const size_t token = (group * kLanes + unsigned(from)) / topk;
      const int32_t local = __shfl_sync(kAllLanes, expert.local, from);
      const unsigned at = __shfl_sync(kAllLanes, row, from);
      takeRow(a, rows + token * a.call.rowBytes, size_t(local), perExpert, at);
    }
  }
  return groups;
}

MC_DEVICE void dispatchReceive(const DispatchReceive& a) {
  MC_SHARED(Waits, waits);
  const ExpertCall& call = a.call;
  receiveAll(
      call.exchange,
      [&](const Turn& turn) {
        if (a.waits) measureWaits(call.exchange, turn, waits);
      },
      [&](const GroupState& state, const Turn& turn, unsigned block) {
        const Together with = together(state, turn, 0);
        if (with.failure != uint32_t(Failure::kNone)) return;
        writeRanges(a, state, turn, with.participants, block);
        if (!has(with.participants, state.rank)) return;
        size_t groups = 0;
        for (int rank = 0; rank < state.ranks; ++rank)
          if (has(with.participants, rank))
            groups += takeRows(a, state, turn, with.participants, rank, block, groups);
      },
      [&](const Turn& turn) {
        const GroupState& state = *call.exchange.state;
        const Together with = together(state, turn, 0);
        if (!succeeds(call.exchange, with)) return false;
        tellCaller(call.exchange, a.mask, with.participants);
        tellWaits(call.exchange, turn, a.waits, waits);
        if (a.addedCounts) {
          for (unsigned local = threadIdx.x; local < call.local; local += blockDim.x)
            a.addedCounts[local] += a.keptCounts[local];
        }
        if (threadIdx.x == 0) *a.dispatched = {state.done + 1, with.participants};
        __syncthreads();
        return true;
      });
}

}  // namespace mooncake::kernels
