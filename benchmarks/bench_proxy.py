"""Measures communication that kernels begin and a thread of the host carries out (docs/proxy.md).

    python benchmarks/bench_proxy.py commands --build build/cpp-none --wire fabric
    python benchmarks/bench_proxy.py queue|blocking|latency|send|all-to-all|idle|copies|all ...

`queue` measures the ring alone, `commands` a bare loop of writes and the proxy in turns,
`blocking` a flush after each command beside one flush at the end, `latency` the time until a
command has completed, `send` a command and its answer, `all-to-all` ranks that all write to each
other, `idle` the processor's time of proxies without commands. The emulator of tests/simt runs the
kernels on a core of this host.

On a machine with a GPU and nvcc, `queue` also measures kernels of the GPU, with 1, 4 and 32 blocks:
all of the ring in pinned memory, its counts in memory of the GPU (GDRCopy), all of it in managed
memory. `copies` measures a kernel's copies to another GPU, or within the only one, by the number of
its blocks. Without them the rows say what they need.

`--build` is a build folder of csrc (its libmooncake_core.a is used). Wire `fabric` is libfabric's
provider over TCP, on loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import numbers, print_table
from ranks import HERE, run_main

PARTS = ("queue", "commands", "blocking", "latency", "send", "all-to-all", "idle", "copies")
QUEUES = ("pinned", "GDRCopy", "managed")  # of a GPU
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
COMMANDS = 320_000  # of a row of `queue` on a GPU
COPY_BYTES = 256 << 20
LEAST_OF_BARE = 0.9  # commands a second by the proxy, of those of a bare loop
SOFTWARE_CARDS = {"MOONCAKE_FABRIC_REQUIRE": "tcp;ofi_rxm", "MC_TE_FILTERS": "127.0.0.1"}

Row = dict[str, Any]


def build(folder: Path, into: Path) -> str:
    program = into / "proxy_bench"
    root = HERE.parent
    subprocess.run(
        ["c++", "-std=c++20", "-O2", f"-I{root / 'csrc'}", f"-I{root}",
         str(HERE / "proxy_bench.cc"), *map(str, sorted(root.glob("tests/simt/*.cc"))),
         str(folder / "libmooncake_core.a"), "-ldl", "-pthread", "-o", str(program)],
        check=True,
    )  # fmt: skip
    return str(program)


def rows_of(program: str, wire: str, *words: object) -> list[Row]:
    env = {"MOONCAKE_LOG_LEVEL": "error", **os.environ}
    if wire == "fabric":
        env = {**SOFTWARE_CARDS, **env}
    command = [program, *map(str, words)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=600, env=env
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def why_no_gpu() -> str | None:
    """What this machine lacks for proxy_gpu.cu, or None."""
    listed = shutil.which("nvidia-smi") and subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False
    )
    if not listed or "GPU" not in listed.stdout:
        return "needs a GPU"
    return None if NVCC else "needs nvcc"


def gpu_rows(build: Path, part: str, number: int) -> list[Row]:
    """The rows of a part on a GPU; for each of its queues a reason if there is no GPU."""
    if why := why_no_gpu():
        return [{"queue": queue, "why": why} for queue in (QUEUES if part == "queue" else [part])]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "proxy_gpu"
        root = HERE.parent
        subprocess.run(
            [str(NVCC), "-std=c++20", "-O2", "-arch=native", "-allow-unsupported-compiler",
             f"-I{root / 'csrc'}", f"-I{root}", str(HERE / "proxy_gpu.cu"),
             str(build / "libmooncake_core.a"), "-ldl", "-lpthread", "-o", str(program)],
            check=True,
        )  # fmt: skip
        return rows_of(str(program), "", part, number)


def thousands(rate: float) -> str:
    return f"{rate / 1000:.1f}"


def queue(program: str, args: argparse.Namespace) -> int:
    rows = [
        [row["queue"], str(row["producers"]), thousands(row["per_s"])]
        for row in rows_of(program, args.wire, "queue", args.seconds)
    ]
    rows = [[f"{queue}, on the host", *others] for queue, *others in rows]
    for row in gpu_rows(args.build, "queue", COMMANDS):
        rows.append(
            [row["queue"], str(row["producers"]), thousands(row["per_s"])]
            if "per_s" in row
            else [row["queue"], "-", row["why"]]
        )
    print_table("the ring alone", ["queue", "producers", "1000 commands/s"], rows)
    return 0


def copies(build: Path) -> int:
    rows = [
        [str(row["to"]), str(row["blocks"]), f"{row['gb_per_s']:.1f}"]
        if "gb_per_s" in row
        else ["-", "-", row["why"]]
        for row in gpu_rows(build, "copies", COPY_BYTES)
    ]
    print_table("copies from GPU 0 by a kernel", ["to GPU", "blocks", "GB/s"], rows)
    return 0


def commands(program: str, args: argparse.Namespace) -> int:
    lines, least = [], []
    for size in args.bytes:
        rows = rows_of(
            program, args.wire, "commands", args.wire, size, args.seconds, args.rounds
        )  # fmt: skip
        bare = statistics.median(row["bare"] for row in rows)
        by_proxy = [statistics.median(row[key] for row in rows) for key in ("one", "four")]
        ratios = [rate / bare for rate in by_proxy]
        least.append(min(ratios))
        lines.append(
            [str(size), thousands(bare), *map(thousands, by_proxy), *(f"{r:.2f}" for r in ratios)]
        )
    headers = ["bytes", "bare loop", "1 producer", "4 producers", "1 / bare", "4 / bare"]
    print_table(f"1000 commands/s over {args.wire}, medians", headers, lines)
    return int(args.gate and min(least) < LEAST_OF_BARE)


def blocking(program: str, args: argparse.Namespace) -> int:
    lines = []
    for size in args.bytes:
        (row,) = rows_of(program, args.wire, "blocking", args.wire, size, args.seconds)
        rates = [thousands(row["blocking"]), thousands(row["non_blocking"])]
        lines.append([str(size), *rates])
    headers = ["bytes", "a flush each", "one flush at the end"]
    print_table(f"1000 commands/s over {args.wire}", headers, lines)
    return 0


def times(title: str, program: str, what: str, args: argparse.Namespace) -> int:
    lines = [
        [row["what"], str(row["bytes"]), f"{row['p50_us']:.0f}", f"{row['p99_us']:.0f}"]
        for size in args.bytes
        for row in rows_of(program, args.wire, what, args.wire, size, args.count)
    ]
    print_table(f"{title} over {args.wire}", ["what", "bytes", "p50 us", "p99 us"], lines)
    return 0


def all_to_all(program: str, args: argparse.Namespace) -> int:
    lines = []
    for size in args.bytes:
        (row,) = rows_of(
            program, args.wire, "all-to-all", args.wire, args.ranks, size, args.seconds
        )  # fmt: skip
        lines.append([str(row["ranks"]), str(size), f"{row['bytes_per_s'] / 1e6:.1f}"])
    print_table(f"all-to-all over {args.wire}, all ranks", ["ranks", "bytes", "MB/s"], lines)
    return 0


def run(part: str, program: str, args: argparse.Namespace) -> int:
    if part == "queue":
        return queue(program, args)
    if part == "commands":
        return commands(program, args)
    if part == "blocking":
        return blocking(program, args)
    if part == "latency":
        return times("until a command has completed", program, part, args)
    if part == "send":
        return times("send and receive", program, part, args)
    if part == "all-to-all":
        return all_to_all(program, args)
    if part == "idle":
        (row,) = rows_of(program, args.wire, part, args.wire, args.seconds)
        print(f"two idle ranks over {args.wire}: {row['percent']:.2f} % of a core")
        return 0
    return copies(args.build)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--build", type=Path, required=True, help="a build folder of csrc")
    parser.add_argument("--wire", default="fabric", help="tcp, fabric or sim")
    parser.add_argument("--bytes", type=numbers, default=[256, 4096, 65536])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="of `commands`")
    parser.add_argument("--count", type=int, default=1000, help="of `latency` and `send`")
    parser.add_argument("--ranks", type=int, default=4, help="of `all-to-all`")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is broken")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build(args.build, Path(folder))
        parts = PARTS if args.part == "all" else [args.part]
        return max(run(part, program, args) for part in parts)


if __name__ == "__main__":
    sys.exit(run_main(main))
