#pragma once

#include "kernels/ep/combine.cuh"
#include "kernels/ep/tokens.cuh"

// The combine of the normal mode: each rank publishes its rows of the piece's tokens. Then each rank
// adds up the rows of its own tokens where they stand, in the order of the tokens' ranks.
namespace mooncake::kernels {

// ---- publishing

// The rows of a piece, by the rank that they go back to: `count` of them from `first` on in x, and
// from `place` on in published memory.
struct PieceRows {
  uint32_t first[kMaxRanks], place[kMaxRanks], count[kMaxRanks];
  uint32_t begin[kMaxRanks];  // first row of all pieces, in x
  uint32_t end;               // of all places
  uint32_t most;              // rows of the largest piece up to this one
  uint32_t mostOfOne;         // the same for the rows that go back to one remote rank
};

// The first row of [begin, end) with a token that is not below `token`.
MC_DEVICE uint32_t lowerBound(const int32_t* sources, uint32_t begin, uint32_t end, size_t token) {
  while (begin < end) {
    const uint32_t middle = begin + (end - begin) / 2;
    if (size_t(sources[middle]) < token) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// All threads of a block.
MC_DEVICE void findRows(const CombineTokens& a, const Turn& turn, PieceRows& found) {
  if (threadIdx.x < kLanes) {
    const unsigned rank = lane(), ranks = unsigned(a.call.exchange.state->ranks);
    const size_t piece = turn.number;
    uint32_t first = 0, end = 0, begin = 0;
    if (rank < ranks) {
      // A dispatch of a graph that was never replayed has written none.
      const auto within = [&](int32_t row) {
        return size_t(uint32_t(row)) < a.capacity ? uint32_t(row) : uint32_t(a.capacity);
      };
      begin = rank == 0 ? 0 : within(a.ends[rank - 1]);
      const uint32_t last = within(a.ends[rank]);
      first = piece == 0 ? begin : lowerBound(a.sources, begin, last, piece * a.call.step);
      end = turn.number + 1 == a.call.exchange.pieces
                ? last
                : lowerBound(a.sources, first, last, (piece + 1) * a.call.step);
    }
    const uint32_t count = end > first ? end - first : 0, behind = sumUpTo(count);
    const bool isRemote = has(a.call.exchange.state->remote.ranks, int(rank));
    const uint32_t largest =
        combineLanes(isRemote ? count : 0, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
    if (rank < ranks) {
      found.first[rank] = first;
      found.begin[rank] = begin;
      found.count[rank] = count;
      found.place[rank] = behind - count;
    }
    if (rank == ranks - 1) {
      found.end = behind;
      found.most = piece > 0 && found.most > behind ? found.most : behind;
      found.mostOfOne = piece > 0 && found.mostOfOne > largest ? found.mostOfOne : largest;
    }
  }
  __syncthreads();
}

// The most rows in the published memory of a rank.
MC_DEVICE size_t roomOf(const GroupState& state, int rank, const TokenCall& call) {
  return (bankBytesOf(state, rank) - answerRowsAt()) / call.rowBytes;
}

// Rows that fit into an inbox. Without remote ranks any number does.
MC_DEVICE size_t roomThere(const GroupState& state, const TokenCall& call) {
  if (!state.remote.ranks) return SIZE_MAX;
  return (state.remote.inboxBankBytes - answerRowsAt()) / call.rowBytes;
}

MC_DEVICE void publishAnswers(const CombineTokens& a, unsigned char* own, unsigned block,
                              const PieceRows& rows) {
  const TokenCall& call = a.call;
  const GroupState& state = *call.exchange.state;
  const size_t room = roomOf(state, state.rank, call), rowBytes = 2 * a.hidden;
  const size_t weightBytes = a.weightCount * sizeof(float);
  const unsigned ranks = unsigned(state.ranks);
  const Part part = partOf(rows.end, block, gridDim.x, 1);
  const unsigned warp = threadIdx.x / kLanes, warpsHere = blockDim.x / kLanes;
  unsigned rank = 0;
  for (size_t place = part.begin + warp; place < part.end && place < room; place += warpsHere) {
    while (place >= size_t(rows.place[rank]) + rows.count[rank]) ++rank;
    const size_t row = rows.first[rank] + (place - rows.place[rank]);
    unsigned char* const to = own + answerRowsAt() + place * call.rowBytes;
    copyByWarp(to, a.x + row * rowBytes, rowBytes);
    if (weightBytes == 0) continue;
    copyByWarp(to + weightsOfRowAt(a.hidden),
               reinterpret_cast<const unsigned char*>(a.weights + row * a.weightCount),
               weightBytes);
  }
  if (block != gridDim.x - 1 || threadIdx.x >= kLanes) return;
  // So a row's place is this number and the row's place among the rows of all pieces. A remote rank
  // has only its own rows.
  if (lane() < ranks) {
    const uint32_t place = has(state.remote.ranks, int(lane())) ? 0 : rows.place[lane()];
    factsIn(own)[lane()] = place - (rows.first[lane()] - rows.begin[lane()]);
  }
  const bool fits = rows.most <= room && rows.mostOfOne <= roomThere(state, call);
  publishFacts(call, own, a.dispatched->number, fits ? Failure::kNone : Failure::kNoPlace);
}

constexpr size_t kPushedBytes = size_t(1) << 20;  // at most by a command, but for one row

// Pushes the facts, and the rows for a remote rank that the block has written. One warp.
MC_DEVICE void pushAnswers(const CombineTokens& a, Pushes& pushes, unsigned block,
                           const PieceRows& rows) {
  const TokenCall& call = a.call;
  const GroupState& state = pushes.state;
  const size_t begin = rows.place[pushes.peer];
  Part part =
      commonOf(partOf(rows.end, block, gridDim.x, 1), {begin, begin + rows.count[pushes.peer]});
  // Without room for all rows, the group fails.
  const size_t room = roomOf(state, state.rank, call), there = begin + roomThere(state, call);
  part = commonOf(part, {0, room < there ? room : there});
  push(pushes, 0, 0, block == gridDim.x - 1 && lane() == 0 ? answerRowsAt() : 0);
  const size_t each = call.rowBytes < kPushedBytes ? kPushedBytes / call.rowBytes : 1;
  for (size_t first = part.begin; first < part.end; first += each * kLanes) {
    const size_t place = first + each * lane();
    const Part mine = commonOf(part, {place, place + each});
    push(pushes, answerRowsAt() + mine.begin * call.rowBytes,
         answerRowsAt() + (mine.begin - begin) * call.rowBytes,
         (mine.end - mine.begin) * call.rowBytes);
  }
}

// ---- adding

// The rows of a token, one on each lane. One warp.
MC_DEVICE Answer answersOf(const CombineTokens& a, const GroupState& state, const Turn& turn,
                           uint64_t participants, size_t token, bool& isMissing) {
  Choice choice{kNone, 0};
  if (lane() < a.call.width) choice = a.call.choices[token * a.call.width + lane()];
  const bool isWanted = choice.expert >= 0 && choice.expert < state.ranks;
  Answer answer{nullptr, 1};
  if (isWanted && has(participants, state.rank) && has(participants, choice.expert)) {
    const uint32_t row = factsOf(turn, choice.expert)[state.rank] + choice.index;
    // If this rank is out, the number may be another operation's.
    if (row < roomOf(state, choice.expert, a.call))
      answer.row = turn.data[choice.expert] + answerRowsAt() + row * a.call.rowBytes;
  }
  isMissing = __any_sync(kAllLanes, isWanted && !answer.row);
  return answer;
}

// Adds the biases of a channel of a token.
MC_DEVICE void addBiases(const CombineTokens& a, size_t token, size_t channel, float& sum) {
  for (unsigned i = 0; i < kMostBiases; ++i) {
    if (i >= a.biasCount) break;
    const uint16_t* const bias = reinterpret_cast<const uint16_t*>(a.biases[i]);
    sum += mooncake::ep::bf16ToFloat(bias[token * a.hidden + channel]);
  }
}

// Adds up the rows' weights. One warp.
MC_DEVICE void addWeights(const CombineTokens& a, const Answer& answer, float* to) {
  const unsigned rows = __ballot_sync(kAllLanes, answer.row != nullptr);
  for (unsigned first = 0; first < a.weightCount; first += kLanes) {
    const unsigned weight = first + lane();
    float sum = 0;
    for (unsigned left = rows; left; left &= left - 1) {
      const int from = __ffs(int(left)) - 1;
      const uint64_t row = __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(answer.row), from);
      if (weight < a.weightCount)
        sum += reinterpret_cast<const float*>(row + weightsOfRowAt(a.hidden))[weight];
    }
    if (weight < a.weightCount) to[weight] = sum;
  }
}

// Adds up the rows of the block's tokens. Where there are few, several warps share a token.
MC_DEVICE void addAnswers(const CombineTokens& a, const GroupState& state, const Turn& turn,
                          uint64_t participants, unsigned block) {
  const Part piece = tokensOf(a.call, turn.number, a.call.tokens);
  const size_t tokens = piece.end - piece.begin;
  const size_t blocks = (a.hidden + kChannelsAtOnce - 1) / kChannelsAtOnce;
  size_t parts = tokens ? warps() / tokens : 1;
  if (parts > blocks) parts = blocks;
  if (parts == 0) parts = 1;
  for (size_t i = warpOf(block); i < tokens * parts; i += warps()) {
    const size_t token = piece.begin + i / parts, part = i % parts;
    bool isMissing = false;
    const Answer answer = answersOf(a, state, turn, participants, token, isMissing);
    addRows(a.hidden, answer, a.sums + token * 2 * a.hidden, part, parts,
            [&](float& sum, size_t channel) { addBiases(a, token, channel, sum); });
    if (part != 0) continue;
    addWeights(a, answer, a.weightSums + token * a.weightCount);
    if (lane() == 0) a.missing[token] = isMissing;
  }
}

MC_DEVICE void combineTokens(const CombineTokens& a) {
  MC_SHARED(PieceRows, rows);
  const auto togetherIn = [&](const Turn& turn) {
    Together found = together(*a.call.exchange.state, turn, a.dispatched->number);
    found.participants &= a.dispatched->participants;
    return found;
  };
  exchangeTokens(
      a.call, [&](const Turn& turn) { findRows(a, turn, rows); },
      [&](unsigned char* own, const Turn&, unsigned block) { publishAnswers(a, own, block, rows); },
      [&](Pushes& pushes, const Turn&, unsigned block) { pushAnswers(a, pushes, block, rows); },
      [&](const GroupState& state, const Turn& turn, unsigned block) {
        const Together with = togetherIn(turn);
        if (with.failure == uint32_t(Failure::kNone))
          addAnswers(a, state, turn, with.participants, block);
      },
      [&](const Turn& turn) {
        const Together with = togetherIn(turn);
        if (!succeeds(a.call.exchange, with)) return false;
        tellCaller(a.call.exchange, a.call.mask, with.participants);
        __syncthreads();
        return true;
      });
}

}  // namespace mooncake::kernels
