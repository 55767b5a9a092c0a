"""Ranks that are late beyond timeout_us: the others go on without them for that round, all agree on
it, and the late ones take part in the next."""

from __future__ import annotations

import time

import ep_crew
import pytest
import torch
import torch.distributed as dist
from ep_crew import check_combine, check_dispatch, my_answers
from harness import scaled, starting

from mooncake.ep import reference

SIZE, TOKENS, HIDDEN, TOPK, EXPERTS = 4, 8, 640, 2, 10
OWNERS = reference.default_owners(EXPERTS, SIZE)
PATIENCE_US = int(scaled(400_000))  # no rank is later than that by itself
STOPPED = scaled(1.2)  # seconds: beyond the patience, and far from the failure timeout
FAILURE_TIMEOUT = {"MOONCAKE_FAILURE_TIMEOUT_MS": str(int(scaled(3000)))}
BF16 = {"use_fp8": False}
EVERYBODY = range(SIZE)


def go(me, name, ranks):
    """All these ranks have come here."""
    me.board.set(f"{name}-{me.rank}")
    me.board.wait_all(name, ranks)


def without(late):
    return [rank for rank in range(SIZE) if rank != late]


def expect_nothing(found):
    """What a late one gets of its dispatch."""
    _, recv_count, handle, _, _ = found
    assert recv_count.tolist() == [0] * len(recv_count)
    assert not torch.any(handle[1] & 0xFFFFFFFF)


def wait(event, hook):
    hook() if hook is not None else event.current_stream_wait()


class Round:
    """Dispatch and combine of one rank, with the patience; what was agreed."""

    def __init__(self, me, buffer, given, how, patience_us=PATIENCE_US):
        self.me, self.buffer, self.given = me, buffer, given
        self.how = {"timeout_us": patience_us, **how}
        self.mine = given[me.rank]
        self.agreed = []
        self.slowest = 0.0

    def timed(self, call, *arguments, **named):
        ranks = torch.ones(SIZE, dtype=torch.int32)
        begin = time.monotonic()
        found = call(*arguments, active_ranks=ranks, **self.how, **named)
        wait(*found[-2:])
        self.slowest = max(self.slowest, time.monotonic() - begin)
        self.agreed.append(ranks.tolist())
        return found

    def dispatch(self):
        mine = self.mine
        dispatch = self.buffer.low_latency_dispatch
        return self.timed(dispatch, mine.x, mine.topk_idx, TOKENS, EXPERTS, **BF16)

    def combine(self, rows, handle):
        mine = self.mine
        combine = self.buffer.low_latency_combine
        rows = my_answers(self.me, rows, OWNERS)
        combined, event, _ = self.timed(combine, rows, mine.topk_idx, mine.weights, handle)
        return combined, event.missing_contributions


