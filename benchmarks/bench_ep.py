"""Measures dispatch and combine, beside the same exchange by all_to_all_single and plain copies.

    python benchmarks/bench_ep.py --ranks 2,4 --experts 32,256 --tokens 128,1 --json out.json
    python benchmarks/bench_ep.py --hosts 2 --ranks 4 --experts 32 --tokens 128,1 --lanes gloo

The lanes are interleaved in the same processes; times are those of the slowest rank. The exchange
by all_to_all_single sends a row for each (token, expert), sorted by expert: first the counts, then
the rows with uneven splits. Its combine sends them back and adds them up by weight.

With --hosts the ranks are spread over network namespaces, joined by links of 1 Gbit/s
(tests/hosts.py; needs root). The payload that must cross a link is compared with iperf3's rate in
the same run. For a dispatch, each token counts once for each other host that has one of its
experts; for a combine, each (token, expert) counts one row.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gates
import iperf
from common import (
    Progress,
    geomean,
    machine_facts,
    names,
    numbers,
    plot_panels,
    print_table,
    short,
    spread,
    write_json_lines,
)
from gates import Finding
from ranks import HERE, Rank, enter_namespace, run_job, run_main

sys.path.insert(0, str(HERE.parent / "tests"))
import hosts

Rows = list[dict[str, Any]]
Phases = tuple[Callable[[], Any], Callable[[Any], Any]]  # dispatch; combine of its result

EP = "mooncake.ep"
IN_PLACE = "in place"  # EP with zero_copy: experts write to the memory that the others read
WATCHED = "all options"  # EP with all options for losses: a mask and a timeout
COPY = "memcpy"
SIGNALS = "signals"  # two barriers, without data
LIMITS = {"gloo": 0.2, "mooncake-cpu": 1.0}  # of EP / lane, for dispatch and combine together
LEAST_OF_COPY = 0.6
MOST_OF_SIGNALS, MOST_SMALL_US = 1.5, 60.0  # one token, two ranks
MOST_FOR_SAFETY = 1.02
LEAST_OF_IPERF = 0.95
LINK_BITS = 10**9


def compiled_sum() -> ctypes.CDLL:
    folder = tempfile.mkdtemp(prefix="bench-ep-")
    library = Path(folder, "fused_sum.so")
    command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, str(HERE / "fused_sum.c")], check=True)
    return ctypes.CDLL(str(library))


def by_all_to_all(group: Any, x: Any, topk_idx: Any, weights: Any, experts: int) -> Phases:
    """The exchange on any backend of torch.distributed."""
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
        # From (rank, expert) to (expert, rank): the rows of an expert become contiguous.
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
    watched: bool = False,
) -> Phases:
    """The experts' rows come from the caller's memory, or with zero_copy from memory that the
    others read. The time in which experts write them there is not measured."""
    import torch

    answers: list[Any] = []
    written: set[int] = set()
    options: dict[str, Any] = {}
    if watched:
        active = torch.ones(buffer.group_size, dtype=torch.int32)
        options = {"active_ranks": active, "timeout_us": 10_000_000}

    def dispatch() -> Any:
        return buffer.low_latency_dispatch(x, topk_idx, most, experts, use_fp8=fp8, **options)

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
        return buffer.low_latency_combine(answers[0], topk_idx, weights, handle, **options)[0]

    return dispatch, combine


def by_copies(x: Any, topk_idx: Any, weights: Any, fp8: bool, fused: ctypes.CDLL) -> Phases:
    """The least that each rank must move, without any signal: it copies its share of the rows, and
    adds up as many rows. The results of two dispatches are valid at a time, so two targets take
    turns."""
    import torch

    tokens, topk = topk_idx.shape
    hidden = x.shape[1]
    bytes_of_row = hidden + 4 * -(-hidden // 128) if fp8 else 2 * hidden
    given = torch.randint(0, 255, (tokens, bytes_of_row), dtype=torch.uint8)
    taken = itertools.cycle(torch.empty(2, tokens * topk, bytes_of_row, dtype=torch.uint8))
    rows = torch.randn(tokens * topk, hidden).bfloat16()
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    mixed = torch.randperm(tokens * topk).tolist()
    starts = (ctypes.c_void_p * len(mixed))(*[rows.data_ptr() + 2 * hidden * i for i in mixed])
    move = ctypes.CDLL(None).memcpy
    move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    whole = given.repeat(topk, 1)

    def dispatch() -> None:
        move(next(taken).data_ptr(), whole.data_ptr(), whole.numel())

    def combine(_: Any, rows: Any = rows) -> Any:  # keeps `rows` alive: `starts` points into it
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
    """Measures all lanes in turn, for each cell; one row per cell and lane, microseconds."""
    import torch
    import torch.distributed as dist

    from mooncake.ep import Buffer

    torch.set_num_threads(1)
    store = me.open_store()
    if "namespaces" in me.spec:
        enter_namespace(me.spec["namespaces"][me.rank])
        os.environ["MOONCAKE_HOST_IP"] = me.spec["addresses"][me.rank]
        os.environ.update(GLOO_SOCKET_IFNAME="eth0")
    dist.init_process_group("mooncake-cpu", store=store, rank=me.rank, world_size=me.size)
    gloo = dist.new_group(backend="gloo") if "gloo" in me.spec["lanes"] else None
    fused = compiled_sum() if COPY in me.spec["lanes"] else None
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
        lanes: dict[str, Phases] = {
            EP: by_ep(*how),
            IN_PLACE: by_ep(*how, zero_copy=True),
            WATCHED: by_ep(*how, watched=True),
        }
        if "gloo" in me.spec["lanes"]:
            lanes["gloo"] = by_all_to_all(gloo, x, topk_idx, weights, experts)
        if "mooncake-cpu" in me.spec["lanes"]:
            lanes["mooncake-cpu"] = by_all_to_all(dist.group.WORLD, x, topk_idx, weights, experts)
        if fused is not None:
            lanes[COPY] = by_copies(x, topk_idx, weights, fp8, fused)
        if SIGNALS in me.spec["lanes"]:
            lanes[SIGNALS] = dist.barrier, lambda _: dist.barrier()
        check(me, lanes, fp8)
        took = {lane: {"dispatch": [], "combine": [], "both": []} for lane in lanes}
        calls = max(1, me.spec["calls"] // max(1, most // 16))
        for number in range(me.spec["rounds"] + 1):
            for lane, (dispatch, combine) in list(lanes.items())[:: 1 if number % 2 else -1]:
                times = measure(me, dispatch, combine, calls)
                if number:
                    for phase, us in times.items():
                        took[lane][phase].append(us)
        crossing = most_crossing(me, topk_idx, experts, fp8)
        for lane, phases in took.items():
            for phase, times in phases.items():
                row = {"kind": "ep", "ranks": me.size, "lane": lane, "phase": phase, "error": None}
                me.emit({**row, **cell, "crossing_bytes": crossing.get(phase), **spread(times)})
        me.meeting.barrier()
        buffer.destroy()
        lanes.clear()
    dist.destroy_process_group()


def measure(
    me: Rank, dispatch: Callable[[], Any], combine: Callable[[Any], Any], calls: int
) -> dict[str, float]:
    """Microseconds of a call on the slowest rank: each phase by itself, and both back to back."""
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


def most_crossing(me: Rank, topk_idx: Any, experts: int, fp8: bool) -> dict[str, int]:
    """Bytes of rows that a host must send to others; the largest of all hosts."""
    homes = me.meeting.exchange(me.spec.get("namespaces", [""] * me.size)[me.rank])
    hidden = me.spec["hidden"]
    there, back = dict.fromkeys(homes, 0), dict.fromkeys(homes, 0)
    row = hidden + 4 * -(-hidden // 128) if fp8 else 2 * hidden
    for home, chosen in zip(homes, me.meeting.exchange(topk_idx.tolist()), strict=True):
        for token in chosen:
            away = [homes[expert * me.size // experts] for expert in token]
            there[home] += row * len({host for host in away if host != home})
            for host in away:
                back[host] += 2 * hidden * (host != home)
    return {"dispatch": max(there.values()), "combine": max(back.values())}


def check(me: Rank, lanes: dict[str, Phases], fp8: bool) -> None:
    """Checks that all lanes with data agree up to rounding. The experts return their input."""
    sums = {
        lane: combine(dispatch()).float()
        for lane, (dispatch, combine) in lanes.items()
        if lane not in (COPY, SIGNALS)
    }
    for lane, found in sums.items():
        off = float((found - sums[EP]).abs().max())
        if off > (0.3 if fp8 else 0.05) and not fp8:
            raise RuntimeError(f"{lane} and {EP} differ by {off} on rank {me.rank}")


def iperf3_bits(net: hosts.Hosts) -> float:
    """iperf3's rate with both directions at once, in bit/s: that of the slower direction."""
    here, there = (["ip", "netns", "exec", net[i].namespace] for i in (0, 1))
    server = iperf.server(net[1].v4[0], there)
    try:
        return iperf.bits([net[1].v4[0]], ["--bidir"], here)
    finally:
        server.kill()
        server.wait()


