"""Dispatch and combine of device tensors by kernels: their two phases and their errors. Graphs are
in tests/test_ep_graphs.py, results in other suites (layout `device-kernels`), losses in
tests/test_ep_failures.py and streams in tests/test_ep_device.py."""

from __future__ import annotations

import re
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import ep_crew
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from ep_crew import check_combine, check_dispatch, my_answers
from ep_kernel_ranks import (
    BF16,
    COUNTS,
    EXPERTS,
    HIDDEN,
    HOOK,
    OWNERS,
    SIZE,
    TOKENS,
    TOPK,
    a_buffer,
    crew,
    dispatch,
    held,
    inputs,
    run,
)
from harness import raised, until
from peer_ranks import dies, runs_kernels

# ---- two phases


def phases(me, timeout_us):
    """Between the two phases nothing runs on the device, though all rows have come."""
    buffer = a_buffer()
    given = inputs(1)
    mine = given[me.rank]
    how = {"timeout_us": timeout_us, **HOOK}
    runs_kernels(lambda: ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS), 4)
    results = []
    runs_kernels(lambda: results.append(dispatch(buffer, mine, **how)), 1)
    dist.barrier()
    runs_kernels(lambda: None, 0)
    found = results.pop()
    runs_kernels(found[4], 1)
    runs_kernels(found[4], 0)
    rows = check_dispatch(me, found, given, TOKENS, EXPERTS, **BF16)
    answered = (my_answers(me, rows, OWNERS), mine.topk_idx, mine.weights, found[2])
    runs_kernels(lambda: results.append(buffer.low_latency_combine(*answered, **how)), 1)
    combined, _, hook = results.pop()
    hook()
    check_combine(me, combined, buffer.missing_contributions, given, TOKENS, EXPERTS)
    buffer.destroy()


@pytest.mark.parametrize("timeout_us", [-1, 20_000_000])
def test_nothing_runs_between_the_phases(timeout_us):
    run(phases, timeout_us)


def rows_that_change_after_the_call(me):
    """With a hook, later work of the stream may change the rows: it waits for the first kernel."""
    buffer = a_buffer()
    given = inputs(2)
    mine = given[me.rank]
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    lent = SimpleNamespace(x=mine.x.clone(), topk_idx=mine.topk_idx)
    torch.accelerator.synchronize()
    with held(buffer.get_comm_stream()):
        found = dispatch(buffer, lent, **HOOK)
        lent.x.zero_()
        time.sleep(0.2)  # a stream that does not wait would change the rows by now
    found[4]()
    check_dispatch(me, found, given, TOKENS, EXPERTS, **BF16)
    buffer.destroy()


@pytest.mark.skipif(DEVICE != "fake", reason="the test holds a stream")
def test_rows_that_change_after_the_call():
    run(rows_that_change_after_the_call)


def hooks_in_any_order(me):
    """A hook that is called late, twice or never harms no operation. Each round has other rows."""
    buffer = a_buffer()
    for round in range(12):
        first, second = inputs(2 * round), inputs(2 * round + 1)
        found = [dispatch(buffer, given[me.rank], **HOOK) for given in (first, second)]
        if round % 3 == 1:
            dispatch(buffer, first[me.rank], **HOOK)  # its results are dropped
        for one in found if round % 2 else reversed(found):
            one[4]()
        rows = [
            check_dispatch(me, one, given, TOKENS, EXPERTS, **BF16)
            for one, given in zip(found, (first, second), strict=True)
        ]
        for one, given, mine in zip(found, (first, second), rows, strict=True):
            combined, event, hook = buffer.low_latency_combine(
                my_answers(me, mine, OWNERS), given[me.rank].topk_idx, given[me.rank].weights,
                one[2], **HOOK,
            )  # fmt: skip
            hook()
            hook()
            missing = event.missing_contributions
            check_combine(me, combined, missing, given, TOKENS, EXPERTS)
    buffer.destroy()


def test_hooks_in_any_order():
    run(hooks_in_any_order)


