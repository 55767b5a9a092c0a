"""Operations on a device's tensors beside their parts: the same operation on CPU tensors, and the
copies of its input and output between the device and pinned host memory. They take turns in the
same processes.

    python benchmarks/bench_device.py -b 1K -e 64M -f 4 --ranks 2 --json out.json
    python benchmarks/bench_device.py --device cuda --ops all_reduce,broadcast,gather

Without a GPU, the device is the tests' own (tests/fake_device): its copies cost one memcpy, so the
ratio shows what staging adds to its parts. With --copy-rate they also take time without a core, as
those of a GPU. docs/benchmarks.md has the method.
"""

from __future__ import annotations

import argparse
import gc
import itertools
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
    names,
    numbers,
    parse_size,
    print_table,
    short,
    size_steps,
    spread,
    write_json_lines,
)
from ranks import COLLECTIVE_TIMEOUT_S, Rank, run_job, run_main

TESTS = Path(__file__).resolve().parents[1] / "tests"
OPS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"]
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


def _copied(op: str, b: Any) -> tuple[Any, Any]:
    """The input and the output that this rank has in the operation, or None."""
    is_root = b.rank == 0
    given = b.x if is_root or op not in ("broadcast", "scatter") else None
    result = b.y if b.y.numel() else b.x
    has_result = op not in ("broadcast", "gather") or is_root == (op == "gather")
    return given, result if has_result else None


def _parts(op: str, device: Any, me: Rank, size: int) -> dict[str, Callable[[], None]]:
    """The device's operation until its results are there, then its parts. `call` is the
    time until the caller may go on: the results are not there yet. Raises if a result is wrong."""
    import operations
    import torch

    on_device = operations.allocate(op, size, me.rank, me.size, device)
    on_cpu = operations.allocate(op, size, me.rank, me.size)
    call = operations.OPERATIONS[op].torch(on_device, None)
    cpu = operations.OPERATIONS[op].torch(on_cpu, None)
    operations.fill(op, on_device, size)
    call()
    if not operations.is_right(op, on_device, size):
        raise RuntimeError(f"wrong result of {op}, {format_size(size)}")
    operations.reset(on_device)
    given, result = _copied(op, on_device)
    pinned = [
        None if t is None else torch.zeros_like(t, device="cpu").pin_memory()
        for t in (given, result)
    ]

    def operation() -> None:
        call()
        torch.accelerator.synchronize()

    def copies() -> None:
        if given is not None:
            pinned[0].copy_(given, non_blocking=True)
            torch.accelerator.synchronize()
        if result is not None:
            result.copy_(pinned[1], non_blocking=True)
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
    import torch.distributed as dist

    spec = me.spec
    gc.disable()
    device = open_device(spec["device"], me.rank)
    if spec["copy_rate"]:
        from fake_device import control

        control.slow_copies(spec["copy_rate"])
    dist.init_process_group(
        f"cpu:mooncake,{spec['device']}:mooncake",
        store=me.open_store(),
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    for op, size in itertools.product(spec["ops"], spec["sizes"]):
        took = _race(me, _parts(op, device, me, size), size)
        middle = {name: statistics.median(values) for name, values in took.items()}
        row = {
            "kind": "device",
            "op": op,
            "device": spec["device"],
            "ranks": me.size,
            "size": size,
            "ratio": middle["device"] / (middle["cpu"] + middle["copies"]),
        }
        for name, values in took.items():
            row.update(spread(values, prefix=f"{name}_"))
        me.emit(row)
        me.say(
            f"{op}  {me.size} ranks  {format_size(size)}  device/(cpu + copies) {row['ratio']:.2f}"
        )
        gc.collect()
    dist.destroy_process_group()


def run(
    ranks: int, ops: list[str], sizes: list[int], *, device: str, rounds: int, copy_rate: int = 0
) -> Rows:
    spec = {
        "ops": ops,
        "sizes": sizes,
        "device": device,
        "rounds": rounds,
        "copy_rate": copy_rate,
    }
    return run_job("bench_device:rank_main", ranks, spec)


def show(rows: Rows) -> None:
    print_table(
        "operations on a device, us: until their end; their parts; until the call returns",
        ["operation", "ranks", "size", *PARTS, "device/(cpu + copies)"],
        [
            [
                row["op"],
                str(row["ranks"]),
                format_size(row["size"]),
                *(short(row[f"{name}_p50_us"]) for name in PARTS),
                f"{row['ratio']:.2f}",
            ]
            for row in rows
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-b", "--begin", type=parse_size, default=parse_size("1K"))
    parser.add_argument("-e", "--end", type=parse_size, default=parse_size("64M"))
    parser.add_argument("-f", "--factor", type=int, default=4)
    parser.add_argument("--ops", type=names, default=["all_reduce"], help=", ".join(OPS))
    parser.add_argument("--ranks", type=numbers, default=[2])
    parser.add_argument("--device", default="fake", help="fake (tests/fake_device), or cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--copy-rate",
        type=parse_size,
        default=0,
        help="bytes a second of a fake device's copies beyond a memcpy, without a core: e.g. 4G",
    )
    parser.add_argument("--json", help="also writes the rows to this file")
    args = parser.parse_args()
    if unknown := set(args.ops) - set(OPS):
        parser.error(f"unknown operations: {', '.join(sorted(unknown))}")
    if args.copy_rate and args.device != "fake":
        parser.error("--copy-rate is for fake devices")
    sizes = size_steps(args.begin, args.end, args.factor)
    rows: Rows = []
    for ranks in args.ranks:
        rows += run(
            ranks, args.ops, sizes, device=args.device, rounds=args.rounds, copy_rate=args.copy_rate
        )
    show(rows)
    write_json_lines(args.json, [machine_facts(), *rows])
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
