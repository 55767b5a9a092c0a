"""Writes of the transfer engine between memory of devices, beside the same between memory of hosts,
and beside messages of NCCL and Gloo, in turns within the same two processes of one host.

    python benchmarks/bench_transfer_device.py --device cuda -b 64K -e 64M -f 16
    python benchmarks/bench_transfer_device.py           # fake devices: their copies cost a core

`gloo` copies from the device, sends CPU tensors, and copies to the device, as it must. The ranks
share a GPU if there is only one. NCCL then takes no part: it connects no two ranks of one GPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from bench_device import open_device
from common import (
    format_size,
    machine_facts,
    names,
    parse_size,
    print_table,
    size_steps,
    spread,
    write_json_lines,
)
from ranks import COLLECTIVE_TIMEOUT_S, Rank, nccl_missing, run_job, run_main

HOST = "127.0.0.1"
WRITTEN = ("device", "host")  # by the engine
RANKS = 2

Rows = list[dict[str, Any]]


def _engine(me: Rank, tensors: list[Any]) -> tuple[Any, str, list[int]]:
    """An engine that has the tensors, the session of the other rank's, and its addresses."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("an engine cannot be made")
    for tensor in tensors:
        if engine.register_memory(tensor.data_ptr(), tensor.nbytes) != 0:
            raise RuntimeError(f"memory of {tensor.device} cannot be registered")
    mine = [f"{HOST}:{engine.get_rpc_port()}", *(tensor.data_ptr() for tensor in tensors)]
    session, *addresses = me.meeting.exchange(mine)[1 - me.rank]
    return engine, session, addresses


def _lanes(me: Rank, device: Any, size: int, backends: list[str]) -> dict[str, Callable[[], None]]:
    """One transfer of rank 0 to rank 1 each: it is over for both when the call returns."""
    import torch
    import torch.distributed as dist

    on_device = torch.full((size,), me.rank, dtype=torch.uint8, device=device)
    on_host = torch.full((size,), me.rank, dtype=torch.uint8)
    pinned = torch.zeros(size, dtype=torch.uint8).pin_memory()
    torch.accelerator.synchronize()
    engine, session, addresses = _engine(me, [on_device, on_host])

    def written(tensor: Any, address: int) -> Callable[[], None]:
        def write() -> None:
            if me.rank == 0 and engine.transfer_sync_write(
                session, tensor.data_ptr(), address, size
            ):
                raise RuntimeError("a write failed")

        return write

    def message(group: Any, tensor: Any) -> None:
        if me.rank == 0:
            dist.send(tensor, 1, group=group)
        else:
            dist.recv(tensor, 0, group=group)

    def by_nccl(group: Any) -> None:
        message(group, on_device)
        torch.accelerator.synchronize()

    def by_gloo(group: Any) -> None:
        if me.rank == 0:
            pinned.copy_(on_device)
        message(group, pinned)
        if me.rank == 1:
            on_device.copy_(pinned)
        torch.accelerator.synchronize()

    lanes: dict[str, Callable[[], None]] = {
        "device": written(on_device, addresses[0]),
        "host": written(on_host, addresses[1]),
    }
    for backend in backends:
        call, group = by_nccl if backend == "nccl" else by_gloo, dist.new_group(backend=backend)
        lanes[backend] = lambda call=call, group=group: call(group)  # type: ignore[misc]
    for name, lane in lanes.items():
        target = on_host if name == "host" else on_device
        target.fill_(me.rank)
        torch.accelerator.synchronize()
        me.meeting.barrier()
        lane()
        me.meeting.barrier()
        if target.unique().tolist() != [0]:
            raise RuntimeError(f"wrong data by {name}")
    return lanes


def rank_main(me: Rank) -> None:
    import torch.distributed as dist

    spec = me.spec
    gc.disable()
    os.environ.setdefault("MOONCAKE_TRANSPORTS", spec["wire"])
    device = open_device(spec["device"], me.rank)
    dist.init_process_group(
        "gloo",
        store=me.open_store(),
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    for size in spec["sizes"]:
        lanes = _lanes(me, device, size, spec["backends"])
        calls = max(3, min(100, (256 << 20) // size))
        took: dict[str, list[float]] = {name: [] for name in lanes}
        for round in range(spec["rounds"] + 1):
            for name in list(lanes)[:: 1 if round % 2 else -1]:
                me.meeting.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    lanes[name]()
                slowest = max(me.meeting.exchange((time.perf_counter() - start) * 1e6 / calls))
                if round:
                    took[name].append(slowest)
        row: dict[str, Any] = {"kind": "transfer", "device": spec["device"], "size": size}
        for name, values in took.items():
            row.update(spread(values, prefix=f"{name}_"))
            row[f"{name}_gbs"] = size / statistics.median(values) / 1e3
        me.emit(row)
        del lanes
        gc.collect()
    dist.destroy_process_group()


def show(rows: Rows, lanes: list[str]) -> None:
    print_table(
        "from one process to another, GB/s",
        ["size", *lanes, "device / host"],
        [
            [
                format_size(row["size"]),
                *(f"{row[f'{name}_gbs']:.2f}" for name in lanes),
                f"{row['device_gbs'] / row['host_gbs']:.2f}",
            ]
            for row in rows
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-b", "--begin", type=parse_size, default=parse_size("64K"))
    parser.add_argument("-e", "--end", type=parse_size, default=parse_size("64M"))
    parser.add_argument("-f", "--factor", type=int, default=16)
    parser.add_argument("--device", default="fake", help="fake (tests/fake_device), or cuda")
    parser.add_argument("--wire", default="shm", help="of the engine: shm or tcp")
    parser.add_argument("--backends", type=names, help="default: gloo, and nccl for two GPUs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="also writes the rows to this file")
    args = parser.parse_args()
    if args.backends is None:
        args.backends = ["gloo"]
        if args.device == "cuda" and (why := nccl_missing(RANKS)):
            print(f"without NCCL: {why}")
        elif args.device == "cuda":
            args.backends = ["nccl", "gloo"]
    spec = {
        "sizes": size_steps(args.begin, args.end, args.factor),
        "device": args.device,
        "wire": args.wire,
        "backends": args.backends,
        "rounds": args.rounds,
    }
    rows = run_job("bench_transfer_device:rank_main", RANKS, spec)
    show(rows, [*WRITTEN, *args.backends])
    write_json_lines(args.json, [machine_facts(), *rows])
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
