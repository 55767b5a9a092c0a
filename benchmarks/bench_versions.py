"""Measures the cost of a change: two installed versions of this package side by side.

    pip install --no-deps --target /tmp/before 'git+<repository>@<commit>'
    python benchmarks/bench_versions.py --before /tmp/before --ranks 2,4 -b 64 -e 1M -f 16

One process cannot load both versions, so each has its own job. The jobs take turns: while one runs,
the ranks of the other sleep in a read. A round has a turn of each, and gives one ratio; every
second round has the other order. The place of memory differs between jobs and moves a cell by some
percent. With more ranks than cores a job falls into one of several rhythms. So each cell is
measured in many pairs of jobs, and the median counts.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import operations
from common import (
    OthersWatch,
    format_size,
    geomean,
    machine_facts,
    names,
    numbers,
    parse_size,
    print_table,
    short,
    size_steps,
    write_json_lines,
)
from fork_server import Crew, Job, Member
from gates import Finding
from gates import show as show_findings
from ranks import COLLECTIVE_TIMEOUT_S, JobError, run_main

RATIO_LIMIT = 1.02  # after / before, geometric mean of all cells
TINY_BYTES = 1 << 10
TINY_LIMIT_US = 0.3  # after - before, mean of cells up to TINY_BYTES; or RATIO_LIMIT
TURN_DEADLINE_S = 60.0
Rows = list[dict[str, Any]]


def rank_main(me: Member) -> None:
    """Makes the group, then runs the turns that it is told: (operation, size, calls)."""
    import torch.distributed as dist

    if me.spec["path"]:
        sys.path.insert(0, me.spec["path"])
    import mooncake_backend

    if "mooncake-cpu" not in dist.Backend.backend_list:
        mooncake_backend.register()
    dist.init_process_group(
        "mooncake-cpu",
        store=me.open_store(COLLECTIVE_TIMEOUT_S),
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    gc.disable()
    me.link.send({"package": str(Path(mooncake_backend.__file__).parent)})
    cell, calls = None, 0
    while (told := me.link.recv()) is not None:
        if cell != told[:2]:
            cell = told[:2]
            name, size = cell
            buffers = operations.allocate(name, size, me.rank, me.size)
            call = operations.OPERATIONS[name].torch(buffers, dist.group.WORLD)
            operations.fill(name, buffers, 1)
            call()
            if not operations.is_right(name, buffers, 1):
                raise RuntimeError(f"wrong result of {name}, {size} bytes")
            operations.reset(buffers)
        calls = told[2]
        for _ in range(max(2, calls // 8)):
            call()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        me.link.send({"us": (time.perf_counter() - start) * 1e6 / calls})
    dist.destroy_process_group()
    me.link.send({})


class Version:
    """A running job of one version."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.package = self._hear()[0]["package"]

    def turn(self, op: str, size: int, calls: int) -> float:
        """Microseconds per call on the slowest rank: an operation ends when all ranks have it."""
        self._tell((op, size, calls))
        return max(said["us"] for said in self._hear())

    def end(self) -> None:
        self._tell(None)
        self._hear()

    def _tell(self, what: Any) -> None:
        for link in self.job.links:
            link.send(what)

    def _hear(self) -> list[dict[str, Any]]:
        ranks = list(range(len(self.job.links)))
        heard = self.job.hear(ranks, TURN_DEADLINE_S)
        for rank in ranks:
            if rank not in heard:
                raise JobError(f"rank {rank} said nothing:\n{self.job.log(rank)[-2000:]}")
            if "error" in heard[rank]:
                raise JobError(f"rank {rank}: {heard[rank]['error']}")
        return [heard[rank] for rank in ranks]


