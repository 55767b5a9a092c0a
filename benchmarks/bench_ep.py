"""Dispatch and combine, beside the same exchange by all_to_all_single, and beside plain copies.

    python benchmarks/bench_ep.py --ranks 2,4 --experts 32,256 --tokens 128,1 --json out.json

Interleaved in the same processes, slowest rank. The exchange by all_to_all_single sends a row for
each (token, expert), sorted by expert: counts first, then rows with uneven splits; its combine
sends them back and adds them up by weight.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gates
from common import (
    Progress,
    geomean,
    machine_facts,
    names,
    numbers,
    print_table,
    short,
    spread,
    write_json_lines,
)
from gates import Finding
from ranks import HERE, Rank, run_job, run_main

Rows = list[dict[str, Any]]
Phases = tuple[Callable[[], Any], Callable[[Any], Any]]  # dispatch, and combine of what it gave

EP = "mooncake.ep"
IN_PLACE = "in place"  # the same, its experts write where the others read: zero_copy
COPY = "memcpy"
LIMITS = {"gloo": 0.2, "mooncake-cpu": 1.0}  # dispatch and combine together, of the same by these
LEAST_OF_COPY = 0.6


def compiled_sum() -> ctypes.CDLL:
    folder = tempfile.mkdtemp(prefix="bench-ep-")
    library = Path(folder, "fused_sum.so")
    command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, str(HERE / "fused_sum.c")], check=True)
    return ctypes.CDLL(str(library))


def by_all_to_all(group: Any, x: Any, topk_idx: Any, weights: Any, experts: int) -> Phases:
    """On any backend of torch.distributed."""
    import torch
    import torch.distributed as dist

    size, (tokens, topk) = dist.get_world_size(group), topk_idx.shape
    each = experts // size

    def dispatch() -> Any:
        chosen = topk_idx.flatten()
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=experts)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        out_splits = sent.view(size, each).sum(1).tolist()
        in_splits = got.view(size, each).sum(1).tolist()
        rows = x.index_select(0, order.div(topk, rounding_mode="floor"))
        landed = rows.new_empty(sum(in_splits), x.shape[1])
        dist.all_to_all_single(landed, rows, in_splits, out_splits, group=group)
        # From (rank, expert) to (expert, rank): what an expert computes on lies together.
        expert_of = torch.arange(each).repeat(size).repeat_interleave(got)
        place = expert_of.argsort(stable=True)
        return landed.index_select(0, place), place, order, in_splits, out_splits

    def combine(found: Any) -> Any:
        rows, place, order, in_splits, out_splits = found
        back = torch.empty_like(rows)
        back.index_copy_(0, place, rows)
        home = back.new_empty(tokens * topk, x.shape[1])
        dist.all_to_all_single(home, back, out_splits, in_splits, group=group)
        by_token = torch.empty_like(home)
        by_token.index_copy_(0, order, home)
        return torch.bmm(weights.unsqueeze(1).bfloat16(), by_token.view(tokens, topk, -1)).squeeze(
            1
        )

    return dispatch, combine


def by_ep(
    buffer: Any,
    x: Any,
    topk_idx: Any,
    weights: Any,
    most: int,
    experts: int,
    fp8: bool,
    zero_copy: bool = False,
) -> Phases:
    """The experts' rows come from memory of the caller's, or stand where the others read them: what
    experts do to write them there is no part of it."""
    import torch

    answers: list[Any] = []
    written: set[int] = set()

    def dispatch() -> Any:
        return buffer.low_latency_dispatch(x, topk_idx, most, experts, use_fp8=fp8)

    def combine(found: Any) -> Any:
        rows, _, handle = found[:3]
        if zero_copy:
            there = buffer.get_next_low_latency_combine_buffer(handle)
            if there.data_ptr() not in written:
                there.copy_(rows[0] if fp8 else rows)
                written.add(there.data_ptr())
            return buffer.low_latency_combine(there, topk_idx, weights, handle, zero_copy=True)[0]
        if not answers:
            answers.append(torch.empty(rows[0].shape if fp8 else rows.shape, dtype=torch.bfloat16))
            answers[0].copy_(rows[0] if fp8 else rows)
        return buffer.low_latency_combine(answers[0], topk_idx, weights, handle)[0]

    return dispatch, combine


def by_copies(x: Any, topk_idx: Any, weights: Any, fp8: bool, fused: ctypes.CDLL) -> Phases:
    """What each rank must move at least, without telling anybody: its share of the rows copied from
    one place to another, and as many rows added up."""
    import torch

    tokens, topk = topk_idx.shape
    hidden = x.shape[1]
    bytes_of_row = hidden + 4 * -(-hidden // 128) if fp8 else 2 * hidden
    given = torch.randint(0, 255, (tokens, bytes_of_row), dtype=torch.uint8)
    taken = torch.empty(tokens * topk, bytes_of_row, dtype=torch.uint8)
    rows = torch.randn(tokens * topk, hidden).bfloat16()
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    mixed = torch.randperm(tokens * topk).tolist()
    starts = (ctypes.c_void_p * len(mixed))(*[rows.data_ptr() + 2 * hidden * i for i in mixed])
    move = ctypes.CDLL(None).memcpy
    move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    whole = given.repeat(topk, 1)

    def dispatch() -> None:
        move(taken.data_ptr(), whole.data_ptr(), whole.numel())

    def combine(_: Any, rows: Any = rows) -> Any:  # which `starts` points into
        fused.fused_sum(
            starts,
            ctypes.c_void_p(weights.data_ptr()),
            ctypes.c_size_t(tokens),
            ctypes.c_size_t(topk),
            ctypes.c_size_t(hidden),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out

    return dispatch, combine


def rank_main(me: Rank) -> None:
    """For each cell, rounds of all lanes in turn; one row per cell and lane, microseconds."""
    import torch
    import torch.distributed as dist

    from mooncake.ep import Buffer

    torch.set_num_threads(1)
    dist.init_process_group("mooncake-cpu", store=me.open_store(), rank=me.rank, world_size=me.size)
    gloo = dist.new_group(backend="gloo")
    fused = compiled_sum()
    hidden, topk = me.spec["hidden"], me.spec["topk"]
    for cell in me.spec["cells"]:
        most, experts, fp8 = cell["tokens"], cell["experts"], cell["format"] == "fp8"
        torch.manual_seed(me.rank)
        x = torch.randn(most, hidden).bfloat16()
        topk_idx = torch.rand(most, experts).topk(topk).indices
        weights = torch.rand(most, topk).softmax(1)
        hint = Buffer.get_low_latency_rdma_size_hint(most, hidden, me.size, experts)
        buffer = Buffer(
            dist.group.WORLD, num_rdma_bytes=hint, low_latency_mode=True, explicitly_destroy=True
        )
        how = (buffer, x, topk_idx, weights, most, experts, fp8)
        lanes: dict[str, Phases] = {EP: by_ep(*how), IN_PLACE: by_ep(*how, zero_copy=True)}
        if "gloo" in me.spec["lanes"]:
            lanes["gloo"] = by_all_to_all(gloo, x, topk_idx, weights, experts)
        if "mooncake-cpu" in me.spec["lanes"]:
            lanes["mooncake-cpu"] = by_all_to_all(dist.group.WORLD, x, topk_idx, weights, experts)
        if COPY in me.spec["lanes"]:
            lanes[COPY] = by_copies(x, topk_idx, weights, fp8, fused)
        check(me, lanes, fp8)
        took = {lane: {"dispatch": [], "combine": [], "both": []} for lane in lanes}
        calls = max(1, me.spec["calls"] // max(1, most // 16))
        for number in range(me.spec["rounds"] + 1):
            for lane, (dispatch, combine) in list(lanes.items())[:: 1 if number % 2 else -1]:
                times = measure(me, dispatch, combine, calls)
                if number:
                    for phase, us in times.items():
                        took[lane][phase].append(us)
        for lane, phases in took.items():
            for phase, times in phases.items():
                row = {"kind": "ep", "ranks": me.size, "lane": lane, "phase": phase, "error": None}
                me.emit({**row, **cell, **spread(times)})
        me.meeting.barrier()
        buffer.destroy()
        lanes.clear()
    dist.destroy_process_group()


def measure(
    me: Rank, dispatch: Callable[[], Any], combine: Callable[[Any], Any], calls: int
) -> dict[str, float]:
    """Microseconds of a call, slowest rank: each phase by itself, and both back to back."""
    combine(dispatch())
    took = {}
    me.meeting.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        found = dispatch()
    took["dispatch"] = time.perf_counter() - start
    me.meeting.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        combine(found)
    took["combine"] = time.perf_counter() - start
    me.meeting.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        combine(dispatch())
    took["both"] = time.perf_counter() - start
    return {
        phase: max(me.meeting.exchange(seconds)) / calls * 1e6 for phase, seconds in took.items()
    }


def check(me: Rank, lanes: dict[str, Phases], fp8: bool) -> None:
    """The lanes that exchange anything agree up to rounding: experts give back what they got."""
    sums = {
        lane: combine(dispatch()).float()
        for lane, (dispatch, combine) in lanes.items()
        if lane != COPY
    }
    for lane, found in sums.items():
        off = float((found - sums[EP]).abs().max())
        if off > (0.3 if fp8 else 0.05) and not fp8:
            raise RuntimeError(f"{lane} and {EP} differ by {off} on rank {me.rank}")


def run(args: argparse.Namespace) -> Rows:
    cells = [
        {"tokens": tokens, "experts": experts, "format": form}
        for tokens in args.tokens
        for experts in args.experts
        for form in args.formats
    ]
    progress, rows = Progress(len(args.ranks)), []
    for ranks in args.ranks:
        progress.step(f"{ranks} ranks")
        spec = {
            "cells": cells,
            "lanes": args.lanes,
            "rounds": args.rounds,
            "calls": args.calls,
            "hidden": args.hidden,
            "topk": args.topk,
        }
        rows += run_job("bench_ep:rank_main", ranks, spec)
    return rows


def cells_of(rows: Rows) -> dict[str, dict[tuple[str, str], float]]:
    """By cell: (lane, phase) -> the median in microseconds."""
    cells: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        what = (f"{row[field]} {field}" for field in ("ranks", "tokens", "experts"))
        name = ", ".join([*what, row["format"]])
        cells.setdefault(name, {})[row["lane"], row["phase"]] = row["p50_us"]
    return cells


def judge(rows: Rows) -> list[Finding]:
    cells = cells_of(rows)
    found = []
    for lane, limit in LIMITS.items():
        ratios = {
            name: cell[EP, "both"] / cell[lane, "both"]
            for name, cell in cells.items()
            if (lane, "both") in cell
        }
        if ratios:
            found.append(gates.at_most(f"dispatch + combine: ours / {lane}", ratios, limit))
    for lane, phase in ((EP, "dispatch"), (IN_PLACE, "combine")):
        ratios = {
            name: cell[lane, phase] / cell[COPY, phase]
            for name, cell in cells.items()
            if (COPY, phase) in cell and " 128 tokens" in name
        }
        if ratios:
            found.append(gates.at_most(f"{phase}: ours / copies", ratios, 1 / LEAST_OF_COPY))
    return found


def show(rows: Rows) -> None:
    cells = cells_of(rows)
    lanes = list(dict.fromkeys(row["lane"] for row in rows))
    headers = [
        "cell",
        *[f"{lane} {phase}" for lane in lanes for phase in ("dispatch", "combine", "both")],
    ]
    lines = [
        [
            name,
            *[
                short(cell.get((lane, phase)))
                for lane in lanes
                for phase in ("dispatch", "combine", "both")
            ],
        ]
        for name, cell in cells.items()
    ]
    print_table("dispatch and combine, us, medians, slowest rank", headers, lines)
    for lane in lanes[1:]:
        ratio = geomean(cell[EP, "both"] / cell[lane, "both"] for cell in cells.values())
        print(f"geometric mean of {EP} / {lane}: {ratio:.3f}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=numbers, default=[2, 4])
    parser.add_argument("--tokens", type=numbers, default=[128, 16, 1], help="of each rank")
    parser.add_argument("--experts", type=numbers, default=[32, 256])
    parser.add_argument("--formats", type=names, default=["bf16", "fp8"])
    parser.add_argument("--lanes", type=names, default=["gloo", "mooncake-cpu", COPY])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=64, help="a round, of 16 tokens or fewer")
    parser.add_argument("--json", help="write JSON lines here")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is broken")
    args = parser.parse_args(argv)
    rows = run(args)
    findings = judge(rows)
    show(rows)
    gates.show(findings, "summary")
    write_json_lines(args.json, [machine_facts(), *rows, *[f.as_row() for f in findings]])
    return gates.exit_code(rows, findings, args.gate)


if __name__ == "__main__":
    sys.exit(run_main(main))
