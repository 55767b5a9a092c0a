"""Plants a defect in a copy of the kernels, one at a time, and runs their suites. Each must fail.

tests/simt/run.sh mutants
With --texts, only checks that each defect has its place in the kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mutants_ep
import mutants_proxy
import mutants_remote
import mutants_tokens

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
COMPILER = os.environ.get("CXX", "clang++")
FLAGS = ["-std=c++20", "-O1", "-g", "-ffp-contract=off", "-w"]
BY_FLAVOUR = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


@dataclass
class Mutant:
    name: str
    file: str
    old: str
    new: str
    suite: str = "collectives"


ARRIVAL, EXCHANGE, PUBLISH = "arrival.cuh", "exchange.cuh", "publish.cuh"
GROUP, COLLECTIVES = "group.cuh", "collectives.cuh"
COPY, PIECES, SIGNALS = "copy.cuh", "pieces.cuh", "signals.cuh"
COPY_ROWS = "copy_rows.cuh"
SPLITS = "all_to_all.cuh"
STATE = "group_state.h"
NEXT = """    const Turn next = hasData ? after(turn) : turn;
    if (takesPart && published <= next.number && (!hasData || isAhead(exchange, next))) {"""
SIGNAL = """      storeReleaseSystem(&state.signals[peer]->words[block][state.rank],"""
OUT = "if (has(out, rank)) storeReleaseSystem(&state.signals[rank]->isOut, 1);"
MUTANTS = [
    Mutant(
        "counts are not bounded",
        COPY_ROWS,
        "uint32_t(count) < a.rows ? uint32_t(count) : a.rows;",
        "uint32_t(count);",
        "copy_rows",
    ),
    Mutant(
        "counts are read before all are there",
        COPY_ROWS,
        "    }\n    __syncthreads();\n    for (uint32_t i = 0; i < here * a.blocksEach",
        "    }\n    for (uint32_t i = 0; i < here * a.blocksEach",
        "copy_rows",
    ),
    Mutant(
        "counts change while they are used",
        COPY_ROWS,
        "    __syncthreads();\n    for (uint32_t i = threadIdx.x",
        "    for (uint32_t i = threadIdx.x",
        "copy_rows",
    ),
    Mutant(
        "each block has a count of its own",
        COPY_ROWS,
        "counts.of[i / a.blocksEach]",
        "counts.of[i % here]",
        "copy_rows",
    ),
    Mutant("the signal is relaxed", PUBLISH, SIGNAL, SIGNAL.replace("Release", "Relaxed")),
    Mutant("the signal has device scope", PUBLISH, SIGNAL, SIGNAL.replace("System", "Device")),
    Mutant(
        "the wait is relaxed",
        ARRIVAL,
        ": loadAcquireSystem(word);",
        ": loadRelaxedSystem(word);",
    ),
    Mutant(
        "one bank for all exchanges",
        PUBLISH,
        "bankOf(serial, state.banks) * state.bankBytes",
        "0",
    ),
    Mutant(
        "two banks in place of three", STATE, "serial % 2 : serial % 3", "serial % 2 : serial % 2"
    ),
    Mutant(
        "a piece is published ahead of the data of the one before",
        EXCHANGE,
        NEXT,
        NEXT.replace("hasData ?", "published > turn.number ?").replace(
            "!hasData ||", "next.number == turn.number ||"
        ),
    ),
    Mutant(
        "segments are published before they are reduced",
        PIECES,
        "turn.number < turn.exchanges &&\n         !gathersSegments(exchange, turn);",
        "turn.number < turn.exchanges;",
    ),
    Mutant(
        "no barrier before the signal",
        PUBLISH,
        "  __syncthreads();\n  // Before the signals",
        "  // Before the signals",
    ),
    Mutant(
        "waits for the signals of one block only",
        ARRIVAL,
        "signals = gridDim.x * ranks;",
        "signals = ranks;",
    ),
    Mutant(
        "no barrier before the block has ended",
        EXCHANGE,
        "consume(state, turn, block);\n      __syncthreads();",
        "consume(state, turn, block);",
    ),
    Mutant(
        "the count of ended blocks is relaxed",
        EXCHANGE,
        "mine + addAcqRelDevice",
        "mine + addRelaxedDevice",
    ),
    Mutant(
        "the count of ended blocks is kept",
        EXCHANGE,
        "  if (threadIdx.x == 0) storeRelaxedDevice(&state.arrived, 0);\n",
        "",
    ),
    Mutant(
        "the host's decision is read relaxed",
        GROUP,
        "loadAcquireSystem(&host.decided)",
        "loadRelaxedSystem(&host.decided)",
    ),
    Mutant(
        "the stop is told relaxed",
        GROUP,
        "storeReleaseSystem(&host.stopped",
        "storeRelaxedSystem(&host.stopped",
    ),
    Mutant(
        "the stop is told before the ranks",
        GROUP,
        "  host.hadAll = progress.hadAll;\n  storeReleaseSystem(&host.stopped, next);",
        "  storeReleaseSystem(&host.stopped, next);\n  host.hadAll = progress.hadAll;",
    ),
    Mutant(
        "a call's end is told ahead of its misfit",
        GROUP,
        "storeReleaseSystem(&state.host->calls",
        "storeRelaxedSystem(&state.host->calls",
        suite="splits",
    ),
    Mutant(
        "a rank that is out has a result",
        EXCHANGE,
        "hasSucceeded && isOut(state)",
        "false",
    ),
    *(
        Mutant("ranks that are out are never told", GROUP, OUT, ";", suite=suite)
        for suite in ("collectives", "ep", "tokens")
    ),
    Mutant("the decision changes no ranks", GROUP, "  state.active = active;\n", ""),
    Mutant(
        "the host learns a wrong moment of a change",
        GROUP,
        "{state.done + takes,",
        "{state.done,",
    ),
    Mutant(
        "a call without its root has a result",
        EXCHANGE,
        "exchange.root < 0 || has(turn.active, exchange.root)",
        "true",
    ),
    Mutant(
        "takes with the new ranks",
        EXCHANGE,
        "consume(state, turn, block);",
        "turn.active = state.active, consume(state, turn, block);",
    ),
    Mutant(
        "goes on with blocks that have ended before",
        EXCHANGE,
        "blocks = {0, gridDim.x, true, false};",
        "blocks = {0, 1, true, false};",
    ),
    Mutant(
        "only the exchanges that are left are redone",
        EXCHANGE,
        "turn = {state.serial + 1, 0, activeIn(state), exchangesOf(exchange), shared.data};",
        "turn = {state.serial + 1 + turn.number, turn.number, activeIn(state), turn.exchanges, "
        "shared.data};",
    ),
    Mutant(
        "stopped blocks' later parts are not published",
        PUBLISH,
        "|| state.published[block] <= exchange;",
        ";",
    ),
    Mutant(
        "goes on with the exchange of the last block",
        EXCHANGE,
        "number = leastProgress(state);",
        "number = state.progress[blockIdx.x];",
    ),
    Mutant(
        "redone pieces have the old serial numbers",
        GROUP,
        "    state.serial = loadRelaxedSystem(&host.serial);\n",
        "",
    ),
    Mutant("results are not kept apart", COLLECTIVES, "exchange.scratch ? exchange.scratch :", ""),
    Mutant(
        "no deadline without a host",
        GROUP,
        "    if (now() > deadline) {\n      failGroup",
        "    if (false) {\n      failGroup",
    ),
    Mutant(
        "a kernel runs in a group that has ended",
        EXCHANGE,
        "  if (!exchange.state->failed) return true;",
        "  return true;",
    ),
    Mutant(
        "a replay does not wait for a stop between two operations",
        GROUP,
        "while (entered & kHeld) {",
        "while (false) {",
    ),
    Mutant(
        "a stop between two operations does not wait for a replay",
        COLLECTIVES,
        "if (loadAcquireDevice(&state.entered) != 0) return false;",
        "return addAcqRelDevice(&state.entered, kHeld) + 1;",
    ),
    Mutant("a replay is counted as a call", GROUP, "if (!exchange.isOfGraph) store", "store"),
    Mutant(
        "calls are not compared",
        PUBLISH,
        "return serial << kCallBits | (exchange.call & ((1u << kCallBits) - 1));",
        "return serial << kCallBits;",
    ),
    Mutant(
        "the sum leaves out the last rank",
        COLLECTIVES,
        "while (++rank < state.ranks) {",
        "while (++rank < state.ranks - 1) {",
    ),
    Mutant(
        "a two-shot operation has one exchange for each piece",
        PIECES,
        "exchange.isTwoShot ? 2 * exchange.pieces : exchange.pieces",
        "exchange.pieces",
    ),
    Mutant(
        "a segment is reduced in the bank of the inputs",
        COLLECTIVES,
        "published(state, state.rank, turn.serial + 1)",
        "published(state, state.rank, turn.serial)",
    ),
    Mutant(
        "an input is published over a segment",
        PUBLISH,
        "gathersSegments(exchange, turn) ? blocks.first : blocks.end",
        "blocks.end",
    ),
    Mutant(
        "lost ranks have segments",
        COLLECTIVES,
        "const unsigned count = unsigned(countOf(turn.active));",
        "const unsigned count = unsigned(state.ranks);",
    ),
    Mutant(
        "parts overlap at their ends",
        COLLECTIVES,
        "for (size_t i = end + threadIdx.x; i < all;",
        "for (size_t i = end + threadIdx.x; i < all + 1;",
    ),
    Mutant("lost ranks' places keep old contents", COLLECTIVES, "zeroBytes(target, bytes)", ""),
    Mutant("the rest of a copy is left out", COPY, "bytes - copied", "0"),
    Mutant(
        "a rank's signal is relaxed",
        SIGNALS,
        "storeReleaseSystem(theirs, 1)",
        "storeRelaxedSystem(theirs, 1)",
        "signals",
    ),
    Mutant(
        "the wait for a rank's signal is relaxed",
        SIGNALS,
        "loadAcquireSystem(word) != value",
        "loadRelaxedSystem(word) != value",
        "signals",
    ),
    Mutant(
        "a signal overtakes the one before",
        SIGNALS,
        "if (!awaitWord(a, theirs, 0, peer)) return;",
        "",
        "signals",
    ),
    Mutant(
        "a signal is taken twice",
        SIGNALS,
        "storeReleaseSystem(ours, 0)",
        "(void)ours",
        "signals",
    ),
]


MUTANTS += [
    Mutant(name, SPLITS, old, new, "splits")
    for name, old, new in [
        ("splits are not compared", "sent == received;", "true;"),
        ("a rank's own splits are compared", "sent += splits.sent[rank];", "sent = received;"),
        (
            "lost ranks' splits are compared",
            "if (!has(turn.active, rank)) continue;\n    sent += splitHash",
            "sent += splitHash",
        ),
        (
            "exchanges end with the own input",
            "if (splits.exchanges[rank] > most) most = splits.exchanges[rank];",
            "most = a.exchanges;",
        ),
        (
            "redone tables are not written",
            "if (turn.number == 0 && block == 0) writeTable",
            "if (turn.number == 0 && block == 0 && !blocks.areRedone) writeTable",
        ),
        (
            "a stopped block writes no table for the others",
            "if (turn.number == 0 && block == 0) writeTable",
            "if (turn.number == 0 && block == 0 && !blocks.areStopped) writeTable",
        ),
        ("each exchange has the first part", "number * segment.step, end", "0, end"),
        (
            "segments of lost ranks keep old contents",
            "zeroBytes(a.outputs[rank] + part.begin, part.end - part.begin);",
            "",
        ),
        ("places are read without bounds", "isInside ? Segment", "true ? Segment"),
        (
            "sizes of other ranks are trusted",
            "Segment{a.from[rank],",
            "Segment{given.bytes,",
        ),
        ("splits that do not fit are received", "if (splits.doFit) receive", "receive"),
        (
            "misfits that the host has not taken are overwritten",
            " || count - loadAcquireSystem(&host.misfitsTaken) == kMostMisfits",
            "",
        ),
        ("a misfit is of the call before", "state.calls + 1;", "state.calls;"),
        (
            "tables are read while other threads use them",
            "kTableBytes;\n  __syncthreads();",
            "kTableBytes;",
        ),
        (
            "no barrier after the tables",
            ";\n  }\n  __syncthreads();\n}\n\n// Copies",
            ";\n  }\n}\n\n// Copies",
        ),
    ]
]
MUTANTS += [Mutant(*one, suite="ep") for one in mutants_ep.MUTANTS]
MUTANTS += [Mutant(*one, suite="tokens") for one in mutants_tokens.MUTANTS]
MUTANTS += [Mutant(*one, suite="proxy") for one in mutants_proxy.MUTANTS]
MUTANTS += [Mutant(*one, suite=suite) for suite, *one in mutants_remote.MUTANTS]

# Their sources, beside races.cc.
GROUP_SOURCES = [
    "virtual_group.cc",
    "virtual_proxy.cc",
    "../../../csrc/collectives/peer/peer_verdict.cc",
    "../../../csrc/proxy/command_ring.cc",
]
SUITES = {
    "collectives": ["collectives_test.cc", "collective_program.cc", *GROUP_SOURCES],
    "ep": ["ep_test.cc", "ep_program.cc", "ep_plan.cc", "ep_reference.cc", *GROUP_SOURCES],
    "hosts": ["hosts_test.cc", "collective_program.cc", *GROUP_SOURCES],
    "proxy": ["proxy_test.cc", "../../../csrc/proxy/command_ring.cc"],
    "signals": ["signals_test.cc"],
    "copy_rows": ["copy_rows_test.cc"],
    "tokens": [
        "token_test.cc",
        "token_program.cc",
        "token_plan.cc",
        "token_reference.cc",
        "ep_reference.cc",
        *GROUP_SOURCES,
    ],
    "splits": ["splits_test.cc", "splits_program.cc", *GROUP_SOURCES],
}


def run(flavour: str, folder: Path, suite: str) -> bool:
    """True if the suite fails."""
    tests = ROOT / "tests/simt/tests"
    sources = [tests / name for name in [*SUITES[suite], "races.cc"]]
    program = folder / flavour
    command = [
        COMPILER,
        *FLAGS,
        *BY_FLAVOUR[flavour],
        *(f"-I{include}" for include in (folder, ROOT, ROOT / "csrc", tests)),
        *map(str, sources),
        str(BUILD / "simt-plain/libsimt.a"),  # the same for all flavours
        *("-lgtest", "-lgtest_main", "-lpthread"),
        *("-o", str(program)),
    ]
    subprocess.run(command, check=True)
    env = {**os.environ, "TSAN_OPTIONS": f"log_path={folder}/races"}
    done = subprocess.run([str(program), "--gtest_fail_fast"], env=env, capture_output=True)
    return done.returncode != 0


def unplaced() -> list[str]:
    """The mutants whose text is not in its file exactly once."""
    return [
        f"{one.name}: its text is not in {one.file} once"
        for one in MUTANTS
        if (ROOT / "kernels" / one.file).read_text().count(one.old) != 1
    ]


def survives(numbered: tuple[int, Mutant]) -> str | None:
    """The mutant's name, if no suite finds it."""
    number, mutant = numbered
    folder = BUILD / f"mutants/{number}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "kernels", folder / "kernels")
    file = folder / "kernels" / mutant.file
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    finder = next((flavour for flavour in BY_FLAVOUR if run(flavour, folder, mutant.suite)), None)
    print(f"{mutant.name}: {'found by ' + finder if finder else 'NOT FOUND'}", flush=True)
    return None if finder else mutant.name


def main() -> int:
    if lost := unplaced():
        print("\n".join(lost))
        return 1
    if sys.argv[1:] == ["--texts"]:
        return 0
    chosen = [one for one in enumerate(MUTANTS) if not sys.argv[1:] or str(one[0]) in sys.argv[1:]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        left = [name for name in pool.map(survives, chosen) if name]
    print(f"{len(chosen) - len(left)} of {len(chosen)} mutants found")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