def dies_between_phases(me, verb):
    """The victim has sent its rows, and never receives any: the operation is one with it."""
    buffer = a_buffer()
    given = inputs(3)
    mine = given[me.rank]
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    active = torch.ones(SIZE, dtype=torch.int32)
    found = dispatch(buffer, mine, active_ranks=active, **HOOK)
    if verb == "combine":
        found[4]()
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, **BF16)
        answered = (my_answers(me, rows, OWNERS), mine.topk_idx, mine.weights, found[2])
        combined, event, hook = buffer.low_latency_combine(*answered, active_ranks=active, **HOOK)
    torch.accelerator.synchronize()  # the rows have been sent
    me.board.set(f"sent-{me.rank}")
    me.board.wait_all("sent", range(SIZE))
    if me.rank == 1:
        signal.raise_signal(signal.SIGKILL)
    until(lambda: not buffer.runtime.active_ranks[1], "the loss")
    if verb == "combine":
        hook()
        missing = event.missing_contributions
        ranks = active.tolist()
        left = [rank for rank in range(SIZE) if ranks[rank]]
        check_combine(me, combined, missing, given, TOKENS, EXPERTS, still_active=left)
    else:
        found[4]()
        ranks = active.tolist()
        left = [rank for rank in range(SIZE) if ranks[rank]]
        check_dispatch(me, found, given, TOKENS, EXPERTS, active=left, **BF16)
    # The rank is out from the next operation on.
    active.fill_(1)
    dispatch(buffer, mine, active_ranks=active)
    assert active.tolist() == [1, 0, 1]
    buffer.destroy()
    return ranks


@pytest.mark.parametrize("verb", ["dispatch", "combine"])
def test_a_rank_that_dies_between_the_phases(verb):
    with crew() as ranks:
        ranks.start(dies_between_phases, verb)
        first, _, last = ranks.results(dead=[1])
        ranks.broken = True
    assert first == last


def made_after_a_loss(me, victim):
    """A buffer on a group with a lost rank in its list. Then another rank is lost, too."""
    given, left = inputs(4), [rank for rank in range(SIZE) if rank != victim]
    dies(me, victim, left)
    buffer = a_buffer(group=dist.new_group(list(range(SIZE))))
    for _ in range(2):
        ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS, masks=([victim] * SIZE,) * 2)
    runs_kernels(
        lambda: ep_crew.round_trip(
            me, buffer, given, TOKENS, EXPERTS, masks=([victim] * SIZE,) * 2
        ),
        4,
    )
    active = torch.ones(SIZE, dtype=torch.int32)
    dispatch(buffer, given[me.rank], active_ranks=active)
    assert active.tolist() == [int(rank in left) for rank in range(SIZE)]
    dies(me, left.pop(), left)
    active.fill_(1)
    dispatch(buffer, given[me.rank], active_ranks=active)
    assert active.tolist() == [int(rank in left) for rank in range(SIZE)]
    buffer.destroy()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_buffer_that_is_made_after_a_loss(victim):
    with crew() as ranks:
        ranks.start(made_after_a_loss, victim)
        ranks.results(dead=[victim, 2])
        ranks.broken = True


# ---- in place


def published_rows(me):
    """The tensor for rows of a combine is memory that the other ranks read: no kernel copies it."""
    buffer = a_buffer()
    seen = set()
    for seed in range(6):
        given = inputs(seed)
        mine = given[me.rank]
        found = dispatch(buffer, mine)
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, **BF16)
        published = buffer.get_next_low_latency_combine_buffer(found[2])
        seen.add(published.data_ptr())
        answers = my_answers(me, rows, OWNERS)
        published.copy_(answers)
        if seed == 4:  # another operation has its place now
            again = dispatch(buffer, mine)
            given_back = (rows, mine.topk_idx, mine.weights, found[2])
            kind, text = raised(buffer.low_latency_combine, *given_back, zero_copy=True)
            assert (kind, "another operation" in text) == ("ValueError", True), text
            check_dispatch(me, again, given, TOKENS, EXPERTS, **BF16)
            buffer.get_next_low_latency_combine_buffer(found[2]).copy_(answers)
        ignored = torch.full_like(rows, float("nan"))
        combined, event, _ = buffer.low_latency_combine(
            ignored, mine.topk_idx, mine.weights, found[2], zero_copy=True
        )
        missing = event.missing_contributions
        check_combine(me, combined, missing, given, TOKENS, EXPERTS)
    assert len(seen) <= 2
    buffer.destroy()