def run_over_links(function: str, ranks: int, count: int, spec: dict[str, Any]) -> Rows:
    """Runs a job over hosts that links of 1 Gbit/s join, and iperf3 before and after it."""
    with hosts.Hosts(count, v6=False) as net:
        net.limit(LINK_BITS)
        namespaces = net.spread(ranks)
        address = {host.namespace: host.v4[0] for host in net.hosts}
        where = {"namespaces": namespaces, "addresses": [address[name] for name in namespaces]}
        rates = [iperf3_bits(net)]
        rows = run_job(function, ranks, {**spec, **where})
        rates.append(iperf3_bits(net))
    link = {"kind": "link", "ranks": ranks, "error": None}
    return [*rows, {**link, "iperf3_bits": statistics.mean(rates)}]


def spec_of(args: argparse.Namespace) -> dict[str, Any]:
    cells = [
        {"tokens": tokens, "experts": experts, "format": form}
        for tokens in args.tokens
        for experts in args.experts
        for form in args.formats
    ]
    return {
        "cells": cells,
        "lanes": args.lanes,
        "rounds": args.rounds,
        "calls": args.calls,
        "hidden": args.hidden,
        "topk": args.topk,
    }


def run(args: argparse.Namespace) -> Rows:
    if args.hosts:
        rows = []
        for ranks in args.ranks:
            rows += run_over_links("bench_ep:rank_main", ranks, args.hosts, spec_of(args))
        return rows
    progress, rows = Progress(len(args.ranks)), []
    for ranks in args.ranks:
        progress.step(f"{ranks} ranks")
        rows += run_job("bench_ep:rank_main", ranks, spec_of(args))
    return rows


