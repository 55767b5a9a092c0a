"""Dispatch and combine of a device's tensors by kernels, of the low latency mode or the normal one,
beside a copy of as many bytes on the device and the launch of one small kernel, in the same
processes.

    python benchmarks/bench_ep_device.py --device cuda --ranks 8
    python benchmarks/bench_ep_device.py --device cuda --ranks 8 --tokens 4096 --normal
    python benchmarks/bench_ep_device.py --ranks 2 --tokens 8 --hidden 512 --experts 8
    MOONCAKE_EP_STREAM_WORDS=0 python benchmarks/bench_ep_device.py --staged

Several ranks share a GPU if there are fewer GPUs than ranks: then they also share its copies, and
take turns on it. `graph` is the replay of a dispatch and a combine. In the normal mode, `dispatch`
exchanges counts on the host, `at worst` is one with num_worst_tokens, which does not, and `again`
one with a handle. With --staged the calls go through host memory, and each `returns` is the time
after which a call has returned. Without a GPU, the device is the tests' own (tests/fake_device),
whose kernels run on the CPU: this program works there, and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from bench_device import open_device
from common import machine_facts, numbers, print_table, short, spread, write_json_lines
from ranks import COLLECTIVE_TIMEOUT_S, Rank, run_job, run_main

PARTS = ["dispatch", "combine", "graph", "dispatch by hook", "copy of rows", "launch"]
NORMAL_PARTS = ["dispatch", "at worst", "again", "combine", "copy of rows", "launch"]
STAGED_PARTS = ["dispatch", "dispatch returns", "combine", "combine returns", "copy of rows"]

Rows = list[dict[str, Any]]


def _parts(device: Any, buffer: Any, spec: dict[str, Any], rank: int) -> dict[str, Callable]:
    import torch

    tokens, hidden, topk, experts = (spec[name] for name in ("tokens", "hidden", "topk", "experts"))
    drawn = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, hidden, generator=drawn).bfloat16().to(device)
    topk_idx = torch.rand(tokens, experts, generator=drawn).topk(topk, dim=1).indices.to(device)
    weights = torch.rand(tokens, topk, generator=drawn).to(device)
    rows = torch.zeros(tokens * topk, hidden, dtype=torch.bfloat16, device=device)
    copied, small = torch.zeros_like(rows), torch.zeros(1, device=device)

    def dispatch(**how: bool) -> tuple[Any, ...]:
        found = buffer.low_latency_dispatch(x, topk_idx, tokens, experts, use_fp8=False, **how)
        return tuple(found)

    recv_x, _, handle, *_ = dispatch()

    def combine() -> None:
        buffer.low_latency_combine(recv_x, topk_idx, weights, handle)

    def hooked() -> None:
        dispatch(return_recv_hook=True)[4]()

    combine()
    parts = {
        "dispatch": dispatch,
        "combine": combine,
        "dispatch by hook": hooked,
        "copy of rows": lambda: copied.copy_(rows),
        "launch": lambda: small.fill_(1),
    }
    if spec["staged"]:
        return parts
    graphs = torch.get_device_module(device)
    graph = graphs.CUDAGraph()
    with graphs.graph(graph):
        found = dispatch()
        buffer.low_latency_combine(found[0], topk_idx, weights, found[2])
    return {**parts, "graph": graph.replay}


def _normal_parts(device: Any, buffer: Any, spec: dict[str, Any], rank: int) -> dict[str, Callable]:
    import torch

    tokens, hidden, topk, experts = (spec[name] for name in ("tokens", "hidden", "topk", "experts"))
    drawn = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, hidden, generator=drawn).bfloat16().to(device)
    topk_idx = torch.rand(tokens, experts, generator=drawn).topk(topk, dim=1).indices.to(device)
    weights = torch.rand(tokens, topk, generator=drawn).to(device)
    _, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, experts)
    call = {
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": is_in_rank,
        "topk_idx": topk_idx,
        "topk_weights": weights,
    }
    worst = tokens * buffer.group_size
    rows, _, _, _, handle, _ = buffer.dispatch(x, **call)
    copied, small = torch.zeros_like(rows), torch.zeros(1, device=device)
    return {
        "dispatch": lambda: buffer.dispatch(x, **call),
        "at worst": lambda: buffer.dispatch(x, **call, num_worst_tokens=worst),
        "again": lambda: buffer.dispatch(x, handle=handle),
        "combine": lambda: buffer.combine(rows, handle),
        "copy of rows": lambda: copied.copy_(rows),
        "launch": lambda: small.fill_(1),
    }


def _race(me: Rank, parts: dict[str, Callable], calls: int) -> dict[str, list[float]]:
    """Returns the microseconds of a call in each round, of a row of calls: of the ranks the
    slowest."""
    import torch

    took: dict[str, list[float]] = {name: [] for name in parts}
    took |= {f"{name} returns": [] for name in parts}
    for round in range(me.spec["rounds"] + 1):
        for name in list(parts)[:: 1 if round % 2 else -1]:
            torch.accelerator.synchronize()
            me.meeting.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                parts[name]()
            returned = time.perf_counter()
            torch.accelerator.synchronize()
            for end, what in ((returned, f"{name} returns"), (time.perf_counter(), name)):
                slowest = max(me.meeting.exchange((end - start) * 1e6 / calls))
                if round:
                    took[what].append(slowest)
    return took


def rank_main(me: Rank) -> None:
    import torch
    import torch.distributed as dist

    from mooncake.ep import Buffer

    spec = me.spec
    gc.disable()
    os.environ["MOONCAKE_EP_KERNELS"] = str(int(not spec["staged"]))
    device = open_device(spec["device"], me.rank)
    dist.init_process_group(
        f"cpu:mooncake,{spec['device']}:mooncake",
        store=me.open_store(),
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    group = dist.group.WORLD
    shape = (spec["tokens"], spec["hidden"], me.size)
    if spec["normal"]:
        row = 2 * spec["hidden"] + 8 * (spec["hidden"] // 128 + 1) + 16 * spec["topk"]
        bytes_at_once = 2 * (spec["tokens"] * me.size * row + 8192)
        buffer = Buffer(group, num_nvl_bytes=-(-bytes_at_once // 128) * 128)
        parts = _normal_parts(device, buffer, spec, me.rank)
    else:
        size = Buffer.get_low_latency_rdma_size_hint(*shape, spec["experts"])
        buffer = Buffer(group, num_rdma_bytes=size, low_latency_mode=True)
        parts = _parts(device, buffer, spec, me.rank)
    took = _race(me, parts, spec["calls"])
    row = {"kind": "ep_device", "ranks": me.size, **spec}
    for name, values in took.items():
        row.update(spread(values, prefix=f"{name}_"))
    me.emit(row)
    torch.accelerator.synchronize()
    buffer.destroy()
    dist.destroy_process_group()


def show(rows: Rows, parts: list[str]) -> None:
    print_table(
        "EP on a device, us a call (medians)",
        ["ranks", "tokens", "hidden", "top-k", "experts", *parts],
        [
            [
                *(str(row[name]) for name in ("ranks", "tokens", "hidden", "topk", "experts")),
                *(short(row[f"{name}_p50_us"]) for name in parts),
            ]
            for row in rows
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=numbers, default=[2])
    parser.add_argument("--tokens", type=int, default=128, help="of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--normal", action="store_true", help="the normal mode")
    parser.add_argument("--staged", action="store_true", help="through host memory")
    parser.add_argument("--device", default="fake", help="fake (tests/fake_device), or cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=20, help="in a row")
    parser.add_argument("--json", help="also writes the rows to this file")
    args = parser.parse_args()
    names = ("tokens", "hidden", "topk", "experts", "device", "rounds", "calls", "normal", "staged")
    spec = {name: getattr(args, name) for name in names}
    rows: Rows = []
    for ranks in args.ranks:
        rows += run_job("bench_ep_device:rank_main", ranks, spec)
    show(rows, STAGED_PARTS if args.staged else NORMAL_PARTS if args.normal else PARTS)
    write_json_lines(args.json, [machine_facts(), *rows])
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