def race(before: Version, after: Version, op: str, size: int, rounds: int, turn_s: float) -> Rows:
    """Returns one row per round, each with a turn of both versions."""
    per_call_us = max(version.turn(op, size, 4) for version in (before, after))
    calls = round(min(max(turn_s * 1e6 / per_call_us, 2), 5000))
    rows = []
    for number in range(rounds):
        took = {}
        order = [("before", before), ("after", after)]
        for name, version in reversed(order) if number % 2 else order:
            took[f"{name}_us"] = version.turn(op, size, calls)
        rows.append({"op": op, "bytes": size, "calls": calls, **took})
    return rows


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields rows of kind 'round'."""
    env = {"MOONCAKE_TRANSPORTS": "tcp"} if args.tcp else {}
    sizes = size_steps(args.begin, args.end, args.factor)
    cells = [(op, size) for op in args.ops for size in sizes]
    with Crew(["bench_versions"]) as crew_before, Crew(["bench_versions"]) as crew_after:
        for ranks in args.ranks:
            for pair in range(args.jobs):
                specs = [
                    {"path": path and str(Path(path).resolve())}
                    for path in (args.before, args.after)
                ]
                where = "bench_versions:rank_main"
                with (
                    crew_before.job(where, ranks, specs[0], env) as one,
                    crew_after.job(where, ranks, specs[1], env) as other,
                ):
                    before, after = Version(one), Version(other)
                    if before.package == after.package:
                        raise JobError(f"both versions are {before.package}")
                    for op, size in cells:
                        rows = race(before, after, op, size, args.rounds, args.turn_ms / 1e3)
                        for row in rows:
                            yield {"kind": "round", "ranks": ranks, "job": pair, **row}
                        print(
                            f"{ranks} ranks, job {pair + 1} of {args.jobs}  {op} "
                            f"{format_size(size)}  after/before {short(ratio_of(rows))}",
                            file=sys.stderr,
                            flush=True,
                        )
                    before.end()
                    after.end()


def ratio_of(rounds: Rows) -> float:
    """after / before: the median over the rounds. The turns of a round follow one another."""
    return statistics.median(row["after_us"] / row["before_us"] for row in rounds)


def cells_of(rounds: Rows) -> Rows:
    """Rows of kind 'cell': the median ratio of each job, and the median of the jobs."""
    by_cell: dict[tuple[int, str, int], dict[int, Rows]] = {}
    for row in rounds:
        jobs = by_cell.setdefault((row["ranks"], row["op"], row["bytes"]), {})
        jobs.setdefault(row["job"], []).append(row)
    cells = []
    for (ranks, op, size), jobs in by_cell.items():
        every = [row for job in jobs.values() for row in job]
        ratios = [ratio_of(job) for job in jobs.values()]
        cell = {"kind": "cell", "ranks": ranks, "op": op, "bytes": size}
        for side in ("before_us", "after_us"):
            cell[side] = statistics.median(row[side] for row in every)
        cell |= {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        cells.append(cell)
    return cells


def judge(cells: Rows) -> list[Finding]:
    """Judges against the limits of a change that must cost nothing."""
    findings = []
    for ranks in dict.fromkeys(cell["ranks"] for cell in cells):
        of_job = [cell for cell in cells if cell["ranks"] == ranks]
        ratio = geomean(cell["ratio"] for cell in of_job)
        name = f"after/before, {ranks} ranks, geometric mean of {len(of_job)} cells"
        findings.append(Finding(name, ratio, f"<= {RATIO_LIMIT}", ratio <= RATIO_LIMIT))
        tiny = [cell for cell in of_job if cell["bytes"] <= TINY_BYTES]
        if tiny:
            more = statistics.fmean(cell["before_us"] * (cell["ratio"] - 1) for cell in tiny)
            before = statistics.fmean(cell["before_us"] for cell in tiny)
            limit = max(TINY_LIMIT_US, before * (RATIO_LIMIT - 1))
            name = f"after - before, {ranks} ranks, up to {format_size(TINY_BYTES)}, us"
            findings.append(Finding(name, more, f"<= {short(limit)}", more <= limit))
    return findings


def show(cells: Rows) -> None:
    for ranks in dict.fromkeys(cell["ranks"] for cell in cells):
        lines = [
            [
                cell["op"],
                format_size(cell["bytes"]),
                *(short(cell[side]) for side in ("before_us", "after_us")),
                *(f"{cell[ratio]:.3f}" for ratio in ("ratio", "least", "most")),
            ]
            for cell in cells
            if cell["ranks"] == ranks
        ]
        headers = ["op", "size", "before us", "after us", "after/before", "least", "most"]
        print_table(f"{ranks} ranks: the slowest rank's time per call", headers, lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--before", required=True, help="folder that holds the older mooncake_backend"
    )
    parser.add_argument(
        "--after", help="folder that holds the newer one (default: what is installed)"
    )
    parser.add_argument("-b", "--begin", type=parse_size, default="64", help="smallest size")
    parser.add_argument("-e", "--end", type=parse_size, default="1M", help="largest size")
    parser.add_argument("-f", "--factor", type=int, default=16, help="between two sizes")
    parser.add_argument("--ops", type=names, default=operations.CORE)
    parser.add_argument("--ranks", type=numbers, default=[2, 4], help="numbers of ranks, e.g. 2,4")
    parser.add_argument(
        "--jobs", type=int, default=9, help="pairs of jobs for each number of ranks"
    )
    parser.add_argument("--rounds", type=int, default=11, help="turns of each version in each cell")
    parser.add_argument("--turn-ms", type=float, default=20, help="length of a turn")
    parser.add_argument("--tcp", action="store_true", help="over TCP only")
    parser.add_argument("--json", help="write JSON lines here")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is broken")
    args = parser.parse_args(argv)
    # Otherwise torch loads the installed version by itself.
    os.environ.update(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    start, watch, facts = time.monotonic(), OthersWatch(), machine_facts()
    rounds = list(measure(args))
    cells = cells_of(rounds)
    findings = judge(cells)
    show(cells)
    show_findings(findings)
    facts["cpu_share_of_others"] = watch.tell()
    write_json_lines(args.json, [facts, *rounds, *cells, *[one.as_row() for one in findings]])
    print(f"{len(cells)} cells in {time.monotonic() - start:.0f} s")
    return int(args.gate and not all(finding.ok for finding in findings))


if __name__ == "__main__":
    sys.exit(run_main(main))
