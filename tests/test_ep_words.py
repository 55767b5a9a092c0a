"""The normal mode and ElasticBuffer with device tensors through host memory: no host waits for a
combine or for a dispatch with a handle. Results are in the suites that run on layout `device`."""

from __future__ import annotations

import signal
from datetime import timedelta

import devices
import ep_crew
import harness
import pytest
import test_ep_token_kernels
import torch
import torch.distributed as dist
from harness import raised, until
from normal_crew import (
    AMPLE,
    LITTLE,
    SIZE,
    answers_of,
    check_combine,
    check_dispatch,
    drawn,
    layout,
)

from mooncake.ep import Buffer, ElasticBuffer

EXPERTS = 9
COUNTS = [40, 70, 0, 61]


def crew(**more):
    devices.prepare("fake")
    env = {"MOONCAKE_TRANSPORTS": "shm", devices.VARIABLE: "fake", **more}
    return harness.Crew(SIZE, env=env)


def run(function, *args, **more):
    with crew(**more) as ranks:
        return ranks.call(function, *args)


def held(stream=None):
    from fake_device import control

    return control.held(stream)


def a_call(buffer, mine):
    return {
        **layout(buffer, mine.topk_idx, EXPERTS),
        "topk_idx": mine.topk_idx,
        "topk_weights": mine.weights,
    }


def late(tensor):
    """A copy that the current stream fills when it comes to fill()."""
    made = torch.full_like(tensor, -7)
    made.source = tensor.cpu().pin_memory()
    torch.accelerator.synchronize()
    return made


def fill(tensor):
    tensor.copy_(tensor.source, non_blocking=True)


# ---- streams


def nothing_waits(me, async_finish):
    """The stream of the inputs is held until the calls have returned."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    for seed in range(3):
        given = drawn(seed, COUNTS, EXPERTS)
        mine = given[me.rank]
        found = buffer.dispatch(mine.x, **a_call(buffer, mine))
        answers = answers_of(given, EXPERTS)
        rows, again = late(answers[me.rank]), late(mine.x * 2)
        active = torch.ones(SIZE, dtype=torch.int32)
        torch.accelerator.synchronize()
        with held():
            fill(rows)
            sums, _, event = buffer.combine(
                rows, found[4], active_ranks=active, async_finish=async_finish
            )
            fill(again)
            doubled, *_ = buffer.dispatch(again, handle=found[4])
            if async_finish:
                event.current_stream_wait()
            missing = buffer.missing_contributions.clone()
            sums, doubled = sums.clone(), doubled.clone()
        check_combine(me, (sums, None, None), answers, given, EXPERTS, missing)
        assert torch.equal(doubled, found[0] * 2)
        assert active.tolist() == [1] * SIZE
    buffer.destroy()


@pytest.mark.parametrize("async_finish", [False, True])
def test_the_host_waits_for_nothing(async_finish):
    run(nothing_waits, async_finish)


def a_late_rank(me):
    """Rank 1 combines when the others' calls have returned."""
    buffer = ElasticBuffer(dist.group.WORLD, 1 << 21)
    given = drawn(3, COUNTS, EXPERTS)
    mine = given[me.rank]
    form = {"num_experts": EXPERTS, "num_max_tokens_per_rank": 80}
    rows, _, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, mine.weights, **form)
    torch.accelerator.synchronize()
    if me.rank == 1:
        me.board.wait_all("called", [0, 2, 3])
    sums, _, event = buffer.combine(rows, handle, async_with_compute_stream=True)
    me.board.set(f"called-{me.rank}")
    event.event.synchronize()
    ranks = layout(Buffer(dist.group.WORLD, AMPLE), mine.topk_idx, EXPERTS)["is_token_in_rank"]
    assert torch.allclose(sums.float(), mine.x.float() * ranks.sum(1, keepdim=True), rtol=0.02)
    assert not buffer.missing_contributions.any()
    buffer.destroy()


def test_no_host_waits_for_another_rank():
    run(a_late_rank)


def expanded_rows(me):
    """They are added up on the device, with the CPU's bits."""
    found = []
    for home in ("fake", "cpu"):
        with torch.device(home):
            buffer = ElasticBuffer(dist.group.WORLD, 1 << 21)
            given = drawn(5, COUNTS, EXPERTS)[me.rank]
            rows, _, weights, handle, _ = buffer.dispatch(
                given.x, given.topk_idx, given.weights, do_expand=True, num_experts=EXPERTS,
                num_max_tokens_per_rank=80, expert_alignment=4,
            )  # fmt: skip
            sums, added, _ = buffer.combine(rows * 3, handle, topk_weights=weights)
            missing = buffer.missing_contributions
            assert sums.device.type == added.device.type == missing.device.type == home
            found.append([one.cpu() for one in (sums, added, missing)])
            buffer.destroy()
    for on_device, on_host in zip(*found, strict=True):
        assert torch.equal(on_device, on_host)


def test_expanded_rows():
    run(expanded_rows)