def test_rows_in_published_memory():
    run(published_rows)


# ---- wrong calls


WRONG = {
    "an expert that is not there": ("dispatch", "rank 1: topk_idx names an expert that does not"),
    "an expert below -1": ("dispatch", "rank 1: topk_idx names an expert that does not exist"),
    "rows of one expert": ("dispatch", "rank 1: .* more rows than it has room for"),
    "another expert than before": ("combine", "rank 1: topk_idx of combine names another expert"),
    "another handle": ("combine", "rank [012] combines the rows of another dispatch than rank"),
    "other sizes": ("dispatch", "rank [012] has called another operation than rank"),
}


def wrong_on_rank(me, what):
    """One rank's call is wrong by its values: an error on all ranks, raised by a wait on the host
    and by later calls. The buffer has ended then."""
    verb, expected = WRONG[what]
    buffer = a_buffer()
    given = inputs(4)
    mine = given[me.rank]
    before = dispatch(buffer, mine)
    found = dispatch(buffer, mine)
    rows = check_dispatch(me, found, given, TOKENS, EXPERTS, **BF16)
    answers = my_answers(me, rows, OWNERS)
    topk_idx, handle, tokens = mine.topk_idx.clone(), found[2], TOKENS
    if me.rank == 1:
        if what == "an expert that is not there":
            topk_idx[2, 1] = EXPERTS
        if what == "an expert below -1":
            topk_idx[2, 1] = -2
        if what == "rows of one expert":
            topk_idx[:] = 5
        if what == "another expert than before":
            topk_idx[:] = (topk_idx + 1) % EXPERTS
        if what == "another handle":
            handle = before[2]
        if what == "other sizes":
            tokens = TOKENS - 1

    def call():
        how = {"async_finish": True}
        if verb == "dispatch":
            return buffer.low_latency_dispatch(mine.x, topk_idx, tokens, EXPERTS, **BF16, **how)[3]
        return buffer.low_latency_combine(answers, topk_idx, mine.weights, handle, **how)[1]

    kind, text = raised(lambda: call().event.synchronize())
    assert re.search(expected, text), text
    is_of_two = "another operation" in text or "handles" in text
    assert kind == ("DistBackendError" if is_of_two else "ValueError")
    kind_of_later, text_of_later = raised(dispatch, buffer, mine)
    assert (kind_of_later, text_of_later) == (kind, text)
    torch.accelerator.synchronize()
    buffer.destroy()


@pytest.mark.parametrize("what", WRONG)
def test_wrong_values(what):
    with crew() as ranks:
        ranks.call(wrong_on_rank, what)


def too_many_experts_of_a_token(me):
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, 64)
    x, topk_idx = torch.zeros(4, HIDDEN, dtype=torch.bfloat16), torch.full((4, 33), -1)
    kind, text = raised(buffer.low_latency_dispatch, x, topk_idx, TOKENS, 64)
    assert (kind, "at most 32 experts of a token" in text) == ("ValueError", True), text
    given = ep_crew.inputs(1, COUNTS, HIDDEN, 32, 64)
    ep_crew.round_trip(me, buffer, given, TOKENS, 64)
    buffer.destroy()


def test_more_experts_of_a_token_than_kernels_take():
    run(too_many_experts_of_a_token)


def late_rank(me):
    """The error names the rank that does not come to the call on its stream."""
    buffer = a_buffer(timeout=timedelta(seconds=8))
    given = inputs(5)
    mine = given[me.rank]
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    dist.barrier()
    torch.accelerator.synchronize()
    with held() as gate:
        if me.rank != 1:
            gate.open()
        found = dispatch(buffer, mine, async_finish=True)
        kind, text = raised(found[3].event.synchronize)
    assert kind == "DistBackendError", text
    if me.rank != 1:
        assert "it waits for rank 1" in text, text
    torch.accelerator.synchronize()
    buffer.destroy()


