"""all_reduce of a device's tensors beside its parts: the same operation on CPU tensors, and the two
copies between the device and pinned host memory. They take turns in the same processes.

    python benchmarks/bench_device.py -b 1K -e 64M -f 4 --ranks 2 --json out.json
    python benchmarks/bench_device.py --device cuda

Without a GPU, the device is the tests' own (tests/fake_device): its copies cost one memcpy, so the
ratio shows what staging adds to its parts. docs/benchmarks.md has the method.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from common import (
    format_size,
    machine_facts,
    numbers,
    parse_size,
    print_table,
    short,
    size_steps,
    spread,
    write_json_lines,
)
from gates import Finding
from ranks import COLLECTIVE_TIMEOUT_S, Rank, run_job, run_main

TESTS = Path(__file__).resolve().parents[1] / "tests"
LIMIT = 1.25  # device / (CPU + copies), from LIMIT_FROM on
LIMIT_FROM = 1 << 20
PARTS = ["device", "cpu", "copies", "call"]

Rows = list[dict[str, Any]]


def open_device(kind: str, rank: int) -> Any:
    import torch

    if kind == "fake":
        sys.path.insert(0, str(TESTS))
        import fake_device

        fake_device.register()
    device = torch.device(kind, rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def _parts(device: Any, size: int) -> dict[str, Callable[[], None]]:
    """The device's operation until its results are there, then its parts. `call` is the
    time until the caller may go on: the results are not there yet."""
    import torch
    import torch.distributed as dist

    elements = size // 4
    on_device = torch.zeros(elements, device=device)
    on_cpu = torch.zeros(elements)
    pinned = torch.zeros(elements, pin_memory=True)

    def operation() -> None:
        dist.all_reduce(on_device)
        torch.accelerator.synchronize()

    def call() -> None:
        dist.all_reduce(on_device)

    def cpu() -> None:
        dist.all_reduce(on_cpu)

    def copies() -> None:
        pinned.copy_(on_device, non_blocking=True)
        torch.accelerator.synchronize()
        on_device.copy_(pinned, non_blocking=True)
        torch.accelerator.synchronize()

    return {"device": operation, "cpu": cpu, "copies": copies, "call": call}


def _race(me: Rank, parts: dict[str, Callable[[], None]], size: int) -> dict[str, list[float]]:
    """Returns the microseconds of each part in each round: the median over its calls, and of the
    ranks the slowest."""
    import torch

    calls = max(5, min(200, (64 << 20) // size))
    took: dict[str, list[float]] = {name: [] for name in parts}
    for round in range(me.spec["rounds"] + 1):
        for name in list(parts)[:: 1 if round % 2 else -1]:
            me.meeting.barrier()
            times = []
            for _ in range(calls):
                start = time.perf_counter()
                parts[name]()
                times.append((time.perf_counter() - start) * 1e6)
                if name == "call":
                    torch.accelerator.synchronize()
            slowest = max(me.meeting.exchange(statistics.median(times)))
            if round:  # the first one makes connections, and fills pools
                took[name].append(slowest)
    return took


def rank_main(me: Rank) -> None:
    import torch
    import torch.distributed as dist

    spec = me.spec
    gc.disable()
    device = open_device(spec["device"], me.rank)
    dist.init_process_group(
        f"cpu:mooncake,{spec['device']}:mooncake",
        store=me.open_store(),
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    tensor = torch.full((1000,), float(me.rank + 1), device=device)
    dist.all_reduce(tensor)
    if tensor.tolist() != [me.size * (me.size + 1) / 2] * 1000:
        raise RuntimeError("wrong result of all_reduce")
    for size in spec["sizes"]:
        took = _race(me, _parts(device, size), size)
        middle = {name: statistics.median(values) for name, values in took.items()}
        row = {
            "kind": "device",
            "device": spec["device"],
            "ranks": me.size,
            "size": size,
            "ratio": middle["device"] / (middle["cpu"] + middle["copies"]),
        }
        for name, values in took.items():
            row.update(spread(values, prefix=f"{name}_"))
        me.emit(row)
        me.say(f"{me.size} ranks  {format_size(size)}  device/(cpu + copies) {row['ratio']:.2f}")
        gc.collect()
    dist.destroy_process_group()


def run(ranks: int, sizes: list[int], *, device: str = "fake", rounds: int = 9) -> Rows:
    spec = {"sizes": sizes, "device": device, "rounds": rounds}
    return run_job("bench_device:rank_main", ranks, spec)


def show(rows: Rows) -> None:
    print_table(
        "all_reduce on a device, us: until its end; its parts; until the call returns",
        ["ranks", "size", *PARTS, "device/(cpu + copies)"],
        [
            [
                str(row["ranks"]),
                format_size(row["size"]),
                *(short(row[f"{name}_p50_us"]) for name in PARTS),
                f"{row['ratio']:.2f}",
            ]
            for row in rows
        ],
    )


def findings(rows: Rows) -> list[Finding]:
    return [
        Finding(
            f"device / (cpu + copies), {row['ranks']} ranks, {format_size(row['size'])}",
            row["ratio"],
            f"<= {LIMIT}",
            row["ratio"] <= LIMIT,
        )
        for row in rows
        if row["size"] >= LIMIT_FROM
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-b", "--begin", type=parse_size, default=parse_size("1K"))
    parser.add_argument("-e", "--end", type=parse_size, default=parse_size("64M"))
    parser.add_argument("-f", "--factor", type=int, default=4)
    parser.add_argument("--ranks", type=numbers, default=[2])
    parser.add_argument("--device", default="fake", help="fake (tests/fake_device), or cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="also writes the rows to this file")
    args = parser.parse_args()
    sizes = size_steps(args.begin, args.end, args.factor)
    rows: Rows = []
    for ranks in args.ranks:
        rows += run(ranks, sizes, device=args.device, rounds=args.rounds)
    show(rows)
    write_json_lines(args.json, [machine_facts(), *rows])
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
