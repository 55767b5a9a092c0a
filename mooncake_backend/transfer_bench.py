"""Measures how fast one engine reads from, or writes to, another one: Mooncake's tool.

    transfer_engine_bench --mode=target --metadata_server=P2PHANDSHAKE --protocol=tcp
    transfer_engine_bench --metadata_server=P2PHANDSHAKE --protocol=tcp --segment_id=HOST:PORT

The target prints the name by which peers find it, and serves until it gets SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mooncake_backend.command_line import parse_flags

UNITS = {"GB": 1e9, "GiB": 2**30, "Gb": 1e9 / 8, "MB": 1e6, "MiB": 2**20, "Mb": 1e6 / 8}
UNITS |= {"KB": 1e3, "KiB": 2**10, "Kb": 1e3 / 8}
PROTOCOLS = ["tcp", "shm", "rdma", "efa", "nvlink", "nvlink_intra", "barex", "hip", "musa"]
PROTOCOLS += ["sunrise_link", "fabric"]
# A sweep's block sizes; PARALLEL: its pairs of threads, and blocks in a batch.
BLOCKS = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
PARALLEL = ((1, 1), (1, 16), (4, 32), (16, 128))
FAILED = 1


class BenchError(RuntimeError):
    """The error text that is printed instead of a result."""


@dataclass(frozen=True)
class Load:
    operation: str
    block_size: int
    batch_size: int
    threads: int

    def name(self) -> str:
        return (
            f"block={size_text(self.block_size)}, threads={self.threads}, batch={self.batch_size}"
        )

    @property
    def bytes(self) -> int:
        """Bytes under way at once."""
        return self.block_size * self.batch_size * self.threads


@dataclass(frozen=True)
class Result:
    load: Load
    seconds: float
    batches: int
    transport: str

    @property
    def bytes_per_second(self) -> float:
        return self.batches * self.load.batch_size * self.load.block_size / self.seconds


class Buffer:
    """Memory of this process that an engine has registered."""

    def __init__(self, engine: Any, size: int) -> None:
        self.engine = engine
        self.size = size
        self.memory = mmap.mmap(-1, size)
        self._view = (ctypes.c_char * size).from_buffer(self.memory)
        self.address = ctypes.addressof(self._view)
        ctypes.memset(self.address, 1, size)  # touches the pages before anything is measured
        if code := engine.register_memory(self.address, size):
            raise BenchError(f"{size} bytes cannot be registered: {code}")

    def close(self) -> None:
        self.engine.unregister_memory(self.address)
        del self._view
        self.memory.close()


def size_text(size: int) -> str:
    for unit, scale in (("GB", 30), ("MB", 20), ("KB", 10)):
        if size >= 1 << scale and size % (1 << scale) == 0:
            return f"{size >> scale}{unit}"
    return f"{size}B"


def open_engine(options: argparse.Namespace) -> tuple[Any, str]:
    """Returns an engine, and the name by which other engines find it."""
    from mooncake_backend.engine import TransferEngine

    engine = TransferEngine()
    name = options.local_server_name
    code = engine.initialize(name, options.metadata_server, options.protocol, options.device_name)
    if code:
        raise BenchError(f"the engine does not start: {code}; the log above says why")
    if options.metadata_server == "P2PHANDSHAKE":
        host = name if name.startswith("[") or name.count(":") != 1 else name.partition(":")[0]
        host = f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host
        name = f"{host}:{engine.get_rpc_port()}"
    return engine, name


def serve(
    options: argparse.Namespace, ready: str = "target: {name}, {size} at {address:#x}"
) -> int:
    """Serves until a signal comes. ready: format of the line that tells initiators to begin."""
    engine, name = open_engine(options)
    buffer = Buffer(engine, options.buffer_size)
    told = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: told.set())
    size = size_text(options.buffer_size)
    print(ready.format(name=name, size=size, address=buffer.address), flush=True)
    while not told.wait(0.2):
        pass
    buffer.close()
    return 0


def measure(
    engine: Any, segment: str, buffer: Buffer, load: Load, seconds: float, says: Any
) -> Result:
    """Runs the load. Each thread always has one batch of its own under way."""
    there = engine.get_first_buffer_address(segment)
    if there == 0:
        raise BenchError(f"{segment} cannot be reached, or has registered nothing")
    call = {"read": engine.batch_transfer_sync_read, "write": engine.batch_transfer_sync_write}
    transfer = call[load.operation]
    counts, errors = [0] * load.threads, [0] * load.threads
    go, end = threading.Barrier(load.threads + 1), threading.Event()

    def work(thread: int) -> None:
        offsets = [
            (thread * load.batch_size + block) * load.block_size for block in range(load.batch_size)
        ]
        mine = [buffer.address + offset for offset in offsets]
        theirs = [there + offset for offset in offsets]
        lengths = [load.block_size] * load.batch_size
        errors[thread] = transfer(segment, mine, theirs, lengths)  # connects, not measured
        go.wait()
        while not end.is_set() and errors[thread] == 0:
            errors[thread] = transfer(segment, mine, theirs, lengths)
            counts[thread] += 1

    threads = [
        threading.Thread(target=work, args=(number,), daemon=True) for number in range(load.threads)
    ]
    for thread in threads:
        thread.start()
    go.wait()
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds and not any(errors):
        says(f"{load.operation}, {load.name()}: {spent:.0f} of {seconds:.0f} s")
        end.wait(min(1.0, seconds - spent))
    end.set()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - start
    if any(errors):
        raise BenchError(f"a transfer failed: {min(errors)}; the log above says why")
    return Result(load, spent, sum(counts), engine.get_transport(segment) or "none")


def loads_of(options: argparse.Namespace) -> list[Load]:
    if not options.sweep:
        return [
            Load(options.operation, options.block_size, options.batch_size, options.threads),
        ]
    loads = [
        Load(operation, block, batch, threads)
        for threads, batch in PARALLEL
        for block in BLOCKS
        for operation in ("write", "read")
    ]
    return [load for load in loads if load.bytes <= options.buffer_size]


def initiate(options: argparse.Namespace) -> int:
    loads = loads_of(options)
    if not loads:
        raise BenchError("no load of the sweep fits in --buffer_size")
    options.buffer_size = max(options.buffer_size, *(load.bytes for load in loads), 1)
    engine, _ = open_engine(options)
    buffer = Buffer(engine, options.buffer_size)
    is_shown = sys.stderr.isatty()

    def says(text: str) -> None:
        if is_shown:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    results = []
    for load in loads:
        result = measure(engine, options.segment_id, buffer, load, options.duration, says)
        says("")
        results.append(result)
        if not options.sweep:
            show(result, options)
    if options.sweep:
        table(results, options)
    if options.json:
        rows = [
            {**asdict(result), "bytes_per_second": result.bytes_per_second} for result in results
        ]
        Path(options.json).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if options.plot:
        plot(results, options)
    buffer.close()
    return 0


def rate(result: Result, options: argparse.Namespace) -> str:
    value = result.bytes_per_second / UNITS[options.report_unit]
    return f"{value:.{options.report_precision}f}"


def show(result: Result, options: argparse.Namespace) -> None:
    print(
        f"Test completed: duration {result.seconds:.2f}, batch count {result.batches}, "
        f"throughput {rate(result, options)} {options.report_unit}/s over {result.transport}"
    )


def table(results: Sequence[Result], options: argparse.Namespace) -> None:
    """Prints a line for each block size and number of threads: write, read."""
    found: dict[str, dict[str, str]] = {}
    for result in results:
        found.setdefault(result.load.name(), {})[result.load.operation] = rate(result, options)
    unit = f"{options.report_unit}/s"
    width = max(len(name) for name in found)
    print(f"{'':{width}}  {'write':>12}  {'read':>12}  over {results[0].transport}")
    for name, rates in found.items():
        cells = (f"{rates[operation]:>7} {unit}" for operation in ("write", "read"))
        print(f"{name:{width}}  {'  '.join(cells)}")


def plot(results: Sequence[Result], options: argparse.Namespace) -> None:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise BenchError(f"--plot needs matplotlib: {error}") from None
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    lines: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        load = result.load
        name = f"{load.operation}, {load.threads} threads, batch {load.batch_size}"
        point = (load.block_size, result.bytes_per_second / UNITS[options.report_unit])
        lines.setdefault(name, []).append(point)
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="bytes of a block", ylabel=f"{options.report_unit}/s")
    axes.set_title(f"over {results[0].transport}")
    axes.legend(fontsize="small")
    figure.savefig(options.plot, dpi=110)
    print(f"plot: {options.plot}")


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def truth(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{text} is neither true nor false")
    return text.lower() in ("true", "1", "yes")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="transfer_engine_bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = found.add_argument
    add("--mode", choices=["initiator", "target"], default="initiator")
    add("--operation", choices=["read", "write"], default="read")
    add("--protocol", choices=PROTOCOLS, default="rdma")
    add("--local_server_name", default=socket.gethostname(), help="host, or the engine's name")
    add("--metadata_server", default="192.168.3.77:2379", help="P2PHANDSHAKE, or http://...")
    add("--segment_id", default="192.168.3.76", help="the name of the target")
    add("--device_name", default="")
    add("--nic_priority_matrix", default="", help="accepted; there are no NICs to choose from")
    add("--auto_discovery", type=truth, nargs="?", const=True, default=False, help="accepted")
    add("--buffer_size", type=positive, default=1 << 30, help="bytes; grows to what is under way")
    add("--batch_size", type=positive, default=128, help="blocks of a call")
    add("--block_size", type=positive, default=65536, help="bytes")
    add("--duration", type=positive, default=10, help="seconds, of each load")
    add("--threads", type=positive, default=12)
    add("--report_unit", choices=UNITS, default="GB", help="a second")
    add("--report_precision", type=int, default=2)
    add("--backend", choices=["classic", "tent"], default="classic", help="only classic exists")
    add("--use_vram", type=truth, nargs="?", const=True, default=False, help="not without CUDA")
    add("--init_mem", type=truth, nargs="?", const=True, default=True, help="accepted")
    add("--gpu_id", type=int, default=0, help="accepted")
    add("--sweep", action="store_true", help="block sizes, threads and batches in a table")
    add("--json", help="write a line for each result here")
    add("--plot", help="write a PNG here")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_flags(parser(), arguments)
    try:
        if options.backend != "classic":
            raise BenchError("there is no backend tent: --backend=classic")
        if options.use_vram:
            raise BenchError("there is no GPU memory in this version: --use_vram=false")
        return serve(options) if options.mode == "target" else initiate(options)
    except BenchError as error:
        print(f"transfer_engine_bench: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
