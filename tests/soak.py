"""Kills ranks and replaces them, again and again, while all ranks compute: what a rank that lives
through all of it holds must not grow, and no result may be wrong.

    .venv/bin/python tests/soak.py --cycles 300 --transports shm --keeper 3

One rank, the keeper, is never killed. The other ranks are, in turn, and now and then two at once.
Each round of the ranks checks sums of two groups, messages between neighbors, and a dispatch with
its combine. At the end it prints what the keeper held after the warm-up, at the end, and the growth
for each cycle. Freed blocks that threads keep for themselves count as heap in use; they do not with
GLIBC_TUNABLES=glibc.malloc.tcache_count=0. tests/test_soak.py runs a small soak.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import gc
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist

from mooncake import mooncake_elastic_buffer, mooncake_ep_buffer
from mooncake_backend import pg, replacing

RANKS = 4
EXPERTS, TOKENS, HIDDEN = 8, 6, 64
SETTLED = 3  # rounds with all ranks before a rank measures itself


# ---- what a process holds


class _MallocInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _MallocInfo


def held() -> dict[str, int]:
    """Counts of descriptors, threads, mappings and bytes of this process, by kind."""
    gc.collect()
    _libc.malloc_trim(0)
    facts: collections.Counter[str] = collections.Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            kind = re.sub(r"\d+", "N", os.readlink(entry).split(" ")[0])
        except FileNotFoundError:
            continue  # the folder's own
        facts[f"fd {kind}"] += 1
        if kind == "/memfd:mooncake-arena":
            facts["arena KiB"] += os.stat(entry).st_blocks // 2
        facts["descriptors"] += 1
    for task in Path("/proc/self/task").iterdir():
        try:
            facts[f"thread {(task / 'comm').read_text().strip()}"] += 1
        except OSError:
            continue  # it has ended
        facts["threads"] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = re.sub(r"\d+", "N", " ".join(line.split()[5:]))
        facts["mappings"] += 1
        if path.startswith(("/memfd:", "/dev/shm", "/dev/zero")):
            facts["shared mappings"] += 1
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            facts["shared KiB"] += (last - first) // 1024
    facts["/dev/shm"] = sum(1 for _ in Path("/dev/shm").iterdir())
    status = Path("/proc/self/status").read_text()
    for name in ("VmRSS", "RssAnon", "RssShmem", "VmSize"):
        facts[f"{name} KiB"] = int(re.search(rf"{name}:\s*(\d+) kB", status)[1])
    info = _libc.mallinfo2()
    facts["heap bytes"] = info.uordblks + info.hblkhd
    facts["python objects"] = len(gc.get_objects())
    return dict(facts)


# ---- in the ranks


def part(rank: int, turn: int) -> torch.Tensor:
    """Differs by rank and by round."""
    return torch.arange(2000, dtype=torch.float64) * (turn % 1000 + 1) + 2.0**rank


def total(ranks: tuple[int, ...], turn: int) -> torch.Tensor:
    return torch.stack([part(rank, turn) for rank in ranks]).sum(0)


def tokens(rank: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * turn + rank)
    x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=draw).bfloat16()
    chosen = torch.stack([torch.randperm(EXPERTS, generator=draw)[:2] for _ in range(TOKENS)])
    return x, chosen


@dataclass
class Round:
    """One round of a rank: what it calls, and the checks of the results."""

    me: harness.Rank
    other: Any  # a second group of all ranks
    elastic: bool
    buffer: Any = None

    def sums(self, turn: int) -> None:
        """In both groups, two at a time."""
        tensors = [part(self.me.rank, turn + i) for i in range(4)]
        works = [
            dist.all_reduce(tensor, group=(None, self.other)[i % 2], async_op=True)
            for i, tensor in enumerate(tensors)
        ]
        for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            work.wait()
            ranks = tuple(work.contributors)
            assert torch.equal(tensor, total(ranks, turn + i)), (turn, i, ranks, tensor)

    def messages(self, turn: int) -> None:
        """To the next rank, from the one before: a small one, and one that is fetched."""
        to, source = (self.me.rank + 1) % self.me.size, (self.me.rank - 1) % self.me.size
        works, got = [], []
        for i, count in enumerate((10, 5000)):
            works.append(dist.isend(part(self.me.rank, turn + i).repeat(3)[:count], to, tag=i))
            got.append(torch.zeros(count, dtype=torch.float64))
            works.append(dist.irecv(got[-1], source, tag=i))
        lost = []
        for work in works:
            try:
                work.wait()
                lost.append(False)
            except dist.DistBackendError:
                lost.append(True)
        for i, tensor in enumerate(got):
            expected = part(source, turn + i).repeat(3)[: len(tensor)]
            assert lost[2 * i + 1] or torch.equal(tensor, expected), (turn, i, source)

    def experts(self, turn: int) -> bool:
        """Experts give rows back as they are. Returns whether all ranks took part."""
        if self.buffer is None:
            self.buffer = make_buffer(self.me.size, self.elastic)
        x, chosen = tokens(self.me.rank, turn)
        active = torch.ones(self.me.size, dtype=torch.int32)
        weights = torch.full((TOKENS, 2), 0.5)
        if self.elastic:
            rows, _, given, handle, _ = self.buffer.dispatch(
                x, chosen, weights, num_experts=EXPERTS, num_max_tokens_per_rank=TOKENS,
                active_ranks=active,
            )  # fmt: skip
            rows = (rows.float() * given.sum(1, keepdim=True)).bfloat16()
            combined = self.buffer.combine(rows, handle, active_ranks=active)[0]
        else:
            rows, _, handle, _, _ = self.buffer.dispatch(
                x, chosen, active, TOKENS, EXPERTS, -1, use_fp8=False
            )
            combined = self.buffer.combine(rows, chosen, weights, active, -1, handle)[0]
        there = active.bool()
        parts = there[chosen // (EXPERTS // self.me.size)].sum(1, keepdim=True)
        assert torch.equal(combined, (x.float() * parts * 0.5).bfloat16()), (turn, there)
        return bool(there.all())


def make_buffer(size: int, elastic: bool) -> Any:
    if elastic:
        return mooncake_elastic_buffer.ElasticBuffer(
            dist.group.WORLD, 1 << 21, on_failure="continue"
        )
    hint = mooncake_ep_buffer.Buffer.get_ep_buffer_size_hint(TOKENS, HIDDEN, size, EXPERTS)
    return mooncake_ep_buffer.Buffer(dist.group.WORLD, hint, on_failure="continue")


def agreed(value: int) -> int:
    known = torch.tensor(value)
    dist.all_reduce(known, op=dist.ReduceOp.MAX)
    return int(known)


def all_are_ready() -> bool:
    """Whether a newcomer waits for each lost rank, as all members see it."""
    world = dist.group.WORLD
    active = pg.get_active_ranks(world).tolist()
    lost = [rank for rank, is_active in enumerate(active) if not is_active]
    return not agreed(int(not all(pg.get_peer_state(world, lost))))


def soaked(me: harness.Rank, port: int, elastic: bool, together: bool) -> None:
    """Computes until the test says "end". Writes what this process holds after each admission into
    a file: kept in memory, it would itself be what grows."""
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=harness.DEADLINE))
    dist.init_process_group(
        "mooncake-cpu", store=store, rank=me.rank, world_size=me.size,
        timeout=timedelta(seconds=harness.DEADLINE),
    )  # fmt: skip
    other = dist.new_group(list(range(me.size)))
    if os.environ.get("MOONCAKE_REJOIN"):
        pg.join_group(dist.group.WORLD)
        pg.join_group(other)
    rounds = Round(me, other, elastic)
    turn, cycles, whole = 0, 0, 0
    while True:
        turn = agreed(turn) + 1
        cycles = agreed(cycles)
        rounds.sums(turn)
        rounds.messages(turn)
        whole = whole + 1 if rounds.experts(turn) else 0
        if whole == SETTLED:
            with (me.folder / f"held-{me.rank}-{os.getpid()}").open("a") as file:
                file.write(json.dumps([cycles, held()]) + "\n")
            me.board.set(f"whole-{me.rank}-{os.getpid()}", cycles)
        if agreed(int(me.board.has("end"))):
            return
        if together and not all_are_ready():
            continue
        if came := replacing.admit(dist.group.WORLD):
            pg.recover_ranks(other, came)
            rounds.buffer.update_ep_member()
            cycles, whole = cycles + 1, 0


# ---- the test


@dataclass
class Plan:
    cycles: int = 30
    warm_up: int = 8  # cycles before the first measurement that counts
    transports: str = "shm"
    keeper: int = RANKS - 1  # the rank that lives through all cycles
    elastic: bool = False
    pair_every: int = 4  # in each such cycle two ranks die at once; 0: in none
    together: bool = False  # newcomers of one cycle are let in at once


@dataclass
class Growth:
    """Of what the keeper holds, from the end of the warm-up to the end."""

    name: str
    first: float
    last: float
    per_cycle: float
    values: list[int] = field(repr=False)


def victims_of(plan: Plan, cycle: int) -> list[int]:
    """In turn, and now and then two at once."""
    others = [rank for rank in range(RANKS) if rank != plan.keeper]
    first = others[cycle % len(others)]
    if not plan.pair_every or (cycle + 1) % plan.pair_every:
        return [first]
    return [first, others[(cycle + 1) % len(others)]]


def run(plan: Plan, say: Any = lambda text: None) -> list[Growth]:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {"MOONCAKE_TRANSPORTS": plan.transports}
    moment = random.Random(1)
    with harness.Crew(RANKS, backend=None, env=env) as crew:
        crew.start(soaked, store.port, plan.elastic, plan.together)
        await_whole(crew, range(RANKS), "the first rounds")
        for cycle in range(plan.cycles):
            victims = victims_of(plan, cycle)
            time.sleep(moment.uniform(0, 0.05))  # anywhere in a round
            for rank in victims:
                crew.signal(rank, signal.SIGKILL)
            for rank in victims:
                crew.processes[rank].join(harness.DEADLINE)
            for rank in victims:
                crew.replace(rank, soaked, store.port, plan.elastic, plan.together)
            began = time.monotonic()
            await_whole(crew, victims, f"cycle {cycle}")
            say(f"cycle {cycle}: {victims} are back after {time.monotonic() - began:.2f} s")
        crew.board.set("end")
        crew.results()
        file = crew.folder / f"held-{plan.keeper}-{crew.pid(plan.keeper)}"
        facts = [json.loads(line) for line in file.read_text().splitlines()]
    return growth_of(facts, plan)


def await_whole(crew: harness.Crew, ranks: Any, what: str) -> None:
    """Until these ranks have computed with all ranks, or one of the crew has failed."""
    names = [f"whole-{rank}-{crew.pid(rank)}" for rank in ranks]

    def done() -> bool:
        failed = [rank for rank, link in enumerate(crew.links) if link.poll()]
        if failed:
            crew.results(harness.GRACE)
        return all(crew.board.has(name) for name in names)

    try:
        harness.until(done, what)
    except TimeoutError:
        crew.results(0)  # raises, with the stacks of all ranks
        raise


def growth_of(facts: list[tuple[int, dict[str, int]]], plan: Plan) -> list[Growth]:
    measured = [(cycle, held) for cycle, held in facts if cycle >= plan.warm_up]
    names = sorted({name for _, held in measured for name in held})
    found = []
    for name in names:
        values = [held.get(name, 0) for _, held in measured]
        part = max(1, len(values) // 4)
        first, last = statistics.median(values[:part]), statistics.median(values[-part:])
        apart = (measured[-1][0] - measured[0][0]) * (1 - part / len(values))
        found.append(Growth(name, first, last, (last - first) / max(apart, 1), values))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=20, help="cycles before the first one kept")
    parser.add_argument("--transports", default="shm", choices=["shm", "tcp"])
    parser.add_argument("--keeper", type=int, default=RANKS - 1, help="is never killed")
    parser.add_argument("--elastic", action="store_true", help="ElasticBuffer in place of Buffer")
    parser.add_argument("--pair-every", type=int, default=4, help="two at once; 0: never")
    parser.add_argument("--together", action="store_true", help="two are let in at once")
    plan = Plan(**vars(parser.parse_args()))
    for growth in run(plan, lambda text: print(text, flush=True)):
        grows = "" if growth.first == growth.last else f"  {growth.per_cycle:+.2f} per cycle"
        print(f"{growth.name:40} {growth.first:>12.0f} {growth.last:>12.0f}{grows}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
