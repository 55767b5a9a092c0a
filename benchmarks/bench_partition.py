"""Measures how long ranks take to notice a partition. It begins when a host's link is cut, at a
random moment of a loop of all_reduce. It ends when the last rank of the smaller side has raised
MinorityError, and when the last one of the other side has a result again. Both times are in
milliseconds beyond failure_timeout.

    python benchmarks/bench_partition.py --layouts 1+1,1+2,2+2,1+3 --cuts 20 --json out.json --gate

Hosts are network namespaces (tests/hosts.py), so it needs root. There is no other backend to
compare with: Gloo raises on both sides, and MPI ends them. docs/benchmarks.md has the method.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import gates
from common import (
    OthersWatch,
    Progress,
    format_size,
    machine_facts,
    names,
    parse_size,
    percentile_text,
    percentiles,
    print_table,
    write_json_lines,
)
from fork_server import WARM_UP, Crew, Member, random_moment_s
from ranks import HERE, enter_namespace, run_main

sys.path.insert(0, str(HERE.parent / "tests"))
import hosts

LIMIT_MS = 100.0  # beyond failure_timeout, p99
SIDES = ("minority", "resumed")

Rows = list[dict[str, Any]]


def rank_main(me: Member) -> None:
    """Calls all_reduce until a rank is missing in the result or it raises, then reports when."""
    import torch
    import torch.distributed as dist

    from mooncake_backend import MinorityError, MooncakeBackendOptions

    spec = me.spec
    torch.set_num_threads(1)
    store = me.open_store(spec["deadline_s"])  # its connection stays in the crew's namespace
    enter_namespace(spec["namespaces"][me.rank])
    os.environ["MOONCAKE_HOST_IP"] = spec["addresses"][me.rank]  # not the address toward the store
    dist.init_process_group(
        "mooncake-cpu",
        store=store,
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=spec["deadline_s"]),
        pg_options=MooncakeBackendOptions(failure_timeout=spec["failure_timeout_s"]),
    )
    tensor, done = torch.empty(max(1, spec["bytes"] // 4)), 0
    told: dict[str, Any] = {"side": "resumed"}
    try:
        value = float(me.size)
        while value == me.size:
            tensor.fill_(1.0)
            dist.all_reduce(tensor)
            value = tensor[0].item()
            done += 1
            if done == WARM_UP:
                me.link.send("ready")
        told["value"] = value
    except MinorityError:
        told["side"] = "minority"
    told["ended"] = time.monotonic()
    me.link.send(told)
    me.link.poll(None)


def winners_of(layout: list[int], cut: int) -> list[int]:
    """The ranks that go on: the larger side, or of equal sides that with rank 0."""
    host_of = [host for host, ranks in enumerate(layout) for _ in range(ranks)]
    away = [rank for rank, host in enumerate(host_of) if host == cut]
    stay = [rank for rank, host in enumerate(host_of) if host != cut]
    return max(away, stay, key=lambda side: (len(side), 0 in side))


def one_cut(
    crew: Crew, net: hosts.Hosts, layout: list[int], size: int, timeout_s: float, rng: random.Random
) -> dict[str, Any]:
    """Cuts a random host's link once; returns a row of kind 'partition_cut'."""
    cut, ranks = rng.randrange(len(layout)), sum(layout)
    winners = winners_of(layout, cut)
    homes = [net[host] for host, count in enumerate(layout) for _ in range(count)]
    spec = {
        "bytes": size,
        "failure_timeout_s": timeout_s,
        "deadline_s": 60.0,
        "namespaces": [host.namespace for host in homes],
        "addresses": [host.v4[0] for host in homes],
    }
    row = {
        "kind": "partition_cut",
        "layout": "+".join(map(str, layout)),
        "bytes": size,
        "beyond_ms": timeout_s * 1e3,
        "error": None,
        **{f"{side}_ms": None for side in SIDES},
    }
    everybody = list(range(ranks))
    with crew.job("bench_partition:rank_main", ranks, spec, {}) as job:
        if wrong := job.await_ready(spec["deadline_s"]):
            return {**row, "error": wrong}
        time.sleep(random_moment_s(rng))
        before = time.monotonic()
        net.link(cut, up=False)
        try:
            told = job.hear(everybody, spec["deadline_s"])
        finally:
            net.link(cut, up=True)
        for rank in everybody:
            side = "resumed" if rank in winners else "minority"
            said = told.get(rank, {})
            if said.get("side") != side or said.get("value", len(winners)) != len(winners):
                return {**row, "error": f"rank {rank}: {said}, expected {side}"}
        for side, chosen in (
            ("resumed", winners),
            ("minority", [rank for rank in everybody if rank not in winners]),
        ):
            last = max(told[rank]["ended"] for rank in chosen)
            row[f"{side}_ms"] = round((last - before - timeout_s) * 1e3, 3)
    return row


