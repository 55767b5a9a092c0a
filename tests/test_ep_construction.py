"""How Buffers are made: at once for both modes, of address space that costs no memory, again after
another one, and on all ranks or on none."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ep_crew
import harness
import normal_crew
import pytest
import torch
import torch.distributed as dist
from harness import raised

from mooncake.ep import Buffer, ElasticBuffer

SIZE, TOKENS, HIDDEN, TOPK, EXPERTS = 4, 8, normal_crew.HIDDEN, normal_crew.TOPK, 9
COUNTS = [8, 5, 0, 8]
# What the buffer is made of: a group of ours, or one that only tells who the ranks are.
OURS, FOREIGN = "mooncake", "gloo"
GIB = 1 << 30


def group_of(kind: str) -> Any:
    return dist.group.WORLD if kind == OURS else dist.new_group(backend="gloo")


def both_modes(group: Any, num_nvl_bytes: int = normal_crew.AMPLE) -> Buffer:
    size = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, group.size(), EXPERTS)
    return Buffer(group, num_nvl_bytes, size, low_latency_mode=True)


# ---- both modes


class NormalRound:
    """Dispatch and combine of the normal mode, among the ranks that are left."""

    def __init__(self, me: harness.Rank, buffer: Buffer, given: Any, left: list[int]) -> None:
        self.me, self.buffer, self.given, self.left = me, buffer, given, left

    def run(self, **how: Any) -> None:
        mine = self.given[self.me.rank]
        found = self.buffer.dispatch(
            mine.x, **normal_crew.layout(self.buffer, mine.topk_idx, EXPERTS),
            topk_idx=mine.topk_idx, topk_weights=mine.weights, **self.ranks(), **how,
        )  # fmt: skip
        self.check_ranks()
        normal_crew.check_dispatch(self.me, found, self.given, EXPERTS, self.left)
        answers = normal_crew.answers_of(self.given, EXPERTS, self.left)
        combined = self.buffer.combine(
            answers[self.me.rank], found[4], topk_weights=found[2], **self.ranks(), **how
        )
        self.check_ranks()
        normal_crew.check_combine(
            self.me, combined, answers, self.given, EXPERTS, self.buffer.missing_contributions,
            active=self.left,
        )  # fmt: skip

    def ranks(self) -> dict[str, torch.Tensor]:
        self.active = torch.ones(SIZE, dtype=torch.int32)
        return {"active_ranks": self.active}

    def check_ranks(self) -> None:
        assert self.active.tolist() == [int(rank in self.left) for rank in range(SIZE)]


def first_normal_call_on_rank(me: harness.Rank, kind: str, victim: int, how: str) -> None:
    given = ep_crew.inputs(11, COUNTS, HIDDEN, TOPK, EXPERTS)
    buffer = both_modes(group_of(kind))
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    me.board.set(f"ready-{me.rank}")
    me.board.wait_all("ready", range(SIZE))
    left = [rank for rank in range(SIZE) if rank != victim]
    if me.rank != victim:
        one = NormalRound(me, buffer, given, left)
        begin = time.monotonic()
        one.run(**({"timeout_us": 3_000_000} if how == "late" else {}))
        assert time.monotonic() - begin < harness.DEADLINE / 2
        me.board.set(f"through-{me.rank}")
        if how == "late":
            me.board.wait("back")
            NormalRound(me, buffer, given, list(range(SIZE))).run()
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        me.board.wait_all("through", left)
        mine, more = given[me.rank], {"timeout_us": 3_000_000}
        found = buffer.dispatch(
            mine.x, **normal_crew.layout(buffer, mine.topk_idx, EXPERTS), topk_idx=mine.topk_idx,
            topk_weights=mine.weights, **more,
        )  # fmt: skip
        assert len(found[0]) == 0
        assert not buffer.combine(found[0], found[4], **more)[0].any()
        me.board.set("back")
        NormalRound(me, buffer, given, list(range(SIZE))).run()
    buffer.destroy()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("how", ["killed", "late"])
@pytest.mark.parametrize("kind", [OURS, FOREIGN])
def test_the_first_call_of_the_normal_mode_meets_a_loss(kind, how, victim):
    with harness.starting(SIZE, first_normal_call_on_rank, kind, victim, how) as ranks:
        ranks.results(dead=[victim] if how == "killed" else [])


# ---- address space


def memory_of(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) << 10


def deployment_on_rank(me: harness.Rank, kind: str) -> None:
    """As a decoder of a large model makes it. Few tokens of it are used, without copies."""
    tokens, hidden, experts = 512, 7168, 256
    local = experts // me.size
    group = group_of(kind)
    size = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, me.size, experts)
    assert size > 7 * GIB
    before = memory_of("RssShmem")
    buffer = Buffer(group, GIB, size, low_latency_mode=True)
    x = torch.full((3, hidden), me.rank + 1.0).bfloat16()
    target = (me.rank + 1) % me.size
    topk_idx = torch.full((3, 1), target * local + local - 1)
    for _ in range(3):
        recv_x, count, handle, _, _ = buffer.low_latency_dispatch(
            x, topk_idx, tokens, experts, use_fp8=False
        )
        assert count.tolist() == [0] * (local - 1) + [3]
        assert (recv_x[-1, :3] == (me.rank - 1) % me.size + 1).all()
        answers = buffer.get_next_low_latency_combine_buffer(handle)
        answers[-1, :3] = recv_x[-1, :3] * 2
        combined, _, _ = buffer.low_latency_combine(
            answers, topk_idx, torch.ones(3, 1), handle, zero_copy=True
        )
        assert torch.equal(combined, 2 * x)
    assert memory_of("RssShmem") - before < 256 << 20
    buffer.destroy()


@pytest.mark.parametrize("kind", [OURS, FOREIGN])
def test_a_buffer_of_a_deployment_costs_what_it_touches(kind):
    harness.run_ranks(8, deployment_on_rank, kind)


def little_space_on_rank(me: harness.Rank) -> str:
    """The limit leaves no room for an arena."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + GIB
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
    try:
        return raised(me.init)[1]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_limit_of_address_space_is_named():
    (text,) = harness.run_ranks(1, little_space_on_rank, backend=None)
    for part in ("mmap of an arena of 4294967296 bytes", "ulimit -v", "MOONCAKE_ARENA_BYTES"):
        assert part in text, text


