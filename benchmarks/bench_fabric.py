"""Measures network cards between two hosts with four links of 1 Gbit/s, beside iperf3 over all four
at once. Each link is a card of libfabric's provider over TCP.

    python benchmarks/bench_fabric.py --json out.json --plot out.png --gate     # needs root, iperf3
    python benchmarks/bench_fabric.py --parts blocks --rounds 1
    python benchmarks/bench_fabric.py --parts failure --seconds 4

The hosts are network namespaces (tests/hosts.py) and share this machine's processor. The engines'
own TCP connections have a separate link, as on machines whose cards carry nothing else. Parts:
`blocks` moves memory by TransferEngine, as many blocks or one large one; `failure` takes one link
down meanwhile and brings it back; `groups` is all_reduce, and dispatch and combine of experts' rows
in both modes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import gates
import iperf
from common import (
    OthersWatch,
    Progress,
    format_size,
    machine_facts,
    names,
    parse_size,
    print_table,
    short,
    write_json_lines,
)
from gates import Finding
from ranks import HERE, Rank, enter_namespace, run_job, run_main

sys.path.insert(0, str(HERE.parent / "tests"))
import hosts

Rows = list[dict[str, Any]]

LINKS = 4
LINK_BITS = 10**9
MTU = 9000
DEVICES = [f"eth{link}" for link in range(1, LINKS + 1)]  # eth0 is the link of the engines' TCP
FAILING = 2  # index of the link that is taken down
ENV = {
    "MOONCAKE_FABRIC_REQUIRE": "tcp;ofi_rxm",
    "MC_TE_FILTERS": ",".join(DEVICES),
    "GLOO_SOCKET_IFNAME": "eth0",
}
PARTS = ["blocks", "failure", "groups"]
LEAST_WITHOUT_ONE, LEAST_WITH_ALL = 0.95, 0.95  # share of three links; of four
LEAST_OF_BUS = 0.9
SETTLED_S = {"down": 1.0, "up": 5.0}  # rates are measured this long after the event
SAMPLE_S = 0.05
REDUCED, REDUCTIONS = 64 << 20, 5  # bytes; calls in a round
TOKENS, EXPERTS, HIDDEN, TOPK = 128, 32, 7168, 8
PREFILL_TOKENS = 4096


@dataclass(frozen=True)
class Load:
    block: int
    batch: int
    threads: int
    least: float  # share of the four links together

    @property
    def name(self) -> str:
        alone = self.batch * self.threads == 1
        return f"{'one ' if alone else ''}{format_size(self.block)}{'' if alone else ' blocks'}"


LOADS = [Load(64 << 10, 64, 2, 0.9), Load(1 << 20, 16, 2, 0.975), Load(64 << 20, 1, 1, 0.95)]
STEADY = Load(1 << 20, 4, 8, 0.95)  # runs while a link fails
BUFFER = max(load.block * load.batch * load.threads for load in [*LOADS, STEADY])


# ---- in the ranks


def host_of(me: Rank) -> str:
    """Enters this rank's host; returns its address there."""
    enter_namespace(me.spec["namespaces"][me.rank])
    address: str = me.spec["addresses"][me.rank]
    os.environ["MOONCAKE_HOST_IP"] = address
    return address


def engine_of(me: Rank) -> tuple[Any, Any, str]:
    """Returns an engine, memory registered with it, and the name of the target, rank 1."""
    from mooncake.engine import TransferEngine
    from mooncake_backend.transfer_bench import Buffer

    engine, address = TransferEngine(), host_of(me)
    if engine.initialize(address, "P2PHANDSHAKE", "fabric", ""):
        raise RuntimeError("the engine does not start: the log above says why")
    buffer = Buffer(engine, BUFFER)
    target = me.meeting.exchange(f"{address}:{engine.get_rpc_port()}")[1]
    if me.rank == 0 and engine.warmup_efa_segment(target):
        raise RuntimeError("not every card reaches the target")
    return engine, buffer, target


