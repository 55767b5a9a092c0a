"""Measures the first transfer to a peer, and how much of its cost a warm-up saves: Mooncake's tool.

    efa_first_submit_probe --mode=target
    efa_first_submit_probe --mode=initiator --segment_id=HOST:PORT --warmup=1

The target serves until it gets SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Sequence

from mooncake_backend.command_line import parse_flags
from mooncake_backend.transfer_bench import PROTOCOLS, BenchError, Buffer, open_engine, serve

FAILED = 1


def probe(options: argparse.Namespace) -> int:
    if not options.segment_id:
        raise BenchError("--segment_id is missing: the target prints it after addr=")
    engine, _ = open_engine(options)
    buffer = Buffer(engine, options.buffer_size)
    if options.warmup:
        start = time.perf_counter()
        code = engine.warmup_efa_segment(options.segment_id)
        print(f"warmup:   {_milliseconds(start)} ms (rc={code})", flush=True)
        if code:
            raise BenchError("the warm-up failed; the log above says why")
    there = 0
    for number in range(options.iters):
        start = time.perf_counter()
        there = there or engine.get_first_buffer_address(options.segment_id)
        code = engine.transfer_sync_write(
            options.segment_id, buffer.address, there, options.xfer_size
        )
        print(f"submit #{number}: {_milliseconds(start)} ms", flush=True)
        if code:
            raise BenchError(f"submit #{number} failed: {code}; the log above says why")
    buffer.close()
    return 0


def _milliseconds(start: float) -> str:
    return f"{(time.perf_counter() - start) * 1000:8.2f}"


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes"):
        return True
    if text.lower() in ("0", "false", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text}: not true or false")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="efa_first_submit_probe", description=__doc__)
    parser.add_argument("--mode", default="initiator", help="initiator or target")
    parser.add_argument("--metadata_server", default="P2PHANDSHAKE")
    parser.add_argument("--local_server_name", default="", help="empty: this host, port 12345")
    parser.add_argument("--segment_id", default="", help="of the target")
    parser.add_argument("--warmup", type=_flag, nargs="?", const=True, default=True)
    parser.add_argument("--iters", type=int, default=5)
    parser.add_argument("--xfer_size", type=int, default=1 << 20, help="bytes of one submit")
    parser.add_argument("--buffer_size", type=int, default=1 << 30)
    parser.add_argument("--protocol", default="efa", choices=PROTOCOLS)
    parser.add_argument("--device_name", default="", help="cards, separated by commas; empty: all")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_flags(_parser(), arguments)
    options.local_server_name = options.local_server_name or f"{socket.gethostname()}:12345"
    try:
        if options.mode not in ("initiator", "target"):
            raise BenchError(f"--mode={options.mode}: initiator or target")
        if options.xfer_size > options.buffer_size:
            raise BenchError("--xfer_size is more than --buffer_size")
        if options.mode == "target":
            return serve(options, ready="[target] ready, addr={name}")
        return probe(options)
    except BenchError as error:
        print(f"efa_first_submit_probe: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
