#pragma once

#include "kernels/ep/tokens.cuh"

// The dispatch of the normal mode: each rank publishes its tokens' rows, and which ranks have them.
// Then each rank takes its own. Each row crosses once to each of its ranks, straight to its place; to
// ranks of another host it crosses once, and they take it there.
namespace mooncake::kernels {

// ---- publishing

MC_DEVICE size_t fieldAt(const DispatchTokens& a, unsigned field) {
  size_t at = 0;
  for (unsigned i = 0; i < field; ++i) at += toUnit(a.fields[i].bytes);
  return at;
}

MC_DEVICE void publishTokens(const DispatchTokens& a, unsigned char* own, const Turn& turn,
                             unsigned block) {
  const TokenCall& call = a.call;
  const Part piece = tokensOf(call, turn.number, call.tokens);
  const size_t tokens = piece.end - piece.begin;
  const Part part = partOf(tokens, block, gridDim.x, 1);
  unsigned char* const rows = own + tokenRowsAt(tokens, call.width);
  const unsigned warp = threadIdx.x / kLanes, warpsHere = blockDim.x / kLanes;
  for (unsigned i = 0; i < a.fieldCount; ++i) {
    const Field& field = a.fields[i];
    const size_t steps = (field.bytes + kTokenBytesAtOnce - 1) / kTokenBytesAtOnce;
    const size_t all = (part.end - part.begin) * steps, at = fieldAt(a, i);
    for (size_t k = warp; k < all; k += warpsHere) {
      const size_t token = part.begin + k / steps, begin = k % steps * kTokenBytesAtOnce;
      const size_t left = field.bytes - begin;
      copyByWarp(rows + token * call.rowBytes + at + begin,
                 field.from + (piece.begin + token) * field.bytes + begin,
                 left < kTokenBytesAtOnce ? left : kTokenBytesAtOnce);
    }
  }
  Choice* const choices = reinterpret_cast<Choice*>(own + tokenChoicesAt());
  for (size_t i = part.begin * call.width + threadIdx.x; i < part.end * call.width; i += blockDim.x)
    choices[i] = call.choices[piece.begin * call.width + i];
  if (block != gridDim.x - 1 || threadIdx.x >= kLanes) return;
  const unsigned ranks = unsigned(call.exchange.state->ranks);
  if (lane() < ranks) factsIn(own)[lane()] = uint32_t(a.counts[lane()]);
  if (lane() == 0) factsIn(own)[ranks] = uint32_t(a.capacity);
  publishFacts(call, own, a.earlier ? a.earlier->number : 0, Failure::kNone);
}

// Pushes the facts, the block's choices and its rows for the ranks of a remote host, if the remote
// rank receives this one's data for that host. One warp.
MC_DEVICE void pushTokens(const DispatchTokens& a, Pushes& pushes, const Turn& turn,
                          unsigned block) {
  const TokenCall& call = a.call;
  if (!receives(call.exchange, turn, pushes.peer)) return;
  const Part piece = tokensOf(call, turn.number, call.tokens);
  const size_t tokens = piece.end - piece.begin;
  const Part part = partOf(tokens, block, gridDim.x, 1);
  const size_t each = call.width * sizeof(Choice);
  const bool isFirst = lane() == 0;
  const size_t at = isFirst ? 0 : tokenChoicesAt() + part.begin * each;
  const size_t bytes = isFirst       ? (block == gridDim.x - 1 ? tokenChoicesAt() : 0)
                       : lane() == 1 ? (part.end - part.begin) * each
                                     : 0;
  push(pushes, at, at, bytes);
  const uint64_t there = turn.active & pushes.state.remote.hosts[pushes.peer];
  pushRows(pushes, tokenRowsAt(tokens, call.width), call.rowBytes, part, [&](size_t token) {
    bool isWanted = false;
    for (unsigned i = 0; i < call.width; ++i) {
      const int32_t rank = call.choices[(piece.begin + token) * call.width + i].expert;
      isWanted |= rank >= 0 && rank < pushes.state.ranks && has(there, rank);
    }
    return isWanted;
  });
}

// ---- taking

MC_DEVICE Together togetherIn(const DispatchTokens& a, const Turn& turn) {
  Together found = together(*a.call.exchange.state, turn, a.earlier ? a.earlier->number : 0);
  if (a.earlier) found.participants &= a.earlier->participants;
  return found;
}

// The places of the rows of each rank: [begin, begin + count).
struct Arrivals {
  uint32_t begin[kMaxRanks];
  uint32_t count[kMaxRanks];  // 0: the rank takes no part
  uint32_t end;               // behind all of them
};

// All threads of a block.
MC_DEVICE void findArrivals(const DispatchTokens& a, const GroupState& state, const Turn& turn,
                            uint64_t participants, Arrivals& found) {
  if (threadIdx.x < kLanes) {
    const unsigned rank = lane(), ranks = unsigned(state.ranks);
    const bool isIn = rank < ranks && has(participants, int(rank)) && has(participants, state.rank);
    uint32_t count = isIn ? factsOf(turn, int(rank))[state.rank] : 0;
    uint32_t end = sumUpTo(count), begin = end - count;
    if (a.earlier && rank < ranks) {
      begin = rank == 0 ? 0 : uint32_t(a.earlierEnds[rank - 1]);
      end = uint32_t(a.earlierEnds[rank]);
      if (count > end - begin) count = end - begin;
    }
    if (rank < ranks) {
      found.begin[rank] = begin;
      found.count[rank] = count;
    }
    if (rank == ranks - 1) found.end = end;
  }
  __syncthreads();
}

MC_DEVICE void zeroRow(const DispatchTokens& a, size_t row) {
  for (unsigned i = 0; i < a.fieldCount; ++i) {
    const Field& field = a.fields[i];
    for (size_t at = lane(); at < field.bytes; at += kLanes) field.to[row * field.bytes + at] = 0;
  }
  if (a.sources && lane() == 0) a.sources[row] = 0;
}

// Fills the places that no row takes.
MC_DEVICE void zeroRows(const DispatchTokens& a, const Arrivals& found, unsigned ranks,
                        unsigned block) {
  for (unsigned rank = 0; rank <= ranks; ++rank) {
    const size_t begin = rank < ranks ? found.begin[rank] + found.count[rank] : found.end;
    const size_t next = rank + 1 < ranks ? found.begin[rank + 1]
                        : rank < ranks   ? found.end
                                         : a.capacity;
    for (size_t row = begin + warpOf(block); row < next && row < a.capacity; row += warps())
      zeroRow(a, row);
  }
}

// Takes the rows that a rank has for this one. Each warp looks at 32 choices at a time; `before` of
// the kernel's warps have had their turn.
MC_DEVICE size_t takeTokens(const DispatchTokens& a, const GroupState& state, const Turn& turn,
                            const Arrivals& found, int source, unsigned block, size_t before) {
  const TokenCall& call = a.call;
  const unsigned char* const theirs = turn.data[source];
  const RowsHeader& about = headerOf(turn, source);
  // Read over the wire, so only once. If this rank is out, these may be another operation's. Lanes
  // must not find different numbers then, and no number may lead astray.
  const size_t all = ofFirstLane(about.tokens), width = ofFirstLane(about.topk);
  const Part piece = tokensOf(call, turn.number, all);
  const size_t tokens = piece.end - piece.begin, room = bankBytesOf(state, source);
  const bool areSound = width == call.width && tokens <= room / call.rowBytes &&
                        tokenRowsAt(tokens, width) + tokens * call.rowBytes <= room;
  const size_t choices = areSound ? tokens * width : 0;
  const Choice* const chosen = reinterpret_cast<const Choice*>(theirs + tokenChoicesAt());
  const unsigned char* const rows = theirs + tokenRowsAt(tokens, width);
  const size_t groups = (choices + kLanes - 1) / kLanes, step = warps();
  for (size_t group = firstItem(block, before); group < groups; group += step) {
    const size_t place = group * kLanes + lane();
    Choice choice{kNone, 0};
    if (place < choices) choice = chosen[place];
    const size_t row = size_t(found.begin[source]) + choice.index;
    const bool isOurs =
        choice.expert == state.rank && choice.index < found.count[source] && row < a.capacity;
    if (isOurs && a.sources) a.sources[row] = int32_t(piece.begin + place / width);
    for (unsigned ours = __ballot_sync(kAllLanes, isOurs); ours; ours &= ours - 1) {
      const int from = __ffs(int(ours)) - 1;
      const unsigned char* const sent =
          rows + (group * kLanes + unsigned(from)) / width * call.rowBytes;
      const size_t at = __shfl_sync(kAllLanes, uint64_t(row), from);
      for (unsigned i = 0; i < a.fieldCount; ++i) {
        const Field& field = a.fields[i];
        copyByWarp(field.to + at * field.bytes, sent + fieldAt(a, i), field.bytes);
      }
    }
  }
  return groups;
}

// ---- results

// Whether a rank gets more rows than it takes: then nobody has a result. All threads of a block.
MC_DEVICE Together withRoom(const GroupState& state, const Turn& turn, Together found) {
  MC_SHARED(Together, shared);
  if (threadIdx.x < kLanes) {
    const int rank = int(lane());
    bool isFull = false;
    if (found.failure == uint32_t(Failure::kNone) && rank < state.ranks &&
        has(found.participants, rank)) {
      size_t rows = 0;
      for (int source = 0; source < state.ranks; ++source)
        if (has(found.participants, source)) rows += factsOf(turn, source)[rank];
      isFull = rows > factsOf(turn, rank)[state.ranks];
    }
    const unsigned full = __ballot_sync(kAllLanes, isFull);
    if (full) found = {found.participants, uint32_t(Failure::kNoPlace), __ffs(int(full)) - 1};
    // After the loads, as in together().
    if (full && isOut(state)) found = {0, uint32_t(Failure::kOut), state.rank};
    if (rank == 0) shared = found;
  }
  __syncthreads();
  return shared;
}

// All threads of the last block.
MC_DEVICE void writeFacts(const DispatchTokens& a, const GroupState& state, const Turn& turn,
                          const Arrivals& found, uint64_t participants) {
  const int ranks = state.ranks;
  for (int i = int(threadIdx.x); i < ranks * (ranks + 1); i += int(blockDim.x)) {
    const int rank = i / (ranks + 1), of = i % (ranks + 1);
    uint32_t number = 0;
    if (has(participants, rank) && has(participants, state.rank)) {
      number = of < ranks ? factsOf(turn, rank)[of] : headerOf(turn, rank).tokens;
    }
    a.table[i] = int32_t(number);
  }
  if (int(threadIdx.x) < ranks)
    a.ends[threadIdx.x] = int32_t(found.begin[threadIdx.x] + found.count[threadIdx.x]);
  if (threadIdx.x == 0) *a.dispatched = {state.done + 1, participants};
}

MC_DEVICE void dispatchTokens(const DispatchTokens& a) {
  MC_SHARED(Arrivals, arrivals);
  exchangeTokens(
      a.call, [](const Turn&) {},
      [&](unsigned char* own, const Turn& turn, unsigned block) {
        publishTokens(a, own, turn, block);
      },
      [&](Pushes& pushes, const Turn& turn, unsigned block) { pushTokens(a, pushes, turn, block); },
      [&](const GroupState& state, const Turn& turn, unsigned block) {
        const Together with = togetherIn(a, turn);
        if (with.failure != uint32_t(Failure::kNone)) return;
        findArrivals(a, state, turn, with.participants, arrivals);
        if (turn.number == 0) zeroRows(a, arrivals, unsigned(state.ranks), block);
        if (!has(with.participants, state.rank)) return;
        size_t groups = 0;
        for (int rank = 0; rank < state.ranks; ++rank)
          if (has(with.participants, rank))
            groups += takeTokens(a, state, turn, arrivals, rank, block, groups);
      },
      [&](const Turn& turn) {
        const GroupState& state = *a.call.exchange.state;
        const Together with = withRoom(state, turn, togetherIn(a, turn));
        if (!succeeds(a.call.exchange, with)) return false;
        tellCaller(a.call.exchange, a.call.mask, with.participants);
        if (!a.earlier) {
          findArrivals(a, state, turn, with.participants, arrivals);
          writeFacts(a, state, turn, arrivals, with.participants);
        }
        __syncthreads();
        return true;
      });
}

}  // namespace mooncake::kernels
