"""Measures how soon a job has all of its ranks again after a kill, with spares and without.

    python benchmarks/bench_spares.py --ranks 4 --times 12 --json out.json

mooncake-run --on-death replace starts the ranks. They call all_reduce of 1 KiB every 5 ms, and let
newcomers in between two calls. In each job every rank is killed once, rank 0 too. `whole` is the
time from the kill to the first result with all ranks, on the survivor that is last; `replaced` ends
when the new process has become a rank, as the launcher tells it. docs/replacing.md has the results.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import (
    OthersWatch,
    Progress,
    machine_facts,
    numbers,
    percentile_text,
    percentiles,
    print_table,
    write_json_lines,
)
from ranks import JobError, die_with_parent, run_main

DEADLINE_S = 300.0  # until a rank, a spare or a replacement is there
SETTLE_S = 1.0  # before a kill
# Between a spare's last import and its word to the launcher.
SAID_S = 0.5

# Each rank writes a line when the number of ranks in its results changes.
RANK = """
import os, sys, time
import torch, torch.distributed as dist
from mooncake_backend import pg, replacing

torch.set_num_threads(1)
dist.init_process_group("mooncake-cpu")
world, seen = dist.group.WORLD, 0
if os.environ.get("MOONCAKE_REJOIN"):
    pg.join_group(world)
log = open(f"{sys.argv[1]}/rank-{dist.get_rank()}-{os.getpid()}", "w", buffering=1)
while not os.path.exists(f"{sys.argv[1]}/end"):
    dist.all_reduce(tensor := torch.ones(256))
    if (ranks := int(tensor[0])) != seen:
        log.write(f"{time.monotonic()} {ranks}\\n")
        seen = ranks
    replacing.admit(world)
    time.sleep(0.005)
os._exit(0)
"""
# The last module that a spare imports.
MARK = """
import os
open(f"{os.path.dirname(__file__)}/spare-{os.getpid()}", "w").close()
"""

Rows = list[dict[str, Any]]


class Job:
    """mooncake-run with its ranks in a folder of files that they write."""

    def __init__(self, folder: Path, ranks: int, spares: int) -> None:
        self.folder, self.ranks = folder, ranks
        (folder / "rank.py").write_text(RANK)
        (folder / "mark.py").write_text(MARK)
        command = [sys.executable, "-m", "mooncake_backend.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "--on-death", "replace"]
        if spares:
            command += ["--spares", str(spares), "--spare-preload", "mark"]
        command += [str(folder / "rank.py"), str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.launcher = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, preexec_fn=die_with_parent
            )

    def until(self, found: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + DEADLINE_S
        while not (value := found()):
            if self.launcher.poll() is not None or time.monotonic() > end:
                raise JobError(f"no {what}: {self.log.read_text()[-2000:]}")
            time.sleep(0.01)
        return value

    def processes(self) -> dict[int, tuple[int, list[tuple[float, int]]]]:
        """By rank, its newest process and the lines of that."""
        found = {}
        for path in sorted(self.folder.glob("rank-*-*"), key=lambda path: path.stat().st_ctime):
            rank, pid = map(int, path.name.split("-")[1:])
            lines = [
                line.split() for line in path.read_text().splitlines(keepends=True) if "\n" in line
            ]
            found[rank] = pid, [(float(when), int(count)) for when, count in lines]
        return found

    def are_whole(self) -> bool:
        there = self.processes().values()
        return len(there) == self.ranks and all(
            lines and lines[-1][1] == self.ranks for _, lines in there
        )

    def has_spare(self) -> bool:
        ranks = {pid for pid, _ in self.processes().values()}
        spares = {int(path.name.split("-")[1]) for path in self.folder.glob("spare-*")}
        return any(os.path.exists(f"/proc/{pid}") for pid in spares - ranks)

    def kill(self, victim: int) -> float:
        """Seconds from the kill until all survivors have had a result of all ranks again."""
        pid, _ = self.processes()[victim]
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)

        def whole() -> list[float]:
            ends = []
            for rank, (process, lines) in self.processes().items():
                if rank == victim:
                    if process == pid:
                        return []
                    continue
                ends += [when for when, count in lines if when > began and count == self.ranks][:1]
            return ends if len(ends) == self.ranks - 1 else []

        return max(self.until(whole, f"return of rank {victim}")) - began

    def end(self) -> list[float]:
        """Ends the job. Returns `replaced after` of the table, in ms, by the killed rank."""
        (self.folder / "end").touch()
        self.launcher.wait(DEADLINE_S)
        lines = re.findall(
            r"^  (\d+) .* replaced after ([\d.]+) (ms|s)", self.log.read_text(), re.M
        )
        units = {"ms": 1.0, "s": 1e3}
        return [float(value) * units[unit] for _, value, unit in sorted(lines)]


def one_job(ranks: int, spares: int) -> Rows:
    rows: Rows = []
    with tempfile.TemporaryDirectory(prefix="mcbench-") as name:
        job = Job(Path(name), ranks, spares)
        try:
            for victim in range(ranks):
                job.until(job.are_whole, "job of all ranks")
                if spares:
                    job.until(job.has_spare, "spare")
                    time.sleep(SAID_S)
                time.sleep(SETTLE_S)
                row = {"kind": "spare", "ranks": ranks, "spares": spares, "victim": victim}
                rows.append({**row, "whole_ms": job.kill(victim) * 1e3})
            for row, replaced in zip(rows, job.end(), strict=True):
                row["replaced_ms"] = replaced
            if spares and job.log.read_text().count("(spare)") != ranks:
                raise JobError(f"not every replacement was a spare: {job.log.read_text()[-2000:]}")
        finally:
            job.launcher.terminate()
            job.launcher.wait()
    return rows


def summarize(rows: Rows, spares: int) -> dict[str, Any]:
    mine = [row for row in rows if row["spares"] == spares]
    summary = {"kind": "spare_cell", "spares": spares, "times": len(mine)}
    for name in ("replaced", "whole"):
        summary |= percentiles(name, [row[f"{name}_ms"] for row in mine])
    return summary


def show(summaries: Rows) -> None:
    lines = [
        [row["spares"], row["times"], *[percentile_text(row, n) for n in ("replaced", "whole")]]
        for row in summaries
    ]
    headers = ["spares", "kills", "replaced", "whole"]
    print_table("after a kill, p50/p90/p99/max, ms", headers, lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--spares", type=numbers, default=[0, 1], help="numbers of spares")
    parser.add_argument("--times", type=int, default=12, help="kills with each number of spares")
    parser.add_argument("--json", help="write JSON lines here")
    args = parser.parse_args(argv)
    if args.ranks < 2 or args.times < 1:
        parser.error("a kill needs 2 ranks and 1 time or more")
    facts, watch = machine_facts(), OthersWatch()
    jobs = -(-args.times // args.ranks)
    progress = Progress(jobs * len(args.spares))
    rows: Rows = []
    for _ in range(jobs):
        for spares in args.spares:  # in turn, so that they see the same machine
            rows += one_job(args.ranks, spares)
            progress.step(f"{spares} spares")
    summaries = [summarize(rows, spares) for spares in args.spares]
    show(summaries)
    facts["cpu_share_of_others"] = watch.tell()
    facts["load_1min_after"] = os.getloadavg()[0]
    write_json_lines(args.json, [facts, *summaries, *rows])
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
