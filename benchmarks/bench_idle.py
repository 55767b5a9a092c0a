"""Measures the CPU time of a rank that waits for a sleeping peer.

    python benchmarks/bench_idle.py --seconds 10 --backends mooncake-cpu,gloo,mpi --json out.json

Rank 0 sleeps while the others are already inside the operation. Then rank 0 calls it, too, and the
result is checked. Each backend runs in its own job, so that only its own threads count (all threads
of the process are counted).
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import Any

import gates
import lanes
import operations
from common import machine_facts, names, print_table, short, write_json_lines
from gates import Finding
from ranks import Rank, mpi_missing, run_job, run_main

CPU_LIMIT_S = 0.1  # for a rank that waits 10 s
SIZE = 1 << 10

Rows = list[dict[str, Any]]


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def rank_main(me: Rank) -> None:
    """One row per operation: CPU seconds of the busiest waiting rank, and of the sleeper."""
    name, seconds = me.spec["backend"], me.spec["seconds"]
    with lanes.open_lanes(me, [name]) as (lane,):
        for op in me.spec["ops"]:
            buffers = operations.allocate(op, SIZE, me.rank, me.size)
            call = lane.bind(op, buffers)
            if call is None:
                continue
            operations.fill(op, buffers, 0)
            call()  # makes connections and windows before the wait
            operations.fill(op, buffers, 1)
            me.meeting.barrier()
            before, start = _cpu_s(), time.monotonic()
            if me.rank == 0:
                time.sleep(seconds)
            call()
            used, waited = _cpu_s() - before, time.monotonic() - start
            used_s = me.meeting.exchange(used)
            right = all(me.meeting.exchange(operations.is_right(op, buffers, 1)))
            row = {
                "kind": "idle",
                "mode": me.spec["mode"],
                "ranks": me.size,
                "backend": name,
                "op": op,
            }
            row |= {"waited_s": waited, "waiter_cpu_s": max(used_s[1:]), "sleeper_cpu_s": used_s[0]}
            me.emit({**row, "correct": right, "error": None if right else "wrong result"})
            me.say(f"{name} {op}: {used_s} s of CPU in {waited:.1f} s")


def run(
    backends: list[str], ranks: int, seconds: float, ops: list[str], mode: str = "auto"
) -> Rows:
    """Rows of kind 'idle', CPU time in seconds."""
    rows = []
    for name in backends:
        spec = {"backend": name, "seconds": seconds, "ops": ops, "mode": mode}
        tcp_only = mode == "tcp"
        deadline_s = 120 + seconds * len(ops)
        rows += run_job(
            "bench_idle:rank_main",
            ranks,
            spec,
            mpi=name == "mpi",
            tcp_only=tcp_only,
            deadline_s=deadline_s,
        )
    return rows


def judge(rows: Rows, ours: str | None) -> list[Finding]:
    """Judges the CPU time of our waiting ranks against the limit."""
    used = {
        f"{row['op']} {row['mode']}": row["waiter_cpu_s"] for row in rows if row["backend"] == ours
    }
    return [gates.at_most("CPU seconds of a waiting rank", used, CPU_LIMIT_S)] if used else []


def show(rows: Rows) -> None:
    """One line per backend and operation."""
    headers = ["op", "mode", "backend", "waited s", "CPU s of waiter", "CPU s of sleeper"]
    fields = ("waited_s", "waiter_cpu_s", "sleeper_cpu_s")
    lines = [
        [row["op"], row["mode"], row["backend"], *[short(row[field]) for field in fields]]
        for row in rows
    ]
    print_table("waiting for a sleeping peer", headers, lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument(
        "--ops", type=names, default=["all_reduce"], help=", ".join(operations.OPERATIONS)
    )
    parser.add_argument("--modes", type=names, default=["auto"], help="auto, tcp")
    parser.add_argument("--backends", type=names, default=["mooncake-cpu", "gloo", "mpi"])
    parser.add_argument(
        "--ours", help="the backend the limit is about (default: the first mooncake one)"
    )
    parser.add_argument("--json", help="write JSON lines here")
    parser.add_argument("--gate", action="store_true", help="exit 1 if the limit is broken")
    args = parser.parse_args(argv)
    backends = args.backends
    if "mpi" in backends and mpi_missing():
        print(f"without MPI: {mpi_missing()}")
        backends = [name for name in backends if name != "mpi"]
    rows = [
        row
        for mode in args.modes
        for row in run(backends, args.ranks, args.seconds, args.ops, mode)
    ]
    findings = judge(rows, args.ours or gates.find_ours(backends))
    show(rows)
    gates.show(findings, "summary")
    write_json_lines(
        args.json, [machine_facts(), *rows, *[finding.as_row() for finding in findings]]
    )
    return gates.exit_code(rows, findings, args.gate)


if __name__ == "__main__":
    sys.exit(run_main(main))
