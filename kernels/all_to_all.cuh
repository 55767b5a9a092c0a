#pragma once

#include "kernels/all_to_all.h"
#include "kernels/exchange.cuh"

// all_to_all: each rank publishes a part of all its segments in each exchange, and in the first one
// a table of their places. A receiver copies its parts straight to its outputs.
namespace mooncake::kernels {

// Mixes the size of one pair's segment. The sums need not withstand an attack: a receiver trusts
// only its own sizes.
MC_DEVICE uint64_t splitHash(int from, int to, uint64_t bytes) {
  uint64_t x = (uint64_t(from) << 32 | unsigned(to)) * 0x9e3779b97f4a7c15u +
               bytes * 0xbf58476d1ce4e5b9u + 0x94d049bb133111ebu;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// The part of a segment that an exchange has.
MC_DEVICE Part stepOf(const Segment& segment, unsigned number) {
  const uint64_t begin = number * segment.step, end = begin + segment.step;
  return {begin < segment.bytes ? begin : segment.bytes, end < segment.bytes ? end : segment.bytes};
}

MC_DEVICE SplitTable& tableOf(const Turn& turn, int rank) {
  return *reinterpret_cast<SplitTable*>(turn.data[rank]);
}

MC_DEVICE void writeTable(const AllToAllArguments& a, const Turn& turn) {
  const GroupState& state = *a.exchange.state;
  SplitTable& table = *reinterpret_cast<SplitTable*>(bankAt(state, state.rank, turn.serial));
  for (int rank = int(threadIdx.x); rank < state.ranks; rank += int(blockDim.x)) {
    table.to[rank] = a.to[rank];
    table.from[rank] = a.from[rank];
  }
  if (threadIdx.x != 0) return;
  uint64_t sent = 0, received = 0;
  for (int rank = 0; rank < state.ranks; ++rank) {
    if (!has(turn.active, rank)) continue;
    sent += splitHash(state.rank, rank, a.to[rank].bytes);
    received += splitHash(rank, state.rank, a.from[rank]);
  }
  table.sent = sent;
  table.received = received;
  table.exchanges = a.exchanges;
}

MC_DEVICE void publishSegments(const AllToAllArguments& a, const Turn& turn, const Blocks& blocks) {
  const GroupState& state = *a.exchange.state;
  unsigned char* const own = bankAt(state, state.rank, turn.serial) + kTableBytes;
  for (unsigned block = blocks.first; block < blocks.end; ++block) {
    if (!blocks.publish(state, block, turn.number)) continue;
    if (turn.number == 0 && block == 0) writeTable(a, turn);
    for (unsigned i = 0; i < a.exchange.inputCount; ++i) {
      const Part step = stepOf(a.to[i], turn.number);
      const Part part = partOf(step.end - step.begin, block, gridDim.x, kPartBytes);
      copyBytes(own + a.to[i].place + part.begin, a.exchange.inputs[i] + step.begin + part.begin,
                part.end - part.begin);
    }
  }
  signalAll(a.exchange, turn, blocks, [&](Pushes& pushes, unsigned block) {
    const bool isRead = lane() == 0 && receives(a.exchange, turn, pushes.peer);
    const bool hasTable = turn.number == 0 && block == 0 && isRead;
    push(pushes, 0, 0, hasTable ? sizeof(SplitTable) : 0);
    const Segment& segment = a.to[pushes.peer];
    const Part step = stepOf(segment, turn.number);
    const Part part = partOf(step.end - step.begin, block, gridDim.x, kPartBytes);
    const size_t begin = kTableBytes + segment.place + part.begin;
    push(pushes, begin, begin, isRead ? part.end - part.begin : 0);
  });
}

// Shared memory of a block: the tables' entries for this rank.
struct Splits {
  Segment from[kMaxRanks];
  uint64_t sent[kMaxRanks], received[kMaxRanks];
  uint64_t exchanges[kMaxRanks];
  unsigned count;  // of the operation's exchanges
  bool doFit;
};

// Other ranks write the tables, so they are read with bounds: a segment has the size that this rank
// expects, and lies in the memory. All threads.
MC_DEVICE void readTables(const AllToAllArguments& a, const Turn& turn, Splits& splits) {
  constexpr uint64_t kMostExchanges = uint64_t(1) << 30;
  const GroupState& state = *a.exchange.state;
  const uint64_t room = state.bankBytes - kTableBytes;
  __syncthreads();
  for (int rank = int(threadIdx.x); rank < state.ranks; rank += int(blockDim.x)) {
    if (!has(turn.active, rank)) continue;
    const SplitTable& table = tableOf(turn, rank);
    const Segment given = table.to[state.rank];
    const bool isInside = given.place <= room && given.step <= room - given.place;
    splits.from[rank] =
        isInside ? Segment{a.from[rank], given.place, given.step} : Segment{0, 0, 0};
    splits.sent[rank] = table.sent;
    splits.received[rank] = table.received;
    splits.exchanges[rank] = table.exchanges;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    uint64_t sent = 0, received = 0, most = 1;
    for (int rank = 0; rank < state.ranks; ++rank) {
      if (!has(turn.active, rank)) continue;
      sent += splits.sent[rank];
      received += splits.received[rank];
      if (splits.exchanges[rank] > most) most = splits.exchanges[rank];
    }
    splits.doFit = sent == received;
    splits.count = !splits.doFit ? 1 : unsigned(most < kMostExchanges ? most : kMostExchanges);
  }
  __syncthreads();
}

// Copies the block's part of an exchange, beginning with the segment of the next rank: so ranks do
// not all read from the same one. Segments of lost ranks are filled with zeros.
MC_DEVICE void receiveSegments(const AllToAllArguments& a, const Turn& turn, const Splits& splits,
                               unsigned block) {
  const GroupState& state = *a.exchange.state;
  for (int i = 1; i <= state.ranks; ++i) {
    const int rank = (state.rank + i) % state.ranks;
    if (has(turn.active, rank)) {
      const Segment& segment = splits.from[rank];
      const Part step = stepOf(segment, turn.number);
      const Part part = partOf(step.end - step.begin, block, gridDim.x, kPartBytes);
      copyBytes(a.outputs[rank] + step.begin + part.begin,
                turn.data[rank] + kTableBytes + segment.place + part.begin, part.end - part.begin);
    } else if (turn.number == 0) {
      const Part part = partOf(a.from[rank], block, gridDim.x, kPartBytes);
      zeroBytes(a.outputs[rank] + part.begin, part.end - part.begin);
    }
  }
}

// Tells the host which splits do not fit. False: it has failed the group, because a graph's
// operation has no error of its own, or too many are untold. One thread.
MC_DEVICE bool tellMisfit(const Exchange& exchange, const Turn& turn) {
  GroupState& state = *exchange.state;
  HostWords& host = *state.host;
  const uint32_t count = host.misfitCount;
  if (exchange.isOfGraph || count - loadAcquireSystem(&host.misfitsTaken) == kMostMisfits) {
    failGroup(state, Failure::kSplits, state.rank);
    return false;
  }
  Misfit& misfit = host.misfits[count % kMostMisfits];
  misfit.call = state.calls + 1;
  misfit.count = 0;
  for (int from = 0; from < state.ranks; ++from) {
    for (int to = 0; to < state.ranks; ++to) {
      if (!has(turn.active, from) || !has(turn.active, to)) continue;
      const uint64_t sent = tableOf(turn, from).to[to].bytes;
      const uint64_t expected = tableOf(turn, to).from[from];
      if (sent != expected && misfit.count < kMisfitPairs)
        misfit.pairs[misfit.count++] = {sent, expected, from, to};
    }
  }
  storeReleaseSystem(&host.misfitCount, count + 1);
  return true;
}

// With splits that do not fit, the first exchange is the only one, and changes nothing.
MC_DEVICE void exchangeSegments(const AllToAllArguments& a) {
  MC_SHARED(Splits, splits);
  if (!beginBlock(a.exchange)) return;
  runExchange(
      a.exchange, 0,
      [&](const Turn& turn, const Blocks& blocks) { publishSegments(a, turn, blocks); },
      [&](const GroupState&, Turn& turn, unsigned block) {
        if (turn.number == 0) {
          readTables(a, turn, splits);
          turn.exchanges = splits.count;
        }
        if (splits.doFit) receiveSegments(a, turn, splits, block);
      },
      [&](const Turn& last) {
        return splits.doFit || threadIdx.x != 0 || tellMisfit(a.exchange, last);
      });
}

}  // namespace mooncake::kernels
