"""Measures how fast the engine moves data, beside the limits of the machine: bare blocking sockets
over the same buffers (tcp_ceiling.c, best of 1, 2 and 4 streams), iperf3 if it is installed, and,
on one host without a wire, a memcpy of the same size. All take turns in one run; the ratio is that
of the medians.

    python benchmarks/bench_tcp.py --build build/cpp-none --rounds 5            # loopback
    python benchmarks/bench_tcp.py --build build/cpp-none --hosts               # needs root
    python benchmarks/bench_tcp.py --build build/cpp-none --hosts --rate 1gbit --total 268435456
    python benchmarks/bench_tcp.py --build build/cpp-none --wire shm --place arena
    python benchmarks/bench_tcp.py --build build/cpp --device    # beside memory of a fake device
    python benchmarks/bench_tcp.py --build build/cpp-none --blocks 65536,1048576 --plot tcp.png
    python benchmarks/bench_tcp.py --build build/cpp-none --idle 100    # peers that do nothing
    python benchmarks/bench_tcp.py --reduce 1gbit     # all_reduce of 64 MiB over such a link

`--build` is a build folder of csrc (its libmooncake_core.a is used); for `--device` it is one with
MOONCAKE_WITH_SIM. A copy from or to a fake device is a memcpy on a thread of its own, so it needs a
free core at each end. The two hosts are network
namespaces (tests/hosts.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import iperf
from common import Panels, plot_panels
from ranks import HERE, run_job, run_main

sys.path.insert(0, str(HERE.parent / "tests"))
import hosts

PORT = "45671"


def build(folder: Path, into: Path) -> tuple[str, str]:
    ceiling, engine = into / "tcp_ceiling", into / "engine_bench"
    subprocess.run(
        ["cc", "-O2", "-pthread", str(HERE / "tcp_ceiling.c"), "-o", str(ceiling)], check=True
    )
    subprocess.run(
        ["c++", "-std=c++20", "-O2", f"-I{HERE.parent / 'csrc'}", f"-I{HERE.parent}",
         str(HERE / "engine_bench.cc"), str(folder / "libmooncake_core.a"), "-ldl", "-pthread",
         "-o", str(engine)],
        check=True,
    )  # fmt: skip
    return str(ceiling), str(engine)


def output_of(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout


@contextlib.contextmanager
def running(
    command: list[str], env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=env,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe
            pipe.close()


def idle(engine: str, peers: int) -> None:
    """Measures the cost of an idle transfer engine with many peers, and that of a first
    transfer."""
    environment = {**os.environ, "MC_FORCE_TCP": "1"}
    with running([engine, "targets", str(peers)], env=environment) as targets:
        assert targets.stdout
        lines = list(iter(targets.stdout.readline, "done\n"))
        done = subprocess.run(
            [engine, "idle", "10"], input="".join(lines), env=environment, check=True,
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    handshake, first, cpu, resident = map(float, done.stdout.split())
    print(f"{len(lines)} peers: a bare TCP connect {handshake:.0f} us,", end=" ")
    print(f"a first transfer {first:.0f} us (limit: 1000 more)")
    print(f"idle: {cpu:.3f} % of a core (limit 0.5), {resident:.1f} MiB resident (limit 64)")


def reduce(rate: str, rounds: int) -> None:
    """Measures all_reduce of 64 MiB between two hosts with one rank each."""
    with hosts.Hosts(2, v6=False) as both:
        limit(both, rate)
        spec = {
            "namespaces": [host.namespace for host in both.hosts],
            "addresses": [host.v4[0] for host in both.hosts],
            "links": [[host.v4[0] for host in both.hosts]],
            "rounds": rounds,
        }
        env = {"MOONCAKE_TRANSPORTS": "shm,tcp"}
        (row,) = run_job("bench_fabric:reduce_main", 2, spec, env=env)
    bits, bare = row["bits"] / 1e9, row["iperf3_bits"] / 1e9
    print(f"{row['what']} over {rate}: {bits:.3f} Gbit/s of the bus, {row['cores']:.1f} cores,")
    print(f"iperf3 both ways {bare:.3f} Gbit/s, {bits / bare:.3f} of it")


def limit(both: hosts.Hosts, rate: str) -> None:
    for host in both.hosts:
        shape = ["rate", rate, "burst", "256kb", "latency", "50ms"]
        host.run(*["tc", "qdisc", "add", "dev", "eth0", "root", "tbf"], *shape)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, help="needed but for --reduce")
    parser.add_argument("--wire", default="tcp")
    parser.add_argument("--place", default="user", choices=["user", "arena"])
    parser.add_argument("--device", action="store_true", help="also memory of a fake device")
    parser.add_argument("--hosts", action="store_true", help="two hosts of the tests")
    parser.add_argument("--rate", help="of the link between them, as tc writes it")
    parser.add_argument("--blocks", default="1048576,65536")
    parser.add_argument("--buffer", type=int, default=256 << 20)
    parser.add_argument("--total", type=int, default=1 << 30)
    parser.add_argument("--inflight", type=int, default=16 << 20, help="bytes under way")
    parser.add_argument("--threads", type=int, default=2, help="of the engine, for data")
    parser.add_argument("--streams", default="1,2,4", help="of the bare sockets")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reduce", metavar="RATE", help="only this, over a link so fast")
    parser.add_argument("--idle", type=int, default=0, help="only this: so many peers")
    parser.add_argument("--without-iperf", action="store_true")
    parser.add_argument("--plot", help="PNG: megabytes per second over the size of a block")
    options = parser.parse_args(argv)
    if options.reduce:
        reduce(options.reduce, options.rounds)
        return 0
    if not options.build:
        parser.error("--build is needed")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ceiling, engine = build(options.build, folder)
        if options.idle:
            idle(engine, options.idle)
            return 0
        panels: Panels = {}
        here: list[str] = []
        there: list[str] = []
        address, own = "127.0.0.1", "127.0.0.1"
        if options.hosts:
            both = stack.enter_context(hosts.Hosts(2, v6=False))
            here, there = (["ip", "netns", "exec", host.namespace] for host in both.hosts)
            own, address = both[0].v4[0], both[1].v4[0]
            if options.rate:
                limit(both, options.rate)
        stack.enter_context(running([*there, ceiling, "serve", address, PORT]))
        wants_iperf = options.wire == "tcp" and not options.without_iperf
        has_iperf = wants_iperf and shutil.which("iperf3") is not None
        if has_iperf:
            stack.enter_context(running([*there, "iperf3", "-s", "-B", address]))
        threads, buffer = str(options.threads), str(options.buffer)
        serving = [engine, "serve", options.wire, address, threads, buffer, options.place]
        server = stack.enter_context(running([*there, *serving]))
        assert server.stdout
        where = {"engine": ["user", *server.stdout.readline().split()]}
        if options.device:
            serving[-1] = "fake"
            server = stack.enter_context(running([*there, *serving]))
            assert server.stdout
            where["device"] = ["fake", *server.stdout.readline().split()]
        time.sleep(0.2)

        for block in options.blocks.split(","):
            for verb in ("READ", "WRITE"):
                rows: dict[str, list[float]] = {"ceiling": [], "engine": [], "memcpy": []}
                move = [verb, buffer, block, str(options.total)]
                for _ in range(options.rounds):
                    bare = [
                        float(output_of([*here, ceiling, "run", address, PORT, streams, *move]))
                        for streams in options.streams.split(",")
                    ]
                    rows["ceiling"].append(max(bare))
                    depth = str(max(4, options.inflight // int(block)))
                    run = [engine, "run", options.wire, own, threads, *move, depth]
                    for name, peer in where.items():
                        rate = float(output_of([*here, *run, *peer]))
                        rows.setdefault(name, []).append(rate)
                    copy = [engine, "memcpy", buffer, block, str(options.total)]
                    rows["memcpy"].append(float(output_of(copy)))
                    for streams in (1, 16) if has_iperf else ():
                        how = ["-R"] * (verb == "READ") + ["-P", str(streams)]
                        rate = iperf.bits([address], how, here) / 8
                        rows.setdefault(f"iperf3 -P {streams}", []).append(rate)
                middle = {name: statistics.median(values) for name, values in rows.items()}
                for name, value in middle.items():
                    lines = panels.setdefault(f"{options.wire} {verb}", {})
                    lines.setdefault(name, []).append((int(block), value / 1e6))
                print(
                    f"{options.wire} {verb} {block}:",
                    *(f"{name} {value / 1e6:.1f} MB/s," for name, value in middle.items()),
                    *(
                        f"{middle['engine'] / value:.3f} x {name}"
                        for name, value in middle.items()
                        if name not in ("engine", "device")
                    ),
                    *(
                        f"device {middle['device'] / middle['engine']:.3f} x engine"
                        for _ in range(options.device)
                    ),
                    flush=True,
                )
        plot_panels(
            options.plot, panels, 2,
            title="one engine, median over rounds", x="bytes per block", y="MB/s",
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
