"""Plants defects in a copy of the kernels and of their host's side, and runs the suite of each
defect. It must fail. One program for each sanitizer has all defects, and the environment variable
MOONCAKE_SIMT_MUTANT chooses one.

tests/simt/run.sh mutants
With --texts, only checks that each defect has its place.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mutants_ep
import mutants_proxy
import mutants_remote
import mutants_tokens
import mutants_verdict
from mutants_sources import Change, change_of, with_all

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
SOURCES = BUILD / "simt-mutants"
# The compiler's sanitizers, in the order in which they find most mutants soon.
FLAVOURS = {"plain": "none", "thread": "thread", "address": "address,undefined"}
BUILDING = threading.Lock()


@dataclass
class Mutant:
    name: str
    file: str  # in kernels/, or csrc/...
    old: str
    new: str
    suite: str = "collectives"

    def path(self) -> str:
        return self.file if self.file.startswith("csrc/") else f"kernels/{self.file}"


ARRIVAL, EXCHANGE, PUBLISH = "arrival.cuh", "exchange.cuh", "publish.cuh"
GROUP, COLLECTIVES = "group.cuh", "collectives.cuh"
COPY, PIECES, SIGNALS = "copy.cuh", "pieces.cuh", "signals.cuh"
COPY_ROWS = "copy_rows.cuh"
SPLITS = "all_to_all.cuh"
STATE = "group_state.h"
WORDS = "csrc/peers/decision_words.h"
NEXT = """    const Turn next = hasData ? after(turn) : turn;
    if (takesPart && announced <= next.number && (!hasData || isAhead(exchange, next))) {"""
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
        NEXT.replace("hasData ?", "announced > turn.number ?").replace(
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
        for suite in ("collectives", "ep", "token")
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
        "|| state.publishedExchanges[block] <= exchange;",
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
    *(
        Mutant(
            f"the host learns a wrong call of a change: {calls}",
            GROUP,
            "state.calls + (takes && !isOfGraph),",
            f"{calls},",
        )
        for calls in ("state.calls", "state.calls + takes", "state.done + takes")
    ),
    Mutant(
        "a block of a group that has ended stays counted",
        EXCHANGE,
        "  if (threadIdx.x == 0) leave(exchange, 1);\n",
        "",
        "refusal",
    ),
    Mutant(
        "a held block looks for the group's end before it is held up",
        EXCHANGE,
        "  if (exchange.isHeld) enter(*exchange.state);\n  if (!exchange.state->failed) return",
        "  const bool hasFailed = exchange.state->failed != 0;\n"
        "  if (exchange.isHeld) enter(*exchange.state);\n  if (!hasFailed) return",
        "refusal",
    ),
    Mutant(
        "a kernel that is refused stays counted",
        EXCHANGE,
        "        if (threadIdx.x == 0) leave(exchange, gridDim.x);\n",
        "",
        "refusal",
    ),
    Mutant(
        "a refusal between two operations holds blocks up for good",
        COLLECTIVES,
        "now() + state.decisionNs);\n  addAcqRelDevice(&state.entered, kHeld);",
        "now() + state.decisionNs);\n  if (!state.failed) addAcqRelDevice(&state.entered, kHeld);",
        "refusal",
    ),
    Mutant(
        "a refusal ends one operation only",
        GROUP,
        "if (decision == Decision::kRefuse) failGroup(state, Failure::kRefused, state.rank);",
        "",
        "refusal",
    ),
    Mutant(
        "a kernel that stops later misses the refusal",
        WORDS,
        "if (decided_ == generation_) ++generation_;",
        "",
        "refusal",
    ),
    Mutant(
        "kernels that wait are not told of the refusal",
        WORDS,
        "    Access::storeRelease(words_.stop, generation_);\n  }\n\n private",
        "  }\n\n private",
        "refusal",
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
        "bankAt(state, state.rank, turn.serial + 1)",
        "bankAt(state, state.rank, turn.serial)",
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
    *(
        Mutant(
            f"each lane reads the sizes by itself: {file}",
            file,
            f"ofFirstLane(about.tokens), {width} = ofFirstLane(about.topk);",
            f"about.tokens, {width} = about.topk;",
            "lanes",
        )
        for file, width in (("ep/dispatch.cuh", "topk"), ("ep/dispatch_tokens.cuh", "width"))
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
MUTANTS += [Mutant(*one, suite="token") for one in mutants_tokens.MUTANTS]
MUTANTS += [Mutant(*one, suite="proxy") for one in mutants_proxy.MUTANTS]
MUTANTS += [Mutant(*one, suite=suite) for suite, *one in mutants_remote.MUTANTS]
MUTANTS += [
    Mutant(name, mutants_verdict.FILE, old, new, suite)
    for suite, mutants in mutants_verdict.BY_SUITE.items()
    for name, old, new in mutants
]

COPIED = ["kernels", "csrc/peers", "csrc/proxy"]


def unplaced() -> list[str]:
    """The mutants whose text is not in its file exactly once."""
    return [
        f"{one.name}: its text is not in {one.file} once"
        for one in MUTANTS
        if (ROOT / one.path()).read_text().count(one.old) != 1
    ]


def with_mutants(numbers: Sequence[int]) -> dict[str, str]:
    """The text of each file in which MOONCAKE_SIMT_MUTANT can choose one of these mutants."""
    changes: dict[str, list[Change]] = {}
    texts = {one.path(): (ROOT / one.path()).read_text() for one in MUTANTS}
    for number in numbers:
        one = MUTANTS[number - 1]
        change = change_of(number, texts[one.path()], one.old, one.new)
        changes.setdefault(one.path(), []).append(change)
    return {name: with_all(name, texts[name], of) for name, of in changes.items()}


def write_sources(numbers: Sequence[int]) -> None:
    texts = {
        str(file.relative_to(ROOT)): file.read_text()
        for folder in COPIED
        for file in (ROOT / folder).rglob("*.*")
    }
    texts |= with_mutants(numbers)
    for file in SOURCES.rglob("*.*"):
        if str(file.relative_to(SOURCES)) not in texts:
            file.unlink()
    for name, text in texts.items():
        file = SOURCES / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text() != text:  # what is built of others stays
            file.write_text(text)


def tests_of(suite: str) -> str:
    """A filter of the suite's tests."""
    folders = ("tests/simt/tests", "tests/cpp/peers")
    files = (ROOT / folder / f"{suite}_test.cc" for folder in folders)
    text = next(file for file in files if file.exists()).read_text()
    return ":".join(f"{name}.*" for name in sorted(set(re.findall(r"^TEST\((\w+),", text, re.M))))


def runner(flavour: str) -> list[str]:
    """What comes in front of the tests, as in run.sh."""
    can = flavour == "thread" and subprocess.run(["setarch", "-R", "true"], capture_output=True)
    return ["setarch", "-R"] if can and can.returncode == 0 else []


def fails(flavour: str, suite: str, number: int) -> bool:
    """Whether the suite fails with this mutant, or without any if it is 0."""
    folder = BUILD / f"simt-mutants-{flavour}"
    env = {
        **os.environ,
        "MOONCAKE_SIMT_MUTANT": str(number),
        "TSAN_OPTIONS": f"log_path={folder}/races",
    }
    tests = [str(folder / "simt_tests"), "--gtest_fail_fast", f"--gtest_filter={tests_of(suite)}"]
    done = subprocess.run([*runner(flavour), *tests], env=env, capture_output=True)
    return done.returncode != 0


@functools.cache
def build(flavour: str) -> None:
    folder = BUILD / f"simt-mutants-{flavour}"
    configure = [
        *("-S", ROOT / "tests/simt", "-B", folder, "-G", "Ninja"),
        f"-DMOONCAKE_SANITIZE={FLAVOURS[flavour]}",
        f"-DMOONCAKE_SOURCES={SOURCES}",
        "-DMOONCAKE_OPTIONS=-w;-g0",
    ]
    for arguments in (configure, ["--build", folder]):
        done = subprocess.run(["cmake", *arguments], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
    # They must fail because of their defects.
    if fails(flavour, "signals", 0):
        sys.exit(f"a suite fails without a defect: {flavour}")


def finds(flavour: str, suite: str, number: int) -> bool:
    with BUILDING:
        build(flavour)
    return fails(flavour, suite, number)


def flavours(mutant: Mutant) -> list[str]:
    """The one that finds the mutant soon comes first."""
    has_no_barrier = "__sync" in mutant.old and "__sync" not in mutant.new
    is_order = has_no_barrier or "elaxed" in mutant.new
    return sorted(FLAVOURS, key="thread".__ne__) if is_order else list(FLAVOURS)


def survives(number: int) -> str | None:
    """The mutant's name, if no suite finds it."""
    mutant = MUTANTS[number - 1]
    finder = next((one for one in flavours(mutant) if finds(one, mutant.suite, number)), None)
    found = f"found by {finder}" if finder else "NOT FOUND"
    print(f"{number} {mutant.name}: {found}", flush=True)
    return None if finder else mutant.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", action="store_true")
    parser.add_argument("--turn", metavar="N/M", default="0/1", help="each M-th, counted from N")
    parser.add_argument("numbers", type=int, nargs="*")
    options = parser.parse_args()
    if lost := unplaced():
        print("\n".join(lost))
        return 1
    turn, turns = map(int, options.turn.split("/"))
    chosen = options.numbers or range(1 + turn, len(MUTANTS) + 1, turns)
    if options.texts:
        with_mutants(chosen)
        return 0
    write_sources(chosen)
    build("plain")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        left = [name for name in pool.map(survives, chosen) if name]
    print(f"{len(chosen) - len(left)} of {len(chosen)} mutants found")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