def late_on_rank(me, late, where, how, hidden, patience_us=PATIENCE_US):
    given = ep_crew.inputs(11, [8, 3, 5, 8], hidden, TOPK, EXPERTS)
    buffer = ep_crew.deepep_buffer(TOKENS, hidden, EXPERTS)
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    one = Round(me, buffer, given, how, patience_us)
    left = without(late)
    is_late = me.rank == late
    if where == "combine":
        found = buffer.low_latency_dispatch(one.mine.x, one.mine.topk_idx, TOKENS, EXPERTS, **BF16)
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, **BF16)
    go(me, "ready", EVERYBODY)
    if not is_late:
        me.board.wait("late")  # whoever is to be stopped is
        if where != "combine":
            found = one.dispatch()
            rows = check_dispatch(me, found, given, TOKENS, EXPERTS, active=left, **BF16)
        combined, missing = one.combine(rows, found[2])
        active = EVERYBODY if where == "combine" else left
        agreed = [[int(rank in left) for rank in EVERYBODY]] * len(one.agreed)
        assert one.agreed == agreed, one.agreed
        check_combine(
            me, combined, missing, given, TOKENS, EXPERTS, active=active, still_active=left
        )
    else:
        me.board.wait_all("through", left)
        if where != "combine":
            found = one.dispatch()
            expect_nothing(found)
            rows = torch.zeros_like(found[0])
        combined, missing = one.combine(rows, found[2])
        assert not combined.any()
        assert missing.tolist() == (one.mine.topk_idx >= 0).any(dim=1).tolist()
    me.board.set(f"through-{me.rank}")

    # Nobody is lost: all take part in what comes next.
    status = torch.ones(SIZE, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * SIZE
    for _ in range(3):
        ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    everybody = torch.ones(SIZE, dtype=torch.int32)
    mine = one.mine
    found = buffer.low_latency_dispatch(
        mine.x, mine.topk_idx, TOKENS, EXPERTS, active_ranks=everybody,
        timeout_us=30_000_000, **BF16,
    )  # fmt: skip
    assert everybody.tolist() == [1] * SIZE
    check_dispatch(me, found, given, TOKENS, EXPERTS, **BF16)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == SIZE
    buffer.destroy()
    return one.agreed, one.slowest


# Over tcp, short rows travel with the signal, and long ones are pushed.
@pytest.mark.parametrize(
    ("transports", "hidden"), [("shm", HIDDEN), ("tcp", HIDDEN), ("tcp", 16 * HIDDEN)]
)
@pytest.mark.parametrize("where", ["dispatch", "combine", "stopped"])
@pytest.mark.parametrize("late", [0, 2])
def test_late(late, where, transports, hidden):
    how = {"return_recv_hook": True} if late == 2 else {}
    env = {**FAILURE_TIMEOUT, "MOONCAKE_TRANSPORTS": transports, "MOONCAKE_HOST_IP": "127.0.0.1"}
    with starting(SIZE, late_on_rank, late, where, how, hidden, env=env) as ranks:
        ranks.board.wait_all("ready", EVERYBODY)
        if where == "stopped":
            ranks.stop(late)
        ranks.board.set("late")
        if where == "stopped":
            time.sleep(STOPPED)
            assert not any(ranks.board.has(f"through-{rank}") for rank in without(late))
            ranks.cont(late)
        results = ranks.results()
    agreed = results[0][0]
    assert agreed == [[int(rank != late) for rank in range(SIZE)]] * len(agreed)
    assert all(found == agreed for found, _ in results)
    # Until one's patience is over and all have agreed, not until the Buffer's timeout.
    slowest = [results[rank][1] for rank in without(late)]
    assert max(slowest) >= PATIENCE_US / 1e6
    assert max(slowest) < scaled(8)


def slow_writer_on_rank(me, late):
    """The others are two operations ahead, in a dispatch that reuses memory in which the late one
    still writes the rows of a combine."""
    hidden = 48 * HIDDEN
    given = ep_crew.inputs(11, [8, 3, 5, 8], hidden, TOPK, EXPERTS)
    buffer = ep_crew.deepep_buffer(TOKENS, hidden, EXPERTS)
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    one = Round(me, buffer, given, {})
    mine = one.mine
    dispatch, combine = buffer.low_latency_dispatch, buffer.low_latency_combine
    found = [dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, **BF16) for _ in range(2)]
    if me.rank == late:
        slab = buffer.get_next_low_latency_combine_buffer(found[0][2])
        before = slab.clone()
        me.board.wait_all("ahead", without(late))
        # Nothing comes: there is nothing else to wait for. Where something does, it is seen.
        deadline = time.monotonic() + 0.5
        while torch.equal(slab, before) and time.monotonic() < deadline:
            time.sleep(0.01)
        slab.fill_(3)
        one.timed(combine, slab, mine.topk_idx, mine.weights, found[0][2], zero_copy=True)
        one.timed(combine, found[1][0], mine.topk_idx, mine.weights, found[1][2])
    else:
        rows = check_dispatch(me, found[0], given, TOKENS, EXPERTS, **BF16)
        for each in found:
            one.combine(rows, each[2])
        me.board.set(f"ahead-{me.rank}")
    found = dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, **BF16)
    check_dispatch(me, found, given, TOKENS, EXPERTS, **BF16)
    buffer.destroy()
    return one.agreed


@pytest.mark.parametrize("late", [0, 2])
def test_what_a_late_rank_still_writes_meets_nothing(late):
    env = {"MOONCAKE_TRANSPORTS": "tcp", "MOONCAKE_HOST_IP": "127.0.0.1"}
    with starting(SIZE, slow_writer_on_rank, late, env=env) as ranks:
        results = ranks.results()
    agreed = [[int(rank != late) for rank in range(SIZE)]] * 2
    assert results == [agreed] * SIZE


def mooncake_late_on_rank(me, late):
    given = ep_crew.inputs(12, [8, 3, 5, 8], HIDDEN, TOPK, EXPERTS)
    buffer = ep_crew.mooncake_buffer(TOKENS, HIDDEN, EXPERTS)
    mine = given[me.rank]
    ranks = torch.ones(SIZE, dtype=torch.int32)
    for patience in (None, 0, -1):
        found = buffer.dispatch(
            mine.x, mine.topk_idx, ranks, TOKENS, EXPERTS, patience, use_fp8=False
        )
        check_dispatch(me, found, given, TOKENS, EXPERTS, **BF16)
    if me.rank == late:
        me.board.wait_all("through", without(late))
    found = buffer.dispatch(
        mine.x, mine.topk_idx, ranks, TOKENS, EXPERTS, PATIENCE_US, use_fp8=False
    )
    assert ranks.tolist() == [int(rank != late) for rank in range(SIZE)]
    me.board.set(f"through-{me.rank}")
    everybody = torch.ones(SIZE, dtype=torch.int32)
    buffer.combine(found[0], mine.topk_idx, mine.weights, everybody, -1, found[2])
    assert everybody.tolist() == ranks.tolist(), "the combine knows who missed the dispatch"
    found = buffer.dispatch(mine.x, mine.topk_idx, None, TOKENS, EXPERTS, -1, use_fp8=False)
    check_dispatch(me, found, given, TOKENS, EXPERTS, **BF16)


def test_mooncake_late():
    with starting(SIZE, mooncake_late_on_rank, 1, env={"MOONCAKE_TRANSPORTS": "shm"}) as ranks:
        ranks.results()
