"""Measures the cost of groups: time of init and new_group beside Gloo's, shared memory of many
groups, resident memory per rank.

    python benchmarks/bench_startup.py --ranks 8 --backends mooncake-cpu,gloo --groups 64 \\
        --json out.json

init and new_group are interleaved in the same processes: every backend once in every round. The
first all_reduce is timed too, for backends that connect late. Memory is measured in a separate job
for each backend.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from datetime import timedelta
from typing import Any

import gates
import operations
from common import machine_facts, names, parse_size, print_table, short, spread, write_json_lines
from gates import Finding
from memory import resident_memory, shared_memory
from ranks import COLLECTIVE_TIMEOUT_S, Rank, is_registered, run_job, run_main

MIB = 1 << 20
SHARED_LIMIT_MIB = 256  # shared memory of 64 groups of 8 ranks, all ranks together
RESIDENT_LIMIT_MIB = 96  # more than Gloo's, per rank, after all operations
STEPS = ["init", "init + first all_reduce", "new_group", "new_group + first all_reduce", "destroy"]

Rows = list[dict[str, Any]]


def _init(me: Rank, backend: str, name: str, store: Any) -> None:
    import torch.distributed as dist

    if not is_registered(backend):
        raise RuntimeError(
            f"torch.distributed does not know the backend {backend!r}: is its package installed?"
        )
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    store = dist.PrefixStore(name, store)
    dist.init_process_group(backend, store=store, rank=me.rank, world_size=me.size, timeout=timeout)


def times_main(me: Rank) -> None:
    """Measures rounds of init, first all_reduce, new_group, first all_reduce, destroy; one row per
    backend and step."""
    import torch
    import torch.distributed as dist

    store, tensor = me.open_store(), torch.zeros(256)
    took_ms: dict[str, list[list[float]]] = {name: [] for name in me.spec["backends"]}

    def one_round(backend: str, number: int) -> list[float]:
        me.meeting.barrier()
        marks = [time.perf_counter()]
        _init(me, backend, f"{backend}-{number}", store)
        marks.append(time.perf_counter())
        dist.all_reduce(tensor)
        marks.append(time.perf_counter())
        me.meeting.barrier()
        group_start = time.perf_counter()
        group = dist.new_group(
            list(range(me.size)), timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        )
        marks.append(time.perf_counter())
        dist.all_reduce(tensor, group=group)
        marks.append(time.perf_counter())
        me.meeting.barrier()
        destroy_start = time.perf_counter()
        dist.destroy_process_group()
        end = time.perf_counter()
        spans = [
            marks[1] - marks[0],
            marks[2] - marks[0],
            marks[3] - group_start,
            marks[4] - group_start,
        ]
        return [span * 1e3 for span in [*spans, end - destroy_start]]

    for number in range(me.spec["rounds"] + 1):
        order = me.spec["backends"] if number % 2 == 0 else me.spec["backends"][::-1]
        for backend in order:
            of_ranks = me.meeting.exchange(one_round(backend, number))
            took_ms[backend].append([max(step) for step in zip(*of_ranks, strict=True)])
        me.say(
            f"round {number}: "
            + "  ".join(f"{name} init {short(took_ms[name][-1][0])} ms" for name in order)
        )
    for backend, rounds in took_ms.items():
        first, *rest = rounds  # the first one loads libraries, and is shown separately
        for index, step in enumerate(STEPS):
            values = spread([steps[index] for steps in rest], unit="ms")
            row = {"kind": "startup", "ranks": me.size, "backend": backend, "step": step}
            me.emit({**row, "first_ms": round(first[index], 3), **values})


def _use(me: Rank, group: Any, sizes: list[int]) -> None:
    """Runs every core operation once at every size, and checks it. Above 8 MiB only in-place
    operations, for their undo copies."""
    for size in sizes:
        for op in operations.CORE if size <= 8 * MIB else ["all_reduce", "broadcast"]:
            buffers = operations.allocate(op, size, me.rank, me.size)
            operations.fill(op, buffers, 1)
            operations.OPERATIONS[op].torch(buffers, group)()
            if not operations.is_right(op, buffers, 1):
                raise RuntimeError(f"wrong result: {op} of {size} bytes")


def memory_main(me: Rank) -> None:
    """Measures resident memory after all operations on one group, then shared memory of many groups
    that were all used."""
    import torch.distributed as dist

    spec, store = me.spec, me.open_store()
    _init(me, spec["backend"], "memory", store)
    gc.collect()
    before = resident_memory()
    _use(me, None, spec["sizes"])
    gc.collect()
    me.meeting.barrier()
    after = me.meeting.exchange(resident_memory())
    pids = me.meeting.exchange(os.getpid())
    one_group = shared_memory(pids) if me.rank == 0 else {}
    me.meeting.barrier()
    for _ in range(spec["groups"]):
        _use(me, dist.new_group(list(range(me.size))), spec["group_sizes"])
    me.meeting.barrier()
    many = shared_memory(pids) if me.rank == 0 else {}
    row = {"kind": "memory", "ranks": me.size, "backend": spec["backend"], "groups": spec["groups"]}
    row |= {"resident_max_mib": max(after) / MIB, "resident_grown_mib": (after[0] - before) / MIB}
    row |= {f"shared_1_group_{key}_mib": value / MIB for key, value in one_group.items()}
    row |= {f"shared_all_groups_{key}_mib": value / MIB for key, value in many.items()}
    me.emit(row)
    me.meeting.barrier()
    dist.destroy_process_group()


def run_times(backends: list[str], ranks: int, rounds: int) -> Rows:
    """Rows of kind 'startup': milliseconds, slowest rank of each round."""
    return run_job("bench_startup:times_main", ranks, {"backends": backends, "rounds": rounds})


def run_memory(
    backends: list[str], ranks: int, groups: int, sizes: list[int], group_sizes: list[int]
) -> Rows:
    """Rows of kind 'memory', one per backend. sizes: bytes per rank on one group; group_sizes: on
    each other group."""
    spec = {"groups": groups, "sizes": sizes, "group_sizes": group_sizes}
    jobs = [
        run_job("bench_startup:memory_main", ranks, {**spec, "backend": name}) for name in backends
    ]
    return [row for job in jobs for row in job]


def judge(rows: Rows, ours: str | None) -> list[Finding]:
    """Judges the times and memory against their limits."""
    times = {
        (row["backend"], row["step"]): row["p50_ms"] for row in rows if row["kind"] == "startup"
    }
    findings = []
    for step in STEPS[:4]:
        if (ours, step) in times and ("gloo", step) in times:
            ratio = times[ours, step] / times["gloo", step]
            findings.append(gates.at_most(f"{step}: ours / gloo", {step: ratio}, 1.0))
    memory = {row["backend"]: row for row in rows if row["kind"] == "memory"}
    if ours in memory:
        mine = memory[ours]
        name = f"shared memory of {mine['groups']} groups of {mine['ranks']} ranks, MiB"
        value = mine["shared_all_groups_total_mib"]
        findings.append(gates.at_most(name, {"all ranks together": value}, SHARED_LIMIT_MIB))
        if "gloo" in memory:
            more = mine["resident_max_mib"] - memory["gloo"]["resident_max_mib"]
            name = "resident memory above gloo's, MiB per rank"
            findings.append(gates.at_most(name, {"after all operations": more}, RESIDENT_LIMIT_MIB))
    return findings


def show(rows: Rows) -> None:
    """Prints two tables, of times and of memory."""
    times = [row for row in rows if row["kind"] == "startup"]
    if times:
        lines = [
            [
                row["step"],
                row["backend"],
                *[short(row[f"{what}_ms"]) for what in ("p50", "min", "mean", "first")],
            ]
            for row in sorted(times, key=lambda row: STEPS.index(row["step"]))
        ]
        title = f"{times[0]['ranks']} ranks, ms, slowest rank"
        print_table(title, ["step", "backend", "p50", "min", "mean", "cold"], lines)
    fields = ["resident_max_mib", "shared_1_group_total_mib", "shared_all_groups_total_mib"]
    memory = [row for row in rows if row["kind"] == "memory"]
    if memory:
        title = (
            f"memory, MiB: {memory[0]['ranks']} ranks; 'all groups' are 1 + {memory[0]['groups']}"
        )
        headers = ["backend", "resident per rank", "shared, 1 group", "shared, all groups"]
        print_table(
            title,
            headers,
            [[row["backend"], *[short(row[field]) for field in fields]] for row in memory],
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--backends", type=names, default=["mooncake-cpu", "gloo"])
    parser.add_argument(
        "--rounds", type=int, default=9, help="rounds of init and new_group, after one cold round"
    )
    parser.add_argument(
        "--groups", type=int, default=64, help="overlapping groups of all ranks; 0: only one group"
    )
    parser.add_argument(
        "--sizes",
        type=names,
        default=names("1K,1M,4M,32M"),
        help="bytes per rank on the first group",
    )
    parser.add_argument(
        "--group-sizes",
        type=names,
        default=names("1K,1M"),
        help="bytes per rank on every other group",
    )
    parser.add_argument(
        "--ours", help="the backend the limits are about (default: the first mooncake one)"
    )
    parser.add_argument("--json", help="write JSON lines here")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is broken")
    args = parser.parse_args(argv)
    sizes, group_sizes = [
        [parse_size(text) for text in group] for group in (args.sizes, args.group_sizes)
    ]
    rows = run_times(args.backends, args.ranks, args.rounds)
    rows += run_memory(args.backends, args.ranks, args.groups, sizes, group_sizes)
    findings = judge(rows, args.ours or gates.find_ours(args.backends))
    show(rows)
    gates.show(findings, "summary")
    write_json_lines(
        args.json, [machine_facts(), *rows, *[finding.as_row() for finding in findings]]
    )
    return gates.exit_code([], findings, args.gate)


if __name__ == "__main__":
    sys.exit(run_main(main))
