"""Ranks that are late beyond timeout_us where calls go by kernels: the same masks and results as on
the CPU, in test_ep_late.py."""

from __future__ import annotations

import signal
import time

import ep_crew
import hosts
import peer_ranks
import pytest
import test_ep_graphs
import test_ep_late
import torch
from conftest import DEVICE
from ep_crew import check_combine, check_dispatch, my_answers
from ep_kernel_ranks import crew, held
from harness import scaled
from test_ep_late import BF16, EXPERTS, HIDDEN, OWNERS, SIZE, TOKENS, TOPK, Round

EVERYBODY = range(SIZE)
PATIENCE_US = int(scaled(1_000_000))  # no rank is later than that by itself
STOPPED = scaled(2)  # seconds: beyond the patience, and less than the failure timeout
SPLITS = {"one host": None, "1+3": (1, 3)}


@pytest.fixture(params=SPLITS)
def apart(request, two_hosts, monkeypatch):
    """So many ranks on each of two hosts."""
    split = SPLITS[request.param]
    if split is None:
        return
    if hosts.why_not():
        pytest.skip(str(hosts.why_not()))
    monkeypatch.setattr(peer_ranks, "places", lambda size: two_hosts().places(split))


def without(*late):
    return [rank for rank in EVERYBODY if rank not in late]


def bits(ranks):
    return [int(rank in ranks) for rank in EVERYBODY]


def by_kernels(me, function, *args):
    """Runs the function, whose calls must go by kernels where the device counts them."""
    if DEVICE != "fake":
        return function(me, *args)
    from fake_device import control

    before = control.kernels_run()
    result = function(me, *args)
    assert control.kernels_run() > before
    return result


@pytest.mark.parametrize("where", ["dispatch", "combine", "stopped"])
@pytest.mark.parametrize("late", [0, 2])
def test_late(late, where, apart):
    """A rank that is stopped must take part in the agreement, so it is waited for."""
    how = {"return_recv_hook": True} if late == 2 else {}
    with crew(SIZE, env=test_ep_late.FAILURE_TIMEOUT) as ranks:
        ranks.start(by_kernels, test_ep_late.late_on_rank, late, where, how, HIDDEN, PATIENCE_US)
        ranks.board.wait_all("ready", EVERYBODY)
        if where == "stopped":
            ranks.signal(late, signal.SIGSTOP)
        ranks.board.set("late")
        if where == "stopped":
            time.sleep(STOPPED)
            assert not any(ranks.board.has(f"through-{rank}") for rank in without(late))
            ranks.signal(late, signal.SIGCONT)
        results = ranks.results()
    agreed = [bits(without(late))] * len(results[0][0])
    assert [found for found, _ in results] == [agreed] * SIZE


def two_late_on_rank(me, first, second):
    """`first` misses the dispatch and the combine, `second` the combine."""
    given = ep_crew.inputs(13, [8, 3, 5, 8], HIDDEN, TOPK, EXPERTS)
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    one = Round(me, buffer, given, {}, PATIENCE_US)
    left = without(first, second)
    if me.rank == first:
        me.board.wait_all("through", left)
    found = one.dispatch()
    if me.rank == second:
        me.board.wait_all("through", left)
    if me.rank == first:
        test_ep_late.expect_nothing(found)
        rows = torch.zeros_like(found[0])
    else:
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, active=without(first), **BF16)
    combined, missing = one.combine(rows, found[2])
    if me.rank in left:
        check_combine(
            me, combined, missing, given, TOKENS, EXPERTS, active=without(first), still_active=left
        )
    else:
        assert not combined.any()
        assert missing.tolist() == (one.mine.topk_idx >= 0).any(dim=1).tolist()
    me.board.set(f"through-{me.rank}")
    for _ in range(3):
        ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    buffer.destroy()
    return one.agreed


def test_two_late_ranks(apart):
    first, second = 1, 3
    with crew(SIZE) as ranks:
        results = ranks.call(by_kernels, two_late_on_rank, first, second)
    dispatched, combined = bits(without(first)), bits(without(first, second))
    assert [results[rank] for rank in without(first)] == [[dispatched, combined]] * 3
    # It was away when the others agreed on the combine, but it is not among its own ranks.
    assert [agreed[first] for agreed in results[first]] == [0, 0]