def words_and_none(me):
    """Without words the results are the same, and the host waits."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    given = drawn(6, COUNTS, EXPERTS)
    mine = given[me.rank]
    found = buffer.dispatch(mine.x, **a_call(buffer, mine))
    assert not buffer.runtime.uses_words(mine.x.device)
    answers = answers_of(given, EXPERTS)
    combined = buffer.combine(answers[me.rank], found[4], async_finish=True)
    check_combine(me, combined, answers, given, EXPERTS, buffer.missing_contributions)
    assert torch.equal(buffer.dispatch(mine.x * 2, handle=found[4])[0], found[0] * 2)
    buffer.destroy()


@pytest.mark.parametrize("variable", ["MOONCAKE_EP_STREAM_WORDS", "MOONCAKE_STREAM_WORDS"])
def test_without_words(variable):
    run(words_and_none, **{variable: "0"})


# ---- losses


@pytest.mark.ci
@pytest.mark.parametrize("num_bytes", [AMPLE, LITTLE])
@pytest.mark.parametrize("where", ["counts", "combine"])
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_go_on(victim, where, num_bytes):
    with crew() as ranks:
        ranks.start(test_ep_token_kernels.survivors, victim, where, num_bytes)
        ranks.results(dead=[victim])
        ranks.broken = True


def killed_anywhere(me, victim, num_bytes):
    """Each combine is one with the victim or one without it, the same on all survivors."""
    buffer = Buffer(dist.group.WORLD, num_bytes)
    given = drawn(7, [40, 70, 33, 61], EXPERTS)
    mine = given[me.rank]
    left = [rank for rank in range(SIZE) if rank != victim]
    found = buffer.dispatch(mine.x, **a_call(buffer, mine))
    rows, answers = found[0], answers_of(given, EXPERTS)
    me.board.set(f"running-{me.rank}")
    seen, after = [], 0
    while after < 3:
        active = torch.ones(SIZE, dtype=torch.int32)
        sums, _, event = buffer.combine(
            answers[me.rank], found[4], active_ranks=active, async_finish=True
        )
        again = buffer.dispatch(mine.x, handle=found[4])[0]
        event.current_stream_wait()
        then = [rank for rank, is_active in enumerate(active.tolist()) if is_active]
        check_combine(
            me, (sums, None, None), answers, given, EXPERTS, buffer.missing_contributions,
            still_active=then,
        )  # fmt: skip
        if then == left:
            is_left = again.cpu().any(dim=1).to(again.device)
            assert torch.equal(again[is_left], rows[is_left])
        seen.append(then)
        after += then == left
    buffer.destroy()
    return [then for then in seen if then != list(range(SIZE))], len(seen)


@pytest.mark.ci
@pytest.mark.parametrize("num_bytes", [AMPLE, LITTLE])
def test_killed_anywhere(num_bytes):
    with crew() as ranks:
        ranks.start(killed_anywhere, 2, num_bytes)
        ranks.board.wait_all("running", range(SIZE))
        ranks.signal(2, signal.SIGKILL)
        first, *others = [one for one in ranks.results(dead=[2]) if one is not None]
        ranks.broken = True
    assert all(one == first for one in others)


def stopped(me, victim):
    """The victim stops before its combine. It learns that the others went on without it."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    given = drawn(8, [40, 70, 33, 61], EXPERTS)
    mine = given[me.rank]
    found = buffer.dispatch(mine.x, **a_call(buffer, mine))
    answers = answers_of(given, EXPERTS)
    torch.accelerator.synchronize()
    me.board.set(f"ready-{me.rank}")
    me.board.wait_all("ready", range(SIZE))
    if me.rank == victim:
        me.board.set("victim")
        me.board.wait("go on")

        def combine():
            buffer.combine(answers[victim], found[4], async_finish=True)[2].event.synchronize()

        assert raised(combine)[0] == "EvictedError"
        torch.accelerator.synchronize()
        assert raised(buffer.combine, answers[victim], found[4])[0] == "EvictedError"
        return
    me.board.wait("stopped")
    left = [rank for rank in range(SIZE) if rank != victim]
    for _ in range(2):
        combined = buffer.combine(answers[me.rank], found[4])
        missing = buffer.missing_contributions
        check_combine(me, combined, answers, given, EXPERTS, missing, still_active=left)
    me.board.set(f"without-{me.rank}")
    me.board.wait("over")
    buffer.destroy()


@pytest.mark.ci
@pytest.mark.parametrize("victim", [0, 3])
def test_stopped(victim):
    with crew(MOONCAKE_FAILURE_TIMEOUT_MS="1000") as ranks:
        ranks.start(stopped, victim)
        ranks.board.wait("victim")
        ranks.stop(victim)
        ranks.board.set("stopped")
        ranks.board.wait_all("without", [rank for rank in range(SIZE) if rank != victim])
        ranks.board.set("go on")
        ranks.cont(victim)
        until(lambda: ranks.links[victim].poll(), "the victim's end")
        ranks.board.set("over")
        ranks.results()
        ranks.broken = True


# ---- errors


def test_errors_of_one_rank():
    run(test_ep_token_kernels.errors_of_one_rank)