# ---- one after the other


def again_on_rank(me: harness.Rank) -> None:
    """More than half of the arena, so a Buffer needs the memory of the one before."""
    given = ep_crew.inputs(1, [TOKENS] * me.size, HIDDEN, TOPK, EXPERTS)
    for turn in range(4):
        buffer = Buffer(dist.group.WORLD, num_rdma_bytes=5 * GIB // 2, low_latency_mode=True)
        ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
        if me.rank == turn % me.size:
            me.board.wait(f"destroys-{turn}")  # the other rank is ahead
        else:
            me.board.set(f"destroys-{turn}")
        buffer.destroy()
        assert not buffer.missing_contributions.any()


def test_a_buffer_takes_the_memory_of_the_one_before():
    harness.run_ranks(2, again_on_rank, env={"MOONCAKE_ARENA_BYTES": str(4 * GIB)})


# ---- on all ranks or on none


LITTLE = 64 << 20  # the arena of rank 1
TOO_MUCH = 80 << 20


def made(what: str, group: Any, num_bytes: int) -> Any:
    if what == "normal":
        return Buffer(group, num_bytes)
    if what == "low latency":
        return Buffer(group, 0, num_bytes, low_latency_mode=True)
    if what == "both":
        return both_modes(group, num_bytes)
    return ElasticBuffer(group, num_bytes)


def no_room_on_rank(me: harness.Rank, kind: str, what: str) -> None:
    group = group_of(kind)
    for _ in range(2):
        begin = time.monotonic()
        error, text = raised(made, what, group, TOO_MUCH)
        assert error == "DistBackendError", text
        assert "rank 1 could not make its Buffer: no room for" in text, text
        assert time.monotonic() - begin < harness.DEADLINE / 2
    buffer = both_modes(group)
    given = ep_crew.inputs(11, COUNTS, HIDDEN, TOPK, EXPERTS)
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    NormalRound(me, buffer, given, list(range(SIZE))).run()
    buffer.destroy()
    dist.barrier()


@pytest.mark.parametrize("what", ["normal", "low latency", "both", "elastic"])
@pytest.mark.parametrize("kind", [OURS, FOREIGN])
def test_a_rank_without_memory_is_an_error_of_all(kind, what):
    rank_env = {1: {"MOONCAKE_ARENA_BYTES": str(LITTLE)}}
    harness.run_ranks(SIZE, no_room_on_rank, kind, what, rank_env=rank_env)


def no_room_for_a_group_on_rank(me: harness.Rank) -> None:
    """Nor has rank 1 room to meet the other ranks."""
    cpu = torch.device("cpu")
    backend = dist.group.WORLD._get_backend(cpu)
    taken = []
    with contextlib.suppress(dist.DistBackendError):
        while me.rank == 1:
            taken.append(backend.allocate_tensor(1 << 20, dtype=torch.uint8, device=cpu))
    begin = time.monotonic()
    error, text = raised(both_modes, dist.group.WORLD)
    assert error == "DistBackendError", text
    assert "rank 1 could not make group '0/ep': " in text, text
    assert "no room for" in text, text
    assert time.monotonic() - begin < harness.DEADLINE / 2
    taken.clear()
    buffer = both_modes(dist.group.WORLD)
    given = ep_crew.inputs(11, COUNTS, HIDDEN, TOPK, EXPERTS)
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    buffer.destroy()


def test_a_rank_that_cannot_meet_the_others_is_an_error_of_all():
    rank_env = {1: {"MOONCAKE_ARENA_BYTES": str(LITTLE)}}
    harness.run_ranks(SIZE, no_room_for_a_group_on_rank, rank_env=rank_env)


@contextlib.contextmanager
def setting(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def wrong_setting_on_rank(me: harness.Rank) -> None:
    """Rank 1 gets no further than to its first exchange, or to its second one."""
    group = group_of(FOREIGN)
    for name, value, expected in (
        ("MOONCAKE_EAGER_BYTES", "many", "ValueError"),
        ("MOONCAKE_PINNED_CACHE", "much", "ValueError"),
        ("MOONCAKE_TRANSPORTS", "pigeons", "NotImplementedError"),
    ):
        begin = time.monotonic()
        with setting(name, value) if me.rank == 1 else contextlib.nullcontext():
            error, text = raised(both_modes, group)
        assert error == expected, text
        assert text.startswith("rank 1 could not make its Buffer: "), text
        assert value in text, text
        assert time.monotonic() - begin < harness.DEADLINE / 2
    both_modes(group).destroy()


def test_a_wrong_setting_of_one_rank_is_an_error_of_all():
    harness.run_ranks(3, wrong_setting_on_rank)