def cells_of(rows: Rows) -> dict[str, dict[tuple[str, str], float]]:
    """By cell: (lane, phase) -> the median time in microseconds."""
    cells: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        if row["kind"] != "ep":
            continue
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
    safety = geomean(cell[WATCHED, "both"] / cell[EP, "both"] for cell in cells.values())
    found.append(gates.at_most("with mask and limit / without", {"mean": safety}, MOST_FOR_SAFETY))
    small = {n: c for n, c in cells.items() if n.startswith("2 ranks, 1 tokens")}
    if small and not any(row["kind"] == "link" for row in rows):
        us = {name: cell[EP, "both"] for name, cell in small.items()}
        found.append(gates.at_most("one token, 2 ranks: microseconds", us, MOST_SMALL_US))
        for what, limit in ((SIGNALS,), None), ((SIGNALS, COPY), MOST_OF_SIGNALS):
            ratios = {
                name: cell[EP, "both"] / sum(cell[lane, "both"] for lane in what)
                for name, cell in small.items()
                if all((lane, "both") in cell for lane in what)
            }
            if ratios:
                name = f"one token: ours / ({' + '.join(what)})"
                found.append(gates.at_most(name, ratios, limit))
    return found + judge_link(rows)


def judge_link(rows: Rows) -> list[Finding]:
    found = []
    for link in (row for row in rows if row["kind"] == "link"):
        ratios = {}
        for row in rows:
            large = row["kind"] == "ep" and row["ranks"] == link["ranks"] and row["tokens"] >= 128
            if large and row["lane"] == EP and row["crossing_bytes"]:
                bits = row["crossing_bytes"] * 8 / (row["p50_us"] * 1e-6)
                name = f"{row['phase']}, {row['experts']} experts, {row['format']}"
                ratios[name] = link["iperf3_bits"] / bits
        what = f"{link['ranks']} ranks: iperf3 ({link['iperf3_bits'] / 1e9:.3f} Gbit/s) / ours"
        if ratios:
            found.append(gates.at_most(what, ratios, 1 / LEAST_OF_IPERF))
    return found