@pytest.mark.skipif(DEVICE != "fake", reason="the test holds a stream")
def test_a_late_rank_is_named():
    with crew() as ranks:
        ranks.call(late_rank)


def late_hook(me):
    """The time of a call counts from its hook."""
    buffer = a_buffer()
    given = inputs(5)
    mine = given[me.rank]
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    found = dispatch(buffer, mine, timeout_us=2_000_000, **HOOK)
    if me.rank == 1:
        time.sleep(3)
    found[4]()
    check_dispatch(me, found, given, TOKENS, EXPERTS, **BF16)
    dist.barrier()
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    buffer.destroy()


def test_a_late_hook():
    run(late_hook)


# ---- where kernels cannot be


def staged(me):
    """Ranks that can share no memory say so once, and their tensors go through host memory."""
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    given = inputs(6)
    for _ in range(2):
        runs_kernels(lambda: ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS), 0)
    buffer.destroy()


def test_ranks_without_shared_memory():
    # Without words of streams, no kernel copies the rows either.
    ranks = crew(env={"MOONCAKE_PEER_MEMORY": "65536", "MOONCAKE_EP_STREAM_WORDS": "0"})
    try:
        ranks.call(staged)
        logs = [ranks.log(rank) for rank in range(SIZE)]
    finally:
        ranks.close()
    for log in logs:
        assert log.count("though MOONCAKE_EP_KERNELS asks for them") == 1, log
        assert "MOONCAKE_PEER_MEMORY" in log


def another_handles_rows(me):
    """Rows are published at a place that depends on the owners of experts."""
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, 48)
    handles = []
    for seed, owners in ((1, [0, 1, 2] * 10), (2, [0, 1, 2] * 10 + [2, 2, 2])):
        mine = ep_crew.inputs(seed, COUNTS, HIDDEN, TOPK, len(owners))[me.rank]
        buffer.runtime.set_expert_owners(owners)
        found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, len(owners), **BF16)
        handles.append(found[2])
    buffer.get_next_low_latency_combine_buffer(handles[0])
    given = (found[0], mine.topk_idx, mine.weights, handles[1])
    if me.rank < 2:  # the third has other numbers of rows, too
        kind, text = raised(buffer.low_latency_combine, *given, zero_copy=True)
        assert (kind, "another handle" in text) == ("ValueError", True), text
    buffer.destroy()


def test_rows_for_another_handle():
    run(another_handles_rows)


def other_threads_run(me):
    """The first call waits for all ranks, and holds up no other thread of the program."""
    buffer = a_buffer()
    given = inputs(8)
    mine = given[me.rank]
    is_over = threading.Event()

    def work():
        for _ in range(20):
            time.sleep(0.01)
        me.board.set(f"worked-{me.rank}")
        is_over.wait()

    thread = threading.Thread(target=work)
    thread.start()
    if me.rank == 1:
        me.board.wait_all("worked", [0, 2])
    dispatch(buffer, mine)
    is_over.set()
    thread.join()
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    buffer.destroy()


def test_the_first_call_holds_up_no_thread():
    run(other_threads_run)


def other_experts_behind_a_held_stream(me):
    """A call with other experts than the one before does not wait for it on the host."""
    buffer = a_buffer()
    given = inputs(9)
    mine = given[me.rank]
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    fewer = mine.topk_idx.clamp(max=EXPERTS - 2)
    dist.barrier()
    torch.accelerator.synchronize()
    with held() as gate:
        if me.rank != 1:
            gate.open()
        dispatch(buffer, mine, async_finish=True)
        buffer.low_latency_dispatch(mine.x, fewer, TOKENS, EXPERTS - 1, async_finish=True, **BF16)
    torch.accelerator.synchronize()
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    buffer.destroy()


@pytest.mark.skipif(DEVICE != "fake", reason="the test holds a stream")
def test_other_experts_behind_a_held_stream():
    run(other_experts_behind_a_held_stream)
