"""Which of the longer parts `tests/run.sh --ci` runs at this commit, in the minutes that are left.

A run of CI knows the history of git and nothing of earlier runs. So first come the parts that one
of the last RECENT commits reaches (tests/rooms.py), the newest change first: a part that a change
broke is red until the change is mended or RECENT commits old. They get half of the time, and all
others take turns in the rest, by the number of commits.

Prints the names of the parts, one in a line, and to stderr a table of all parts."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import rooms

RECENT = 10  # commits
SHARES = 8  # of the longer tests of Python
# Of the defects that suites of kernels must find: about ten each. It has no divisor in common with
# the number of parts that take turns, so these turns come to each share.
MUTANT_SHARES = 23
# Files of C++ tests where threads of several rooms meet.
THREAD_FILES = (
    "flush_agent|message_close|engine_test|progress_lock|lease_table|event_loop|engine_open|"
    "shared_work|transfer_engine_test"
)
# What the parts for other torches are built from, beside the core, which knows no torch.
TORCH = re.compile(
    r"csrc/(backend|bindings|build_backend|CMakeLists)|mooncake_backend/|setup\.py|tests/conformance/"
)


@dataclass(frozen=True)
class Part:
    name: str
    minutes: float  # on two idle cores, from an empty cache
    reached: Callable[[Sequence[str]], bool]  # by changed files
    what: str
    takes_turns: bool = True


def halves() -> tuple[set[str], set[str]]:
    """Names of the files of C++ tests, of about as many each."""
    names = {Path(file).stem for file in rooms.below("tests/cpp", ".cc")}
    both = {"sanitizer_options"}
    tests = sorted(names - both)
    return {*tests[::2], *both}, {*tests[1::2], *both}


def longer_tests(files: Sequence[str]) -> set[str]:
    """Files of Python tests that changed files reach, apart from those that any file reaches."""
    return rooms.python_tests(files) - rooms.python_tests([])


def on_headers(files: Sequence[str]) -> bool:
    return on_torch(files) or any(file.startswith("csrc/device/") for file in files)


def on_torch(files: Sequence[str]) -> bool:
    return any(TORCH.match(file) for file in files)


def parts() -> list[Part]:
    """In the order of their turns; of changed ones those that fewer changes reach come first."""
    threads = re.compile(THREAD_FILES)

    def share(number: int) -> Part:
        what = "an eighth of all longer tests of Python"
        return Part(f"longer-{number}", 7, lambda files: False, what)

    def half(number: int, files: Sequence[str]) -> bool:
        return bool(rooms.cpp_tests(files) & halves()[number])

    return [
        Part("kernels", 2, rooms.reaches_kernels, "kernels on the CPU"),
        Part("kernels-address", 4, rooms.reaches_kernels, "with the address sanitizer"),
        Part("kernels-thread", 6, rooms.reaches_kernels, "with the thread sanitizer"),
        Part("mutants", 3, rooms.reaches_kernels, "ten defects that the suites must find"),
        Part("headers", 3, on_headers, "headers of other CUDAs and of the oldest torch"),
        Part("longer", 5, lambda files: bool(longer_tests(files)),
             "longer tests of Python that the last commits reach", takes_turns=False),
        Part("renewals", 5, lambda files: "renewal_sweep_test" in rooms.cpp_tests(files),
             "300 cases of ranks that are killed and replaced"),
        Part("device", 3, on_torch, "an eighth of torch's own suite on a device"),
        Part("suite", 4, on_torch, "a quarter of torch's own suite"),
        Part("threads", 7,
             lambda files: any(threads.match(f"{name}.cc") for name in rooms.cpp_tests(files)),
             "C++ tests where threads meet, with the thread sanitizer"),
        *(Part(f"memory-{n}", 8, functools.partial(half, n),
               "half of the C++ tests with the address and the undefined sanitizer")
          for n in range(2)),
        Part("oldest", 9, on_torch, "an eighth of torch's own suite on torch 2.8"),
        Part("newest", 12, on_torch, "the same on torch 2.15, and its windows"),
        *map(share, range(SHARES)),
    ]  # fmt: skip


def recent_changes() -> list[list[str]]:
    """Files of each of the last commits, the newest first."""
    log = "\n".join(rooms.git("log", f"-{RECENT}", "--name-only", "--format=%x00", "HEAD"))
    return [[file for file in text.split("\n") if file] for text in log.split("\0")[1:]]


@dataclass
class Row:
    part: Part
    age: int | None  # commits since the newest recent one that reaches it
    turn: int | None  # commits from now to the next at which its turn comes first; 0: now
    chosen: str = ""  # why


def plan(changes: Sequence[Sequence[str]], count: int, minutes: float) -> list[Row]:
    """All parts, those chosen first and in the order in which they run."""
    order = parts()
    turns = [part.name for part in order if part.takes_turns]
    rows = []
    for part in order:
        age = next((i for i, files in enumerate(changes) if part.reached(files)), None)
        turn = (turns.index(part.name) - count) % len(turns) if part.takes_turns else None
        rows.append(Row(part, age, turn))
    in_turn = sorted((row for row in rows if row.turn is not None), key=lambda row: row.turn or 0)
    changed = [row for row in rows if row.age is not None]
    changed.sort(key=lambda row: row.age or 0)
    in_turn[0].chosen = "its turn"
    left = minutes - in_turn[0].part.minutes
    for row in [*changed, *in_turn]:
        if not row.chosen and row.part.minutes <= left:
            row.chosen = "changed" if row.age is not None else "its turn"
            left -= row.part.minutes
    ran = [row for row in changed if row.chosen]
    ran += [row for row in in_turn if row.chosen and row.age is None]
    return ran + [row for row in rows if not row.chosen]


def table(rows: Sequence[Row], turns: int) -> str:
    lines = [f"{'part':16} {'runs':9} {'minutes':>7}  {'last change':14} turn"]
    for row in rows:
        age = "-" if row.age is None else "HEAD" if row.age == 0 else f"HEAD~{row.age}"
        turn = "only if changed"
        if row.turn is not None:
            turn = f"HEAD~{(turns - row.turn) % turns}, next in {row.turn or turns} commits"
        line = f"{row.part.name:16} {row.chosen or 'no':9} {row.part.minutes:7.0f}  {age:14} {turn}"
        lines.append(f"{line}: {row.part.what}")
    return "\n".join(lines)


def newest_first(changes: Sequence[Sequence[str]]) -> list[str]:
    """Files of Python tests that recent commits reach."""
    found = dict.fromkeys(test for files in changes for test in sorted(longer_tests(files)))
    return [f"tests/{name}" for name in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--files", choices=["longer", "memory-0", "memory-1", "threads"])
    parser.add_argument("--mutants", action="store_true", help="which share of them has its turn")
    options = parser.parse_args()
    count = int(rooms.git("rev-list", "--count", "HEAD")[0])
    if options.files == "longer":
        print(" ".join(newest_first(recent_changes())))
    elif options.files == "threads":
        print(THREAD_FILES)
    elif options.files:
        print("|".join(f"{name}\\." for name in sorted(halves()[int(options.files[-1])])))
    elif options.mutants:
        print(f"{count % MUTANT_SHARES}/{MUTANT_SHARES}")
    else:
        rows = plan(recent_changes(), count, options.minutes)
        print(table(rows, sum(row.turn is not None for row in rows)), file=sys.stderr)
        print("\n".join(row.part.name for row in rows if row.chosen))


if __name__ == "__main__":
    main()
