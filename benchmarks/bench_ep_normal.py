"""Dispatch and combine of the normal mode, beside plain copies of the same bytes and beside the
same exchange by all_to_all_single, on Gloo and on ours. They take turns in the same processes.

    python benchmarks/bench_ep_normal.py --ranks 2,4 --tokens 4096 --json out.json

Plain copies: each rank copies its own rows once and the rows that it receives once (a combine: the
rows that it has received once, and a fused sum is left out). The memory of a copy's target is there
already; a dispatch makes its results anew in each call. The exchange by all_to_all_single sorts
each rank's rows by receiver with index_select, and adds up those that come back with index_add.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import gates
from common import machine_facts, numbers, print_table, short, spread, write_json_lines
from gates import Finding
from ranks import COLLECTIVE_TIMEOUT_S, Rank, run_job, run_main

LEAST_OF_COPIES = 0.6
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

    def copy_rows() -> None:
        own.copy_(x)
        received.copy_(rows)

    calls: Calls = {
        f"{EP} dispatch": lambda: buffer.dispatch(
            x, **layout, topk_idx=topk_idx, topk_weights=weights
        ),
        f"{EP} combine": lambda: buffer.combine(rows, handle),
        "copies dispatch": copy_rows,
        "copies combine": lambda: received.copy_(rows),
    }
    for name, group in (("mooncake", dist.group.WORLD), ("gloo", me.spec["gloo"])):
        dispatch, combine = _exchange(group, x, is_in_rank)
        calls[f"{name} dispatch"], calls[f"{name} combine"] = dispatch, combine
    return calls, len(rows)


def rank_main(me: Rank) -> None:
    import torch
    import torch.distributed as dist

    gc.disable()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    store = me.open_store()
    dist.init_process_group(
        "mooncake-cpu", store=store, rank=me.rank, world_size=me.size, timeout=timeout
    )
    me.spec["gloo"] = dist.new_group(backend="gloo", timeout=timeout)
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
            row |= {"rows": num_rows, "of_copies": middle[f"copies {what}"] / ours}
            for lane in ("mooncake", "gloo"):
                row[f"{lane}_over_ours"] = middle[f"{lane} {what}"] / ours
            row |= spread(took[f"{EP} {what}"], unit="ms")
            me.emit(row)
            me.say(f"{me.size} ranks, {tokens} tokens, {what}: {row['of_copies']:.2f} of copies")
        gc.collect()
    dist.destroy_process_group()


def run(ranks: int, tokens: list[int], *, rounds: int = 7) -> Rows:
    return run_job("bench_ep_normal:rank_main", ranks, {"tokens": tokens, "rounds": rounds})


def judge(rows: Rows) -> list[Finding]:
    return [
        Finding(
            f"{row['ranks']} ranks, {row['tokens']} tokens, {row['what']}: of plain copies",
            row["of_copies"],
            f">= {LEAST_OF_COPIES}",
            row["of_copies"] >= LEAST_OF_COPIES,
        )
        for row in rows
        if row["what"] == "dispatch"
    ]


def show(rows: Rows) -> None:
    print_table(
        f"normal mode, hidden {HIDDEN}, top-{TOPK} of {EXPERTS} experts, bfloat16",
        ["ranks", "tokens", "", "rows", "ms", "of copies", "all_to_all / ours", "on Gloo / ours"],
        [
            [
                str(row["ranks"]),
                str(row["tokens"]),
                row["what"],
                str(row["rows"]),
                short(row["p50_ms"]),
                f"{row['of_copies']:.2f}",
                f"{row['mooncake_over_ours']:.2f}",
                f"{row['gloo_over_ours']:.2f}",
            ]
            for row in rows
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=numbers, default=[2, 4])
    parser.add_argument("--tokens", type=numbers, default=[4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is not met")
    parser.add_argument("--json", help="also writes the rows to this file")
    args = parser.parse_args()
    rows: Rows = []
    for ranks in args.ranks:
        rows += run(ranks, args.tokens, rounds=args.rounds)
    show(rows)
    findings = judge(rows)
    gates.show(findings, "summary")
    write_json_lines(args.json, [machine_facts(), *rows, *(one.as_row() for one in findings)])
    return gates.exit_code(rows, findings, args.gate)


if __name__ == "__main__":
    sys.exit(run_main(main))