def run(layouts: Iterable[str], size: int, cuts: int, timeout_s: float, seed: int = 1) -> Rows:
    """Rows of kind 'partition', one per layout, then of kind 'partition_cut'."""
    rng, rows, every = random.Random(seed), [], []
    parsed = [[int(count) for count in layout.split("+")] for layout in layouts]
    progress = Progress(cuts * len(parsed))
    with hosts.Hosts(max(map(len, parsed)), v6=False) as net, Crew(["bench_partition"]) as crew:
        for layout in parsed:
            found = []
            for _ in range(cuts):
                found.append(one_cut(crew, net, layout, size, timeout_s, rng))
                if found[-1]["error"]:
                    progress.say(f"FAILED {found[-1]['layout']}: {found[-1]['error']}")
                progress.step(found[-1]["layout"])
            rows.append(summarize(found))
            every += found
    return rows + every


def summarize(cuts: Rows) -> dict[str, Any]:
    fields = ("layout", "bytes", "beyond_ms")
    wrong = [row["error"] for row in cuts if row["error"]]
    row = {"kind": "partition", **{field: cuts[0][field] for field in fields}, "cuts": len(cuts)}
    for side in SIDES:
        row |= percentiles(side, [one[f"{side}_ms"] for one in cuts if not one["error"]])
    row["error"] = f"{len(wrong)} of {len(cuts)} cuts: {wrong[0]}" if wrong else None
    return row


def judge(rows: Rows) -> list[gates.Finding]:
    cells = [row for row in rows if row["kind"] == "partition"]
    return [
        gates.at_most(
            f"{side}: p99, ms beyond failure_timeout",
            {row["layout"]: row[f"{side}_p99_ms"] for row in cells if row[f"{side}_p99_ms"]},
            LIMIT_MS,
        )
        for side in SIDES
    ]


def show(rows: Rows) -> None:
    lines = []
    for row in rows:
        if row["kind"] != "partition":
            continue
        times = [percentile_text(row, side) for side in SIDES]
        lines.append([row["layout"], format_size(row["bytes"]), *times, str(row["cuts"])])
        if row["error"]:
            print(f"FAILED {row['layout']}: {row['error']}")
    title = "a host is cut off: p50/p90/p99/max, ms beyond failure_timeout, last rank"
    print_table(title, ["ranks per host", "size", *SIDES, "cuts"], lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", type=names, default=["1+1", "1+2", "2+2", "1+3"])
    parser.add_argument("--size", type=parse_size, default="1K", help="of the all_reduce")
    parser.add_argument("--cuts", type=int, default=20, help="of each layout")
    parser.add_argument("--failure-timeout", type=float, default=1.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1, help="of hosts and moments")
    parser.add_argument("--json", help="write JSON lines here")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is broken")
    args = parser.parse_args(argv)
    if why := hosts.why_not():
        print(f"no hosts here: {why}")
        return int(args.gate)
    watch, facts = OthersWatch(), machine_facts()
    rows = run(args.layouts, args.size, args.cuts, args.failure_timeout, args.seed)
    findings = judge(rows)
    show(rows)
    gates.show(findings, "summary")
    facts["cpu_share_of_others"] = watch.tell()
    write_json_lines(args.json, [facts, *rows, *[finding.as_row() for finding in findings]])
    cells = [row for row in rows if row["kind"] == "partition"]
    return gates.exit_code(cells, findings, args.gate)


if __name__ == "__main__":
    sys.exit(run_main(main))
