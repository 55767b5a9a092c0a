"""Dispatch and combine of the normal mode, beside plain copies of the same bytes and beside the
same exchange by all_to_all_single, on Gloo and on ours. They take turns in the same processes.

    python benchmarks/bench_ep_normal.py --ranks 2,4 --tokens 4096 --json out.json
    python benchmarks/bench_ep_normal.py --hosts 2 --ranks 2,4 --tokens 1024

Beside a dispatch, plain copies: each rank copies its own rows once and the rows that it receives
once. Beside a combine, a fused loop (embedding_bag) over as many rows as come back, which lie in
this rank's memory. The exchange by all_to_all_single sorts each rank's rows by receiver with
index_select, and adds up those that come back with index_add.

With --hosts the ranks are spread over network namespaces, joined by links of 1 Gbit/s (needs root).
The rows that must cross a link are compared with iperf3's rate in both directions at once.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import gates
from bench_ep import hosts, run_over_links
from common import machine_facts, numbers, print_table, short, spread, write_json_lines
from gates import Finding
from ranks import COLLECTIVE_TIMEOUT_S, Rank, enter_namespace, run_job, run_main

LEAST = {"dispatch": 0.6, "combine": 0.6}  # of plain copies, of a fused loop
LEAST_OF_LINK = 0.95
HIDDEN, TOPK, EXPERTS = 7168, 8, 256
EP = "mooncake.ep"

Rows = list[dict[str, Any]]
Calls = dict[str, Callable[[], Any]]


def _exchange(group: Any, x: Any, is_in_rank: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """dispatch and combine by all_to_all_single."""
    import torch
    import torch.distributed as dist

    found: list[Any] = []

    def dispatch() -> None:
        sent = is_in_rank.sum(0)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        tokens = is_in_rank.t().nonzero()[:, 1]
        rows = x.index_select(0, tokens)
        splits = got.tolist(), sent.tolist()
        landed = x.new_empty(sum(splits[0]), x.size(1))
        dist.all_to_all_single(landed, rows, *splits, group=group)
        found[:] = [landed, tokens, splits]

    def combine() -> None:
        landed, tokens, (got, sent) = found
        home = x.new_empty(sum(sent), x.size(1))
        dist.all_to_all_single(home, landed, sent, got, group=group)
        total = torch.zeros(x.shape)
        total.index_add_(0, tokens, home.float())
        total.bfloat16()

    return dispatch, combine


def _calls(me: Rank, tokens: int) -> tuple[Calls, int]:
    import torch
    import torch.distributed as dist

    from mooncake.ep import Buffer

    torch.manual_seed(me.rank)
    x = torch.randn(tokens, HIDDEN).bfloat16()
    topk_idx = torch.rand(tokens, EXPERTS).topk(TOPK, dim=1).indices
    weights = torch.rand(tokens, TOPK)
    buffer = Buffer(dist.group.WORLD, 4 * tokens * me.size * HIDDEN * 2)
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    layout = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": is_in_rank,
        "num_tokens_per_expert": per_expert,
    }
    rows, _, _, _, handle, _ = buffer.dispatch(x, **layout, topk_idx=topk_idx, topk_weights=weights)
    combined, _, _ = buffer.combine(rows, handle)
    copies = is_in_rank.sum(1, keepdim=True)
    if not torch.allclose(combined.float(), (x * copies).float(), rtol=0.02, atol=0.05):
        raise RuntimeError("wrong sums")
    received, own = torch.empty_like(rows), torch.empty_like(x)
    ends = is_in_rank.sum(1).cumsum(0)
    returned = torch.randn(int(ends[-1]), HIDDEN).bfloat16()
    numbers, begins = torch.arange(len(returned)), ends - is_in_rank.sum(1)

    def copy_rows() -> None:
        own.copy_(x)
        received.copy_(rows)

    def add_rows() -> None:
        torch.nn.functional.embedding_bag(numbers, returned, begins, mode="sum")

    calls: Calls = {
        f"{EP} dispatch": lambda: buffer.dispatch(
            x, **layout, topk_idx=topk_idx, topk_weights=weights
        ),
        f"{EP} combine": lambda: buffer.combine(rows, handle),
        "alone dispatch": copy_rows,
        "alone combine": add_rows,
    }
    me.spec["crossing"] = _crossing(me, is_in_rank)
    others = [("mooncake", dist.group.WORLD), ("gloo", me.spec["gloo"])]
    for name, group in others if me.spec["gloo"] is not None else others[:1]:
        dispatch, combine = _exchange(group, x, is_in_rank)
        calls[f"{name} dispatch"], calls[f"{name} combine"] = dispatch, combine
    return calls, len(rows)


def _crossing(me: Rank, is_in_rank: Any) -> dict[str, int]:
    """Bytes of rows that a host must send to others; the largest of all hosts."""
    homes = me.meeting.exchange(me.spec.get("namespaces", [""] * me.size)[me.rank])
    there, back = dict.fromkeys(homes, 0), dict.fromkeys(homes, 0)
    of_ranks = me.meeting.exchange(is_in_rank.int().tolist())
    for home, flags in zip(homes, of_ranks, strict=True):
        for row in flags:
            away = [
                other for other, is_in in zip(homes, row, strict=True) if is_in and other != home
            ]
            there[home] += 2 * HIDDEN * len(set(away))
            for other in away:
                back[other] += 2 * HIDDEN
    return {"dispatch": max(there.values()), "combine": max(back.values())}


def rank_main(me: Rank) -> None:
    import torch
    import torch.distributed as dist

    gc.disable()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    store = me.open_store()
    if "namespaces" in me.spec:
        enter_namespace(me.spec["namespaces"][me.rank])
        os.environ["MOONCAKE_HOST_IP"] = me.spec["addresses"][me.rank]
    dist.init_process_group(
        "mooncake-cpu", store=store, rank=me.rank, world_size=me.size, timeout=timeout
    )
    # Gloo would take an address of its own choice on these hosts.
    one_host = "namespaces" not in me.spec
    me.spec["gloo"] = dist.new_group(backend="gloo", timeout=timeout) if one_host else None
    for tokens in me.spec["tokens"]:
        calls, num_rows = _calls(me, tokens)
        took: dict[str, list[float]] = {name: [] for name in calls}
        for round in range(me.spec["rounds"] + 1):
            for name, call in calls.items():
                me.meeting.barrier()
                start = time.perf_counter()
                call()
                slowest = max(me.meeting.exchange((time.perf_counter() - start) * 1e3))
                if round:  # the first one makes connections, and maps memory
                    took[name].append(slowest)
        middle = {name: statistics.median(times) for name, times in took.items()}
        for what in ("dispatch", "combine"):
            ours = middle[f"{EP} {what}"]
            row = {
                "kind": "ep normal",
                "error": None,
                "ranks": me.size,
                "tokens": tokens,
                "what": what,
            }
            row |= {"rows": num_rows, "of_alone": middle[f"alone {what}"] / ours}
            row["bits"] = me.spec["crossing"][what] * 8 / (ours / 1e3)
            for lane in ("mooncake", "gloo"):
                other = middle.get(f"{lane} {what}")
                row[f"{lane}_over_ours"] = None if other is None else other / ours
            row |= spread(took[f"{EP} {what}"], unit="ms")
            me.emit(row)
            me.say(f"{me.size} ranks, {tokens} tokens, {what}: {ours:.1f} ms")
        gc.collect()
    dist.destroy_process_group()


def run(ranks: list[int], tokens: list[int], count: int | None, rounds: int) -> Rows:
    spec, rows = {"tokens": tokens, "rounds": rounds}, []
    for size in ranks:
        if count is None:
            rows += run_job("bench_ep_normal:rank_main", size, spec)
            continue
        *found, link = run_over_links("bench_ep_normal:rank_main", size, count, spec)
        rows += [{**row, "of_link": row["bits"] / link["iperf3_bits"]} for row in found]
    return rows


def judge(rows: Rows) -> list[Finding]:
    findings = []
    for row in rows:
        what = row["what"]
        name = f"{row['ranks']} ranks, {row['tokens']} tokens, {what}"
        kind, value, least = "of plain copies", row["of_alone"], LEAST[what]
        if what == "combine":
            kind = "of a fused loop"
        if "of_link" in row:
            kind, value, least = "of iperf3", row["of_link"], LEAST_OF_LINK
        findings.append(Finding(f"{name}: {kind}", value, f">= {least}", value >= least))
    return findings


def show(rows: Rows) -> None:
    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    print_table(
        f"normal mode, hidden {HIDDEN}, top-{TOPK} of {EXPERTS} experts, bfloat16",
        ["ranks", "tokens", "", "rows", "ms", "of copies, of a fused loop", "of iperf3",
         "all_to_all / ours", "on Gloo / ours"],
        [
            [
                str(row["ranks"]),
                str(row["tokens"]),
                row["what"],
                str(row["rows"]),
                short(row["p50_ms"]),
                ratio(row["of_alone"]),
                ratio(row.get("of_link")),
                ratio(row["mooncake_over_ours"]),
                ratio(row["gloo_over_ours"]),
            ]
            for row in rows
        ],
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=numbers, default=[2, 4])
    parser.add_argument("--tokens", type=numbers, default=[4096])
    parser.add_argument("--hosts", type=int, help="spread the ranks over so many, 1 Gbit/s each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is not met")
    parser.add_argument("--json", help="also writes the rows to this file")
    args = parser.parse_args()
    if args.hosts and (why := hosts.why_not() or (not shutil.which("iperf3") and "no iperf3")):
        print(f"no hosts here: {why}")
        return 1
    rows = run(args.ranks, args.tokens, args.hosts, args.rounds)
    show(rows)
    findings = judge(rows)
    gates.show(findings, "summary")
    write_json_lines(args.json, [machine_facts(), *rows, *(one.as_row() for one in findings)])
    return gates.exit_code(rows, findings, args.gate)


if __name__ == "__main__":
    sys.exit(run_main(main))