def tensors_of_two_devices(me, words):
    """An error of their caller alone, or without words of all ranks. The buffer goes on."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    given = drawn(4, COUNTS, EXPERTS)
    mine = given[me.rank]
    found = buffer.dispatch(mine.x, **a_call(buffer, mine))
    answers = answers_of(given, EXPERTS)
    bias, active = torch.zeros_like(mine.x), torch.ones(SIZE, dtype=torch.int32)
    for wrong in ({"bias": bias.cpu()}, {"active_ranks": active.cpu()}):
        if words and me.rank != 1:
            continue
        wrong = wrong if me.rank == 1 else {}
        kind, text = raised(lambda: buffer.combine(answers[me.rank], found[4], **wrong))  # noqa: B023
        assert (kind, "rank 1" in text, "on cpu" in text) == ("ValueError", True, True), text
    again = {"handle": found[4], "active_ranks": active.cpu()}
    if words and me.rank == 1:
        kind, text = raised(lambda: buffer.dispatch(mine.x, **again))
        assert (kind, "rank 1" in text, "on cpu" in text) == ("ValueError", True, True), text
    combined = buffer.combine(answers[me.rank], found[4], bias=bias, active_ranks=active)
    check_combine(me, combined, answers, given, EXPERTS, buffer.missing_contributions)
    buffer.destroy()


@pytest.mark.parametrize("words", [True, False])
def test_tensors_of_two_devices(words):
    run(tensors_of_two_devices, words, MOONCAKE_EP_STREAM_WORDS=str(int(words)))


def other_handles(me):
    """One rank combines the rows of another dispatch: that ends the buffer, and no stream waits."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    mine = drawn(4, COUNTS, EXPERTS)[me.rank]
    call = a_call(buffer, mine)
    handles = [buffer.dispatch(mine.x, **call)[4] for _ in range(2)]
    rows = buffer.dispatch(mine.x, **call)[0]
    _, _, event = buffer.combine(rows, handles[me.rank == 1], async_finish=True)
    kind, text = raised(event.event.synchronize)
    torch.accelerator.synchronize()
    assert raised(buffer.combine, rows, handles[0]) == (kind, text)
    assert raised(buffer.dispatch, mine.x, **call)[0] == kind
    buffer.destroy()
    return kind


def test_other_handles():
    assert len(set(run(other_handles))) == 1


def a_rank_that_is_missing(me):
    """Rank 1 never combines. The error of the others' timeout comes with the next call."""
    buffer = Buffer(dist.group.WORLD, AMPLE, timeout=timedelta(seconds=2))
    mine = drawn(4, COUNTS, EXPERTS)[me.rank]
    found = buffer.dispatch(mine.x, **a_call(buffer, mine))
    torch.accelerator.synchronize()
    if me.rank == 1:
        me.board.wait_all("over", [0, 2, 3])
    else:
        buffer.combine(found[0], found[4])
        torch.accelerator.synchronize()  # the streams go on
        kind, text = raised(buffer.combine, found[0], found[4])
        assert (kind, "rank 1" in text) == ("DistBackendError", True), text
        me.board.set(f"over-{me.rank}")
    buffer.destroy()


def test_a_rank_that_is_missing():
    with crew() as ranks:
        ranks.call(a_rank_that_is_missing)


def destroyed_under_way(me):
    """The buffer is destroyed, or dropped, while its combine is under way."""
    for round in range(4):
        buffer = Buffer(dist.group.WORLD, AMPLE)
        given = drawn(round, COUNTS, EXPERTS)
        mine = given[me.rank]
        found = buffer.dispatch(mine.x, **a_call(buffer, mine))
        answers = answers_of(given, EXPERTS)
        combined = buffer.combine(answers[me.rank], found[4], async_finish=True)
        missing = torch.zeros(len(mine.x), dtype=torch.bool)
        if round % 2:
            buffer.destroy()
        del buffer, found
        combined[2].current_stream_wait()
        check_combine(me, combined, answers, given, EXPERTS, missing)
    torch.accelerator.synchronize()


@pytest.mark.ci
def test_destroyed_under_way():
    run(destroyed_under_way)


def made_in_a_capture(me):
    """No Buffer is made while the current stream is recorded, as no group is."""
    from fake_device import control

    torch.accelerator.synchronize()
    with control.recorded(torch.Stream(device=torch.accelerator.current_accelerator())):
        for make in (
            lambda: Buffer(dist.group.WORLD, AMPLE),
            lambda: ElasticBuffer(dist.group.WORLD, 1 << 21),
            lambda: ep_crew.deepep_buffer(8, 64, EXPERTS),
        ):
            kind, text = raised(make)
            assert kind == "NotImplementedError", text
            assert "recorded into a graph, and the construction of a Buffer" in text
    given = drawn(4, COUNTS, EXPERTS)
    buffer = Buffer(dist.group.WORLD, AMPLE)
    found = buffer.dispatch(given[me.rank].x, **a_call(buffer, given[me.rank]))
    check_dispatch(me, found, given, EXPERTS)
    buffer.destroy()


def test_made_in_a_capture():
    run(made_in_a_capture)