def show(rows: Rows) -> None:
    cells = cells_of(rows)
    lanes = list(dict.fromkeys(row["lane"] for row in rows if row["kind"] == "ep"))
    headers = ["cell", "", "dispatch", "combine", "both"]
    lines = [
        [name, lane, *[short(cell.get((lane, phase))) for phase in headers[2:]]]
        for name, cell in cells.items()
        for lane in lanes
    ]
    print_table("dispatch and combine, us, medians, slowest rank", headers, lines)
    for lane in lanes[1:]:
        ratio = geomean(cell[EP, "both"] / cell[lane, "both"] for cell in cells.values())
        print(f"geometric mean of {EP} / {lane}: {ratio:.3f}")


def plot(path: str | None, rows: Rows) -> None:
    """Draws a panel for each number of ranks, number of experts and format, over tokens."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if row["kind"] == "ep" and row["phase"] == "both" and row["lane"] not in (WATCHED, SIGNALS):
            title = f"{row['ranks']} ranks, {row['experts']} experts, {row['format']}"
            points = panels.setdefault(title, {}).setdefault(row["lane"], [])
            points.append((row["tokens"], row["p50_us"]))
    columns = len({(row["experts"], row["format"]) for row in rows if row["kind"] == "ep"})
    plot_panels(
        path,
        panels,
        columns,
        title="dispatch and combine, median over rounds, slowest rank",
        x="tokens per rank",
        y="microseconds",
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=numbers, default=[2, 4])
    parser.add_argument("--tokens", type=numbers, default=[128, 16, 1], help="of each rank")
    parser.add_argument("--experts", type=numbers, default=[32, 256])
    parser.add_argument("--formats", type=names, default=["bf16", "fp8"])
    parser.add_argument("--lanes", type=names, default=["gloo", "mooncake-cpu", COPY, SIGNALS])
    parser.add_argument("--hosts", type=int, help="spread the ranks over so many, 1 Gbit/s each")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=64, help="a round, of 16 tokens or fewer")
    parser.add_argument("--json", help="write JSON lines here")
    parser.add_argument("--plot", help="write a PNG here")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is broken")
    args = parser.parse_args(argv)
    if args.hosts and (why := hosts.why_not() or (not shutil.which("iperf3") and "no iperf3")):
        print(f"no hosts here: {why}")
        return 1
    rows = run(args)
    findings = judge(rows)
    show(rows)
    plot(args.plot, rows)
    gates.show(findings, "summary")
    write_json_lines(args.json, [machine_facts(), *rows, *[f.as_row() for f in findings]])
    return gates.exit_code(rows, findings, args.gate)


if __name__ == "__main__":
    sys.exit(run_main(main))