def blocks_main(me: Rank) -> None:
    """Runs all loads, reading and writing, in turns with iperf3."""
    from mooncake_backend import transfer_bench

    engine, buffer, target = engine_of(me)
    there = [host[me.rank] for host in me.spec["links"]]
    servers = [iperf.server(address) for address in there] if me.rank == 1 else []
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(me.spec["rounds"]):
        for verb in ("write", "read"):
            if me.rank == 0:
                rate = iperf.bits([link[1] for link in me.spec["links"]], ["-R"] * (verb == "read"))
                found.setdefault(("iperf3", verb), []).append({"bits": rate})
            for load in [load for load in LOADS if load.block in me.spec["blocks"]]:
                me.meeting.barrier()
                spent, start, bits = time.process_time(), time.perf_counter(), 0.0
                if me.rank == 0:
                    asked = transfer_bench.Load(verb, load.block, load.batch, load.threads)
                    result = transfer_bench.measure(
                        engine, target, buffer, asked, me.spec["seconds"], lambda _: None
                    )
                    bits = result.bytes_per_second * 8
                me.meeting.barrier()
                cores = (time.process_time() - spent) / (time.perf_counter() - start)
                ours, theirs = me.meeting.exchange(cores)
                row = {"bits": bits, "cores": ours, "cores_there": theirs}
                found.setdefault((load.name, verb), []).append(row)
                me.say(f"round {number}: {verb}, {load.name}: {bits / 1e9:.3f} Gbit/s")
    for (what, verb), runs in found.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        me.emit({"kind": "blocks", "what": what, "verb": verb, "error": None, **middle})
    for server in servers:
        server.kill()
        server.wait()
    me.meeting.barrier()
    buffer.close()


def failure_main(me: Rank) -> None:
    """Moves blocks all the time, while a link goes down at one of the ends and comes back."""
    engine, buffer, target = engine_of(me)
    if me.rank == 0:
        for verb, end in me.spec["failures"]:
            me.say(f"{verb}, the link goes down at the {'initiator' if end == 0 else 'target'}")
            namespace = me.spec["namespaces"][end]
            me.emit(with_failure(engine, buffer, target, verb, namespace, me.spec["seconds"]))
    me.meeting.barrier()
    buffer.close()


def with_failure(
    engine: Any, buffer: Any, target: str, verb: str, namespace: str, seconds: float
) -> dict[str, Any]:
    """Returns one row: bytes moved until each moment, and when the link went down and up."""
    there = engine.get_first_buffer_address(target)
    call = {"read": engine.batch_transfer_sync_read, "write": engine.batch_transfer_sync_write}
    ended, failed = threading.Event(), [0] * STEADY.threads

    def work(thread: int) -> None:
        firsts = [(thread * STEADY.batch + number) * STEADY.block for number in range(STEADY.batch)]
        mine, theirs = ([base + first for first in firsts] for base in (buffer.address, there))
        while not ended.is_set() and not failed[thread]:
            failed[thread] = call[verb](target, mine, theirs, [STEADY.block] * STEADY.batch)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(STEADY.threads)]
    for thread in threads:
        thread.start()
    counted = {"read": "bytes_read", "write": "bytes_written"}[verb]
    start, events = time.perf_counter(), {}
    begun, series = engine.get_counters()[counted], []
    pause = seconds / 3
    plan = [("down", pause), ("up", 2 * pause), ("end", 3 * pause + SETTLED_S["up"])]
    try:
        for state, when in plan:
            while (now := time.perf_counter() - start) < when:
                series.append((now, engine.get_counters()[counted] - begun))
                time.sleep(SAMPLE_S)
            if state != "end":
                command = ["ip", "-n", namespace, "link", "set", f"eth{FAILING}", state]
                subprocess.run(command, check=True, timeout=10)
                events[state] = time.perf_counter() - start
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    error = f"a transfer failed: {min(failed)}" if any(failed) else None
    where = "initiator" if namespace.endswith("-0") else "target"
    return {"kind": "failure", "verb": verb, "end": where, "series": series, "events": events,
            "error": error}  # fmt: skip