def late_and_killed_on_rank(me, late, victim):
    given = ep_crew.inputs(14, [8, 3, 5, 8], HIDDEN, TOPK, EXPERTS)
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    one = Round(me, buffer, given, {}, PATIENCE_US)
    test_ep_late.go(me, "ready", EVERYBODY)
    me.board.wait("late")
    left, alive = without(late, victim), without(victim)
    if me.rank == late:
        me.board.wait_all("through", left)
    found = one.dispatch()
    if me.rank == late:
        test_ep_late.expect_nothing(found)
        rows = torch.zeros_like(found[0])
    else:
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, active=left, **BF16)
    combined, missing = one.combine(rows, found[2])
    if me.rank == late:
        assert not combined.any()
    else:
        check_combine(me, combined, missing, given, TOKENS, EXPERTS, active=left)
    me.board.set(f"through-{me.rank}")
    for _ in range(3):
        found = buffer.low_latency_dispatch(one.mine.x, one.mine.topk_idx, TOKENS, EXPERTS, **BF16)
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, active=alive, **BF16)
        combined, event, _ = buffer.low_latency_combine(
            my_answers(me, rows, OWNERS), one.mine.topk_idx, one.mine.weights, found[2]
        )
        missing = event.missing_contributions
        check_combine(me, combined, missing, given, TOKENS, EXPERTS, active=alive)
    buffer.destroy()
    return one.agreed


def test_a_late_rank_and_a_killed_one(apart):
    late, victim = 0, 2
    with crew(SIZE) as ranks:
        ranks.start(by_kernels, late_and_killed_on_rank, late, victim)
        ranks.board.wait_all("ready", EVERYBODY)
        ranks.signal(victim, signal.SIGKILL)
        ranks.board.set("late")
        results = ranks.results(dead=[victim])
        ranks.broken = True
    left = without(late, victim)
    assert [results[rank] for rank in left] == [[bits(left)] * 2] * 2
    assert [agreed[late] for agreed in results[late]] == [0, 0]


def late_replays(me, late):
    """Every second replay of the late rank comes when the others have ended theirs."""
    buffer = test_ep_graphs.a_buffer()
    decode = test_ep_graphs.Decode(me, buffer, timeout_us=PATIENCE_US)
    everybody = range(test_ep_graphs.SIZE)
    left = [rank for rank in everybody if rank != late]
    for seed in range(6):
        given = test_ep_graphs.inputs(seed)
        is_late = seed % 2 == 1
        me.board.set(f"at-{seed}-{me.rank}")
        me.board.wait_all(f"at-{seed}", everybody)
        if is_late and me.rank == late:
            me.board.wait_all(f"through-{seed}", left)
        decode.replay(given)
        active = [rank for rank in everybody if decode.active.tolist()[rank]]
        assert active == (left if is_late else list(everybody))
        if is_late and me.rank == late:
            test_ep_late.expect_nothing(decode.found)
            assert not decode.combined.any()
            lacks = (decode.topk_idx >= 0).any(dim=1)
            assert decode.missing.tolist() == lacks.tolist()
        else:
            decode.check(given, active)
        me.board.set(f"through-{seed}-{me.rank}")
    buffer.destroy()


@pytest.mark.parametrize("late", [0, 1])
def test_late_replays(late):
    with crew() as ranks:
        ranks.call(late_replays, late)


def late_stream(me, late):
    """The host of the late rank has called, and its stream has not come to the call."""
    given = ep_crew.inputs(15, [8, 3, 5, 8], HIDDEN, TOPK, EXPERTS)
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    torch.accelerator.synchronize()
    mine, left, ranks = given[me.rank], without(late), torch.ones(SIZE, dtype=torch.int32)
    test_ep_late.go(me, "ready", EVERYBODY)
    with held() as gate:
        if me.rank != late:
            gate.open()
        found = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, TOKENS, EXPERTS, active_ranks=ranks,
            timeout_us=PATIENCE_US, **BF16,
        )  # fmt: skip
        if me.rank != late:
            check_dispatch(me, found, given, TOKENS, EXPERTS, active=left, **BF16)
        else:
            me.board.wait_all("through", left)
            gate.open()
            test_ep_late.expect_nothing(found)
        me.board.set(f"through-{me.rank}")
    assert ranks.tolist() == bits(left)
    for _ in range(3):
        ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    buffer.destroy()


@pytest.mark.skipif(DEVICE != "fake", reason="the test holds a stream")
def test_a_late_stream():
    with crew(SIZE) as ranks:
        ranks.call(by_kernels, late_stream, 3)
