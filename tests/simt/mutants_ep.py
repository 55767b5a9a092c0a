"""Defects of the kernels for experts, for mutants.py: name, file, text, and its replacement."""

from __future__ import annotations

COMMON, DISPATCH, COMBINE = "ep/common.cuh", "ep/dispatch.cuh", "ep/combine.cuh"
TWO_KERNELS, EXCHANGE, GROUP = "two_kernels.cuh", "exchange.cuh", "group.cuh"
MUTANTS = [
    # Two kernels
    (
        "the first kernel writes into the wrong bank",
        TWO_KERNELS,
        "write(bankAt(state, state.rank, turn.serial), blockIdx.x);",
        "write(bankAt(state, state.rank, turn.serial + 1), blockIdx.x);",
    ),
    (
        "a redone operation is not signalled",
        TWO_KERNELS,
        "if (blocks.areRedone) signalAll(exchange, turn, blocks, [](Pushes&, unsigned) {});",
        "",
    ),
    (
        "the second kernel runs in a group that has ended",
        TWO_KERNELS,
        "if (exchange.state->failed) return;",
        "",
    ),
    # Ranks that are late
    (
        "the host hears of no operation that waits",
        TWO_KERNELS,
        "storeReleaseSystem(&host.waits, exchange.state->done + 1);",
        "",
    ),
    (
        "a skipped rank waits for the others",
        EXCHANGE,
        "bool isReady = !takesPart || (hasData",
        "bool isReady = (hasData",
    ),
    (
        "a skipped rank takes part",
        GROUP,
        "return number <= state.skipped ? active & ~(uint64_t(1) << state.rank) : active;",
        "return active;",
    ),
    (
        "late ranks take part",
        GROUP,
        "number == state.partial ? state.among : state.active",
        "state.active",
    ),
    (
        "late ranks are skipped for good",
        GROUP,
        "number == state.partial ? state.among",
        "number >= state.partial && state.partial ? state.among",
    ),
    (
        "a skipped rank reads the others' choices",
        COMMON,
        "if (!has(turn.active, state.rank)) return {turn.active,",
        "if (false) return {turn.active,",
    ),
    (
        "a rank does not tell where it has stopped",
        GROUP,
        "host.stoppedAt = progress.stoppedAt;",
        "",
    ),
    # Both operations
    ("other ranks' masks are ignored", COMMON, "      mask = theirs.mask;\n", ""),
    (
        "the caller's active ranks are ignored",
        COMMON,
        "(!mask.ranks || mask.ranks[lane()] != 0)",
        "true",
    ),
    (
        "a block overwrites what its threads still read",
        COMMON,
        "  __syncthreads();  // the block may still use the facts of an earlier call\n",
        "",
    ),
    ("waits are not added up", COMMON, "waited[rank] += int64_t", "waited[rank] = int64_t"),
    # Dispatch
    ("no barrier after the counts are zeros", DISPATCH, "= 0;\n    __syncthreads();", "= 0;"),
    (
        "a lap counts before the warp has read",
        DISPATCH,
        "    __syncwarp();\n    if (isChosen && before == 0)",
        "    if (isChosen && before == 0)",
    ),
    (
        "the next lap reads before the warp has counted",
        DISPATCH,
        "    __syncwarp();\n    if (!isIn ||",
        "    if (!isIn ||",
    ),
    (
        "a block's numbers begin at its own tokens",
        DISPATCH,
        "for (size_t begin = 0; begin < end * chosen.topk;",
        "for (size_t begin = first * chosen.topk; begin < end * chosen.topk;",
    ),
    ("equal choices in a lap have one number", DISPATCH, "count + before}", "count}"),
    (
        "rows of ranks that take no part have places",
        DISPATCH,
        "    if (!has(participants, rank)) continue;\n",
        "",
    ),
    (
        "packed scales are in the wrong order",
        DISPATCH,
        "scales[4 * word + i])) << (8 * i)",
        "scales[4 * word + i])) << (8 * (3 - i))",
    ),
    (
        "counts replace those of the caller",
        DISPATCH,
        "a.addedCounts[local] +=",
        "a.addedCounts[local] =",
    ),
    # Combine
    (
        "the ranks of the dispatch are forgotten",
        COMBINE,
        "found.participants &= a.dispatched->participants;",
        "",
    ),
    ("another dispatch's rows are combined", COMBINE, "{mask, a.dispatched->number,", "{mask, 1,"),
    ("another expert's rows are combined", COMBINE, "expert == choices[i].expert", "true"),
    (
        "all ranks' rows begin at the first",
        COMBINE,
        "if (!isRemote) row += firstRows[local * ranks + size_t(state.rank)];",
        "",
    ),
    (
        "dropped choices are added",
        COMBINE,
        "choice.expert != kNone && chosenAt(a.chosen, place) != kNone",
        "choice.expert != kNone",
    ),
    (
        "weights are divided by those of all choices",
        COMBINE,
        "int(isHere), int(i))) arrived",
        "int(isWanted), int(i))) arrived",
    ),
    (
        "rows are added in another order",
        COMBINE,
        "for (unsigned i = 0; i < count && channel < hidden; ++i)",
        "for (unsigned i = count; i-- > 0 && channel < hidden;)",
    ),
    (
        "a part of a token begins at the first block",
        COMBINE,
        "answer.row && block < first; ++block",
        "false; ++block",
    ),
    (
        "a warp takes the turn of others",
        COMBINE,
        "firstItem(block, before)",
        "(warpOf(block) + before) % all + 1",
    ),
]
