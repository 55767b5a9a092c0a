"""Defects of the kernels of the normal mode, for mutants.py: name, file, text, replacement."""

from __future__ import annotations

TOKENS, DISPATCH, COMBINE = "ep/tokens.cuh", "ep/dispatch_tokens.cuh", "ep/combine_tokens.cuh"
MUTANTS = [
    # Both operations
    (
        "a piece begins at the first token",
        TOKENS,
        "piece == 0 ? 0 : piece * call.step;",
        "0;",
    ),
    (
        "the call's active ranks are ignored",
        TOKENS,
        "ownMask(call.mask, call.exchange.state->ranks) & call.among",
        "ownMask(call.mask, call.exchange.state->ranks)",
    ),
    (
        "masks are ignored",
        TOKENS,
        "ownMask(call.mask, call.exchange.state->ranks) & call.among",
        "call.among",
    ),
    (
        "facts are those of the first rank",
        TOKENS,
        "turn.data[rank] + kLine",
        "turn.data[rank > 0 ? 0 : rank] + kLine",
    ),
    # Dispatch
    (
        "fields lie one over the other",
        DISPATCH,
        "at += toUnit(a.fields[i].bytes);",
        "at = toUnit(a.fields[i].bytes);",
    ),
    (
        "choices of a piece are those of the first one",
        DISPATCH,
        "call.choices[piece.begin * call.width + i]",
        "call.choices[i]",
    ),
    (
        "rows of a piece are those of the first one",
        DISPATCH,
        "field.from + (piece.begin + token) * field.bytes",
        "field.from + token * field.bytes",
    ),
    (
        "the earlier dispatch's ranks are forgotten",
        DISPATCH,
        "if (a.earlier) found.participants &= a.earlier->participants;",
        "",
    ),
    (
        "counts are those for another rank",
        DISPATCH,
        "factsOf(turn, int(rank))[state.rank] : 0",
        "factsOf(turn, int(rank))[0] : 0",
    ),
    (
        "earlier places are ignored",
        DISPATCH,
        "if (a.earlier && rank < ranks) {",
        "if (false) {",
    ),
    (
        "no barrier behind the places",
        DISPATCH,
        "found.end = end;\n  }\n  __syncthreads();",
        "found.end = end;\n  }",
    ),
    (
        "rows behind the last are left as they are",
        DISPATCH,
        "if (turn.number == 0) zeroRows(",
        "if (false) zeroRows(",
    ),
    (
        "the last place is not filled with zeros",
        DISPATCH,
        "row < a.capacity; row += warps())\n      zeroRow",
        "row + 1 < a.capacity; row += warps())\n      zeroRow",
    ),
    (
        "a source is a token's number in its piece",
        DISPATCH,
        "int32_t(piece.begin + place / width)",
        "int32_t(place / width)",
    ),
    (
        "rows of others are taken",
        DISPATCH,
        "choice.expert == state.rank &&",
        "choice.expert >= 0 &&",
    ),
    (
        "too many rows are not noticed",
        DISPATCH,
        "isFull = rows > factsOf(",
        "isFull = rows > 1 + factsOf(",
    ),
    (
        "a warp takes the turn of others",
        DISPATCH,
        "firstItem(block, before)",
        "(warpOf(block) + before) % step + 1",
    ),
    # Combine
    (
        "the first row of a piece is the one behind",
        COMBINE,
        "size_t(sources[middle]) < token",
        "size_t(sources[middle]) <= token",
    ),
    (
        "all pieces have all rows' places",
        COMBINE,
        "place - (rows.first[lane()] - rows.begin[lane()])",
        "place",
    ),
    (
        "rows of another rank are added",
        COMBINE,
        "factsOf(turn, choice.expert)[state.rank] + choice.index",
        "factsOf(turn, choice.expert)[choice.expert] + choice.index",
    ),
    (
        "biases are those of the first token",
        COMBINE,
        "bias[token * a.hidden + channel]",
        "bias[channel]",
    ),
    (
        "biases are added twice",
        COMBINE,
        "sum += mooncake::ep::bf16ToFloat(bias",
        "sum += 2 * mooncake::ep::bf16ToFloat(bias",
    ),
    (
        "the second bias is left out",
        COMBINE,
        "i < kMostBiases; ++i",
        "i < 1; ++i",
    ),
    (
        "weights are added in the reverse order",
        COMBINE,
        "left; left &= left - 1) {\n      const int from = __ffs(int(left)) - 1;",
        "left; left &= ~(1u << (31 - __clz(int(left))))) {\n"
        "      const int from = 31 - __clz(int(left));",
    ),
    (
        "the dispatch's ranks are forgotten",
        COMBINE,
        "found.participants &= a.dispatched->participants;",
        "",
    ),
    ("another dispatch's rows are combined", COMBINE, "own, a.dispatched->number,", "own, 1,"),
    (
        "a lack of room is not told",
        COMBINE,
        "rows.most <= room",
        "true",
    ),
    (
        "no barrier behind the rows' places",
        COMBINE,
        "found.mostOfOne : largest;\n    }\n  }\n  __syncthreads();",
        "found.mostOfOne : largest;\n    }\n  }",
    ),
    (
        "a lack of room in an earlier piece is forgotten",
        COMBINE,
        "piece > 0 && found.most > behind ? found.most : behind",
        "behind",
    ),
    # Ranks on other hosts
    (
        "only the receiver's own rows cross",
        DISPATCH,
        "has(there, rank);",
        "rank == pushes.peer;",
    ),
    (
        "rows cross to each rank of a host",
        DISPATCH,
        "  if (!receives(call.exchange, turn, pushes.peer)) return;\n",
        "",
    ),
    (
        "facts are pushed before they are written",
        DISPATCH,
        "(block == gridDim.x - 1 ? tokenChoicesAt() : 0)",
        "(block == 0 ? tokenChoicesAt() : 0)",
    ),
    (
        "a remote rank's rows have the places of published memory",
        COMBINE,
        "has(state.remote.ranks, int(lane())) ? 0 : rows.place[lane()]",
        "rows.place[lane()]",
    ),
    (
        "rows are pushed before other blocks have written them",
        COMBINE,
        "commonOf(partOf(rows.end, block, gridDim.x, 1),",
        "commonOf({0, rows.end},",
    ),
    (
        "a lack of room in an inbox is not told",
        COMBINE,
        "rows.mostOfOne <= roomThere(state, call)",
        "true",
    ),
    (
        "a lack of room in an inbox in an earlier piece is forgotten",
        COMBINE,
        "piece > 0 && found.mostOfOne > largest ? found.mostOfOne : largest",
        "largest",
    ),
]
