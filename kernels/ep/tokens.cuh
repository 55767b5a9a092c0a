#pragma once

#include "kernels/ep/common.cuh"
#include "kernels/ep/tokens.h"

// The common part of both kernels of the normal mode.
namespace mooncake::kernels {

constexpr size_t kTokenBytesAtOnce = 2048;  // of a row, by a warp

// The tokens of a rank in a piece.
MC_DEVICE Part tokensOf(const TokenCall& call, unsigned piece, size_t tokens) {
  const size_t begin = piece == 0 ? 0 : piece * call.step;
  if (begin >= tokens) return {tokens, tokens};
  return {begin, tokens - begin < call.step ? tokens : begin + call.step};
}

MC_DEVICE uint32_t* factsIn(unsigned char* own) { return reinterpret_cast<uint32_t*>(own + kLine); }
MC_DEVICE const uint32_t* factsOf(const Turn& turn, int rank) {
  return reinterpret_cast<const uint32_t*>(turn.data[rank] + kLine);
}

// Publishes the facts beside a rank's rows. One warp.
MC_DEVICE void publishFacts(const TokenCall& call, unsigned char* own, uint64_t dispatch,
                            Failure failure) {
  const uint64_t mask = ownMask(call.mask, call.exchange.state->ranks) & call.among;
  if (lane() != 0) return;
  *reinterpret_cast<RowsHeader*>(own) = {mask, dispatch, call.tokens, call.width,
                                         uint32_t(failure)};
}

// An operation with data that all ranks publish in each piece. `write(own, turn, block)` writes the
// block's part, and `push(pushes, turn, block)` pushes it to a remote rank, after `prepare(turn)` in
// each turn. The other parameters: see runExchange().
template <typename Prepare, typename Write, typename Push, typename Consume, typename Finish>
MC_DEVICE void exchangeTokens(const TokenCall& call, const Prepare& prepare, const Write& write,
                              const Push& push, const Consume& consume, const Finish& finish) {
  const Exchange& exchange = call.exchange;
  if (!beginBlock(exchange)) return;
  runExchange(
      exchange, 0,
      [&](const Turn& turn, const Blocks& blocks) {
        const GroupState& state = *exchange.state;
        unsigned char* const own = bankAt(state, state.rank, turn.serial);
        prepare(turn);
        for (unsigned block = blocks.first; block < blocks.end; ++block)
          if (blocks.publish(state, block, turn.number)) write(own, turn, block);
        signalAll(exchange, turn, blocks,
                  [&](Pushes& pushes, unsigned block) { push(pushes, turn, block); });
      },
      consume, finish);
}

}  // namespace mooncake::kernels
