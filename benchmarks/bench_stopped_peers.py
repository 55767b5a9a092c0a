"""Measures what stopped peers of a transfer engine cost its other peers.

    python benchmarks/bench_stopped_peers.py --stopped 1,8,64 --wires tcp,shm --json out.json --gate

One process measures. A second one holds the healthy target, and a third one all targets that are
stopped (SIGSTOP). Each of these always has a batch of 64 writes under way: when one has failed, the
next one begins. The healthy target gets single writes of 4 KiB, one after the other, and then
batches of 64 writes of 64 KiB. Both are measured without and with stopped peers, in turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gates
from common import Progress, machine_facts, names, numbers, print_table, short, write_json_lines
from gates import Finding

HOST = "127.0.0.1"
PIECES = 64
SMALL, LARGE = 4 << 10, 64 << 10
THROUGHPUT_LIMIT = 1.1  # time of the batches, with stopped peers / without
P99_LIMIT_MS = 5.0
ROUNDS = 4

Rows = list[dict[str, Any]]


def _engine(size: int) -> tuple[Any, Any, str]:
    import numpy as np

    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("an engine cannot be made")
    memory = np.zeros(size, dtype=np.uint8)
    if engine.register_memory(memory.ctypes.data, size) != 0:
        raise RuntimeError("memory cannot be registered")
    return engine, memory, f"{HOST}:{engine.get_rpc_port()}"


def _hold(count: int, size: int, pipe: Any) -> None:
    sides = [_engine(size) for _ in range(count)]
    pipe.send([(session, int(memory.ctypes.data)) for _, memory, session in sides])
    pipe.recv()


class Target:
    """A process with `count` engines."""

    def __init__(self, count: int, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_hold, args=(count, size, theirs), daemon=True)
        self.process.start()
        self.peers = self.pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid or 0, number)

    def stop(self) -> None:
        """Returns once all threads have stopped."""
        self.signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any(") T " not in (task / "stat").read_text() for task in tasks.iterdir()):
            time.sleep(0.001)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.pipe.send(None)
        self.process.join()


class Load:
    """Keeps batches under way to the stopped peers, until stop()."""

    def __init__(self, engine: Any, here: int, peers: list[tuple[str, int]]) -> None:
        self.engine, self.here, self.peers = engine, here, peers
        self.batches = [self._submit(peer) for peer in peers]
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _submit(self, peer: tuple[str, int]) -> int:
        session, there = peer
        starts = range(0, PIECES * SMALL, SMALL)
        here, remote = [self.here + at for at in starts], [there + at for at in starts]
        return self.engine.batch_transfer_async_write(session, here, remote, [SMALL] * PIECES)

    def _run(self) -> None:
        while not self.ended.wait(0.05):
            for i, peer in enumerate(self.peers):
                if self.engine.transfer_check_status(self.batches[i]) != 0:
                    self.batches[i] = self._submit(peer)

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()
        self.engine.get_batch_transfer_status(self.batches)


def _measure(engine: Any, here: int, peer: tuple[str, int], seconds: float) -> dict[str, Any]:
    session, there = peer
    small, batches, wrong = [], [], 0
    end = time.perf_counter() + seconds / 2
    while (start := time.perf_counter()) < end:
        wrong += engine.transfer_sync_write(session, here, there, SMALL) != 0
        small.append(time.perf_counter() - start)
    starts = range(0, PIECES * LARGE, LARGE)
    ours, remote = [here + at for at in starts], [there + at for at in starts]
    end = time.perf_counter() + seconds / 2
    while (start := time.perf_counter()) < end:
        wrong += engine.batch_transfer_sync_write(session, ours, remote, [LARGE] * PIECES) != 0
        batches.append(time.perf_counter() - start)
    return {"small": small, "batches": batches, "wrong": wrong}


def _row(wire: str, stopped: int, turns: list[dict[str, Any]]) -> dict[str, Any]:
    small = sorted(value for turn in turns for value in turn["small"])
    wrong = sum(turn["wrong"] for turn in turns)
    return {
        "kind": "stopped",
        "wire": wire,
        "stopped": stopped,
        "small_p50_ms": statistics.median(small) * 1e3,
        "small_p99_ms": small[len(small) * 99 // 100] * 1e3,
        "batch_mean_ms": statistics.mean(v for turn in turns for v in turn["batches"]) * 1e3,
        "correct": wrong == 0,
        "error": f"{wrong} transfers failed" if wrong else None,
    }


def run(wire: str, counts: list[int], seconds: float, progress: Progress) -> Rows:
    """Two rows for each count: without and with stopped peers."""
    rows = []
    for count in counts:
        os.environ["MOONCAKE_TRANSPORTS"] = wire
        engine, memory, _ = _engine(PIECES * LARGE)
        here = int(memory.ctypes.data)
        live, doomed = Target(1, PIECES * LARGE), Target(count, PIECES * SMALL)
        for session, there in [*live.peers, *doomed.peers]:
            engine.transfer_sync_write(session, here, there, 8)
        quiet, beside = [], []
        for turn in range(ROUNDS):
            progress.step(f"{wire}, {count} stopped, round {turn + 1} of {ROUNDS}")
            quiet.append(_measure(engine, here, live.peers[0], seconds / ROUNDS))
            doomed.stop()
            load = Load(engine, here, doomed.peers)
            time.sleep(0.1)  # until all batches are under way
            beside.append(_measure(engine, here, live.peers[0], seconds / ROUNDS))
            doomed.signal(signal.SIGCONT)
            load.stop()
        rows += [_row(wire, 0, quiet), _row(wire, count, beside)]
        rows[-1]["slower"] = rows[-1]["batch_mean_ms"] / rows[-2]["batch_mean_ms"]
        live.end()
        doomed.end()
    return rows


def judge(rows: Rows) -> list[Finding]:
    beside = {f"{row['wire']}, {row['stopped']} stopped": row for row in rows if row["stopped"]}
    slower = {key: row["slower"] for key, row in beside.items()}
    p99 = {key: row["small_p99_ms"] for key, row in beside.items()}
    return [
        gates.at_most("time of a batch, with stopped peers / without", slower, THROUGHPUT_LIMIT),
        gates.at_most("p99 of a 4 KiB write beside stopped peers, ms", p99, P99_LIMIT_MS),
    ]


def show(rows: Rows) -> None:
    headers = ["wire", "stopped", "4K p50 ms", "4K p99 ms", "64 x 64K ms", "slower"]
    fields = ("small_p50_ms", "small_p99_ms", "batch_mean_ms", "slower")
    lines = [
        [row["wire"], str(row["stopped"]), *[short(row.get(field)) for field in fields]]
        for row in rows
    ]
    print_table("writes to a healthy peer beside stopped ones", headers, lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stopped", type=numbers, default=[1, 8, 64], help="numbers of peers")
    parser.add_argument("--wires", type=names, default=["tcp", "shm"])
    parser.add_argument("--seconds", type=float, default=8, help="for each number, both ways")
    parser.add_argument("--json", help="write JSON lines here")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is broken")
    args = parser.parse_args(argv)
    progress = Progress(len(args.wires) * len(args.stopped) * ROUNDS)
    rows = [
        row for wire in args.wires for row in run(wire, args.stopped, args.seconds / 2, progress)
    ]
    findings = judge(rows)
    show(rows)
    gates.show(findings, "summary")
    write_json_lines(
        args.json, [machine_facts(), *rows, *[finding.as_row() for finding in findings]]
    )
    return gates.exit_code(rows, findings, args.gate)


if __name__ == "__main__":
    sys.exit(main())