def reduce_main(me: Rank) -> None:
    """Measures all_reduce of one size, and iperf3 in both directions at once."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = me.open_store()
    host_of(me)
    dist.init_process_group("mooncake-cpu", store=store, rank=me.rank, world_size=me.size)
    servers = [iperf.server(link[1]) for link in me.spec["links"]] if me.rank == me.size - 1 else []
    tensor = torch.ones(REDUCED // 4)
    took, rates, cores = [], [], []
    for _ in range(me.spec["rounds"]):
        if me.rank == 0:
            rates.append(iperf.bits([link[1] for link in me.spec["links"]], ["--bidir"]))
        for call in range(1 + REDUCTIONS):  # the first one follows a pause and does not count
            tensor.fill_(1)
            me.meeting.barrier()
            spent, start = time.process_time(), time.perf_counter()
            dist.all_reduce(tensor)
            seconds = time.perf_counter() - start
            if (tensor != me.size).any():
                raise RuntimeError("the sum is wrong")
            slowest = max(me.meeting.exchange(seconds))
            cpu = sum(me.meeting.exchange(time.process_time() - spent))
            if call > 0:
                took.append(slowest)
                cores.append(cpu / slowest)
    for server in servers:
        server.kill()
        server.wait()
    bus = REDUCED * 2 * (me.size - 1) / me.size * 8 / statistics.median(took)
    row = {"kind": "groups", "what": f"all_reduce {format_size(REDUCED)}", "error": None}
    both = statistics.median(rates) if rates else 0.0
    me.emit({**row, "bits": bus, "iperf3_bits": both, "cores": statistics.median(cores)})
    dist.destroy_process_group()


# ---- starting the ranks


def run_part(part: str, args: argparse.Namespace) -> Rows:
    with hosts.Hosts(2, networks=LINKS + 1, v6=False) as net:
        for link in range(1, LINKS + 1):
            net.limit(LINK_BITS, network=link)
        where = {
            "namespaces": [host.namespace for host in net.hosts],
            "addresses": [host.v4[0] for host in net.hosts],
            "links": [[host.v4[link] for host in net.hosts] for link in range(1, LINKS + 1)],
            "rounds": args.rounds,
            "blocks": args.blocks,
            "seconds": args.seconds,
        }
        if part == "blocks":
            env = {**ENV, "MOONCAKE_TRANSPORTS": "fabric"}
            return run_job("bench_fabric:blocks_main", 2, where, env=env)
        if part == "failure":
            env = {**ENV, "MOONCAKE_TRANSPORTS": "fabric"}
            failures = [(verb, end) for verb in ("write", "read") for end in (0, 1)]
            spec = {**where, "failures": failures, "seconds": 3 * args.seconds}
            return run_job("bench_fabric:failure_main", 2, spec, env=env)
        env = {**ENV, "MOONCAKE_TRANSPORTS": "shm,fabric"}
        rows = run_job("bench_fabric:reduce_main", 2, where, env=env)
        cell = {"tokens": TOKENS, "experts": EXPERTS, "format": "bf16"}
        spec = {**where, "cells": [cell], "lanes": [], "calls": 64, "hidden": HIDDEN, "topk": TOPK}
        both = rows[0]["iperf3_bits"]

        def add(phase: str, tokens: int, bits: float) -> None:
            what = f"{phase}, {tokens} tokens x {HIDDEN}"
            row = {"kind": "groups", "what": what, "bits": bits, "iperf3_bits": both}
            rows.append({**row, "cores": None, "error": None})

        for row in run_job("bench_ep:rank_main", 2, spec, env=env):
            if row["lane"] == "mooncake.ep" and row["phase"] in ("dispatch", "combine"):
                add(row["phase"], TOKENS, row["crossing_bytes"] * 8 / (row["p50_us"] * 1e-6))
        normal = {**where, "tokens": [PREFILL_TOKENS]}
        for row in run_job("bench_ep_normal:rank_main", 2, normal, env=env):
            add(row["what"], row["tokens"], row["bits"])
        return rows


def rate_between(series: list[tuple[float, int]], begin: float, end: float) -> float:
    """The rate in bit/s between two moments of the series."""
    inside = [(when, moved) for when, moved in series if begin <= when <= end]
    (first, before), (last, after) = inside[0], inside[-1]
    return (after - before) * 8 / (last - first)


def phases_of(row: dict[str, Any]) -> dict[str, float]:
    """Rates with all links, without one, and with all again, each after it has settled."""
    series, events = row["series"], row["events"]
    return {
        "before": rate_between(series, 0.3, events["down"]),
        "down": rate_between(series, events["down"] + SETTLED_S["down"], events["up"]),
        "up": rate_between(series, events["up"] + SETTLED_S["up"], series[-1][0]),
    }


def sizes(text: str) -> list[int]:
    return [parse_size(part) for part in names(text)]


def at_least(name: str, value: float, least: float, detail: str = "") -> Finding:
    return Finding(name, value, f">= {least:g}", value >= least, detail)


def judge(rows: Rows) -> list[Finding]:
    found = []
    least = {load.name: load.least for load in LOADS}
    all_links = LINKS * LINK_BITS
    for row in rows:
        if row["kind"] == "blocks" and row["what"] in least:
            name = f"{row['verb']}, {row['what']}: of {LINKS} links"
            found.append(at_least(name, row["bits"] / all_links, least[row["what"]]))
        elif row["kind"] == "failure":
            name, rates = f"{row['verb']}, a link down at the {row['end']}", phases_of(row)
            without = rates["down"] / (all_links - LINK_BITS)
            found.append(at_least(f"{name}: of the others", without, LEAST_WITHOUT_ONE))
            found.append(at_least(f"{name}: of all again", rates["up"] / all_links, LEAST_WITH_ALL))
        elif row["kind"] == "groups":
            found.append(at_least(f"{row['what']}: of the bus", row["bits"] / all_links,
                                  LEAST_OF_BUS if "combine" not in row["what"] else 0))  # fmt: skip
    return found


def show(rows: Rows) -> None:
    gbit = 1e-9
    blocks = [row for row in rows if row["kind"] == "blocks"]
    lines = [
        [row["what"], row["verb"], f"{row['bits'] * gbit:.3f}",
         f"{row['bits'] / LINKS / LINK_BITS:.3f}", short(row.get("cores")),
         short(row.get("cores_there"))]
        for row in blocks
    ]  # fmt: skip
    headers = ["what", "verb", "Gbit/s", "of the links", "cores here", "cores there"]
    if lines:
        print_table(f"{LINKS} links of 1 Gbit/s, MTU {MTU}, medians", headers, lines)
    lines = [
        [row["verb"], row["end"], *(f"{rate * gbit:.3f}" for rate in phases_of(row).values()),
         row["error"] or "none"]
        for row in rows if row["kind"] == "failure"
    ]  # fmt: skip
    if lines:
        print_table(
            "one link taken down: Gbit/s", ["verb", "at", "before", "without", "again", "failed"],
            lines,
        )  # fmt: skip
    lines = [
        [row["what"], f"{row['bits'] * gbit:.3f}", f"{row['bits'] / LINKS / LINK_BITS:.3f}",
         f"{row['iperf3_bits'] * gbit:.3f}", short(row["cores"])]
        for row in rows if row["kind"] == "groups"
    ]  # fmt: skip
    if lines:
        headers = ["what", "Gbit/s each way", "of the links", "iperf3, both ways", "cores, both"]
        print_table("groups of two ranks", headers, lines)


def plot(path: str | None, rows: Rows) -> None:
    """Draws the rate over time around a link's failure, a panel for each end and verb."""
    failures = [row for row in rows if row["kind"] == "failure"]
    if not path or not failures:
        return
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure, axes = pyplot.subplots(
        1, len(failures), figsize=(3.6 * len(failures), 3), squeeze=False, sharey=True
    )
    for axis, row in zip(axes.flat, failures, strict=True):
        series, step = row["series"], 4
        points = [
            (after[0], (after[1] - before[1]) * 8e-9 / (after[0] - before[0]))
            for before, after in zip(series, series[step:], strict=False)
        ]
        axis.plot(*zip(*points, strict=True), linewidth=1)
        axis.axvspan(row["events"]["down"], row["events"]["up"], alpha=0.15, color="C3")
        axis.set(title=f"{row['verb']}, down at the {row['end']}", xlabel="seconds")
        axis.set_ylim(0, LINKS * 1.1)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("Gbit/s")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"plot: {path}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=names, default=PARTS)
    parser.add_argument("--blocks", type=sizes, default=[load.block for load in LOADS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="of each load, and while down")
    parser.add_argument("--json", help="write JSON lines here")
    parser.add_argument("--plot", help="write a PNG here")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is broken")
    args = parser.parse_args(argv)
    if why := hosts.why_not() or (not shutil.which("iperf3") and "no iperf3"):
        print(f"no hosts here: {why}")
        return 1
    watch, rows, progress = OthersWatch(), [], Progress(len(args.parts))
    for part in args.parts:
        progress.step(part)
        rows += run_part(part, args)
    show(rows)
    findings = judge(rows)
    gates.show(findings, f"summary, of {LINKS} links of 1 Gbit/s")
    others = watch.tell()
    plot(args.plot, rows)
    facts = {**machine_facts(), "others": others}
    write_json_lines(args.json, [facts, *rows, *[f.as_row() for f in findings]])
    return gates.exit_code(rows, findings, args.gate)


if __name__ == "__main__":
    sys.exit(run_main(main))
