"""The normal mode of device tensors by kernels: losses, sizes without counts, and errors. Results
are in the suites that run on layout `device-kernels`, kernels alone in tests/simt."""

from __future__ import annotations

import re
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ep_kernel_ranks import crew
from harness import raised
from normal_crew import (
    AMPLE,
    LITTLE,
    SIZE,
    answers_of,
    check_combine,
    check_dispatch,
    drawn,
    layout,
    owners_of,
)
from peer_ranks import dies, runs_kernels

from mooncake.ep import Buffer, ElasticBuffer, reference
from mooncake_backend import extension

EXPERTS = 9
COUNTS = [40, 70, 0, 61]


def a_call(buffer, mine):
    return {
        **layout(buffer, mine.topk_idx, EXPERTS),
        "topk_idx": mine.topk_idx,
        "topk_weights": mine.weights,
    }


def run(function, *args, **options):
    with crew(SIZE, **options) as ranks:
        return ranks.call(function, *args)


# ---- what runs


def each_call_is_one_kernel(me, num_bytes):
    """However many pieces it has. The counts of an exact dispatch go from host to host."""
    buffer = Buffer(dist.group.WORLD, num_bytes)
    for seed in range(3):
        given = drawn(seed, COUNTS, EXPERTS)
        mine = given[me.rank]
        call = a_call(buffer, mine)
        found = []
        runs_kernels(lambda: found.append(buffer.dispatch(mine.x, **call)), 1)  # noqa: B023
        check_dispatch(me, found[0], given, EXPERTS)
        answers = answers_of(given, EXPERTS)
        runs_kernels(lambda: found.append(buffer.combine(answers[me.rank], found[0][4])), 1)  # noqa: B023
        check_combine(me, found[1], answers, given, EXPERTS, buffer.missing_contributions)
        handle = found[0][4]
        runs_kernels(lambda: found.append(buffer.dispatch(mine.x * 2, handle=handle)), 1)  # noqa: B023
        assert torch.equal(found[2][0], found[0][0] * 2)
    buffer.destroy()


@pytest.mark.parametrize("num_bytes", [AMPLE, LITTLE])
def test_each_call_is_one_kernel(num_bytes):
    run(each_call_is_one_kernel, num_bytes)


def calls_without_counts(me, name):
    """No host waits for another rank: rank 1 calls when the others' calls have returned."""
    from fake_device import control

    buffer = Buffer(dist.group.WORLD, AMPLE)
    given = drawn(3, COUNTS, EXPERTS)
    mine = given[me.rank]
    call = a_call(buffer, mine)
    buffer.dispatch(mine.x, **call)  # the first call makes the memory
    torch.accelerator.synchronize()
    if me.rank == 1:
        me.board.wait_all(f"{name}-called", [0, 2, 3])
    with control.deferred():
        rows, *_, handle, _ = buffer.dispatch(mine.x, **call, num_worst_tokens=200)
        sums, *_ = buffer.combine(rows, handle)
        me.board.set(f"{name}-called-{me.rank}")
    torch.accelerator.synchronize()
    assert not buffer.missing_contributions.any()
    ranks = call["is_token_in_rank"].sum(1, keepdim=True)
    assert torch.allclose(sums.float(), mine.x.float() * ranks, rtol=0.02)
    buffer.destroy()


def test_no_host_waits_for_another_rank():
    run(calls_without_counts, "worst")


# ---- losses


def survivors(me, victim, where, num_bytes):
    """The victim dies at a place of the second dispatch or its combine."""
    buffer = Buffer(dist.group.WORLD, num_bytes)
    given = drawn(7, [40, 70, 33, 61], EXPERTS)
    mine = given[me.rank]
    call = a_call(buffer, mine)
    everybody = range(SIZE)
    left = [rank for rank in everybody if rank != victim]
    before = buffer.dispatch(mine.x, **call)
    check_dispatch(me, before, given, EXPERTS)
    torch.accelerator.synchronize()
    me.board.set(f"ready-{me.rank}")
    me.board.wait_all("ready", everybody)

    def dies(place):
        if (me.rank, where) == (victim, place):
            signal.raise_signal(signal.SIGKILL)

    dies("counts")
    if where == "rows" and me.rank == victim:
        extension.load().arm_failpoint("peers-launch", 1, False)
    found, active = before, tuple(everybody)
    if where in ("counts", "rows"):
        active = tuple(left)
        mask = torch.ones(SIZE, dtype=torch.int32)
        found = buffer.dispatch(mine.x, **call, active_ranks=mask)
        assert mask.tolist() == [int(rank in left) for rank in everybody]
        ways = reference.normal_rows(
            [one.topk_idx for one in given], owners_of(EXPERTS, SIZE), me.rank, left
        )
        rows, handle = len(ways), list(found[4])
        # If it had told its counts, there is room for its rows behind the others.
        assert len(found[0]) == (rows if where == "counts" else len(before[0]))
        assert not found[0][rows:].any()
        assert (found[1][rows:] == -1).all()
        assert not found[2][rows:].any()
        handle[3] = handle[3][:rows]
        check_dispatch(
            me, (*(one[:rows] for one in found[:3]), None, handle, None), given, EXPERTS, left
        )
    dies("combine")
    answers = answers_of(given, EXPERTS, active)
    own = torch.full_like(found[0], float("nan"))
    own[: len(answers[me.rank])] = answers[me.rank]
    weights = found[2].masked_fill(found[1] < 0, 0)
    combined = buffer.combine(own, found[4], topk_weights=weights)
    check_combine(
        me, combined, answers, given, EXPERTS, buffer.missing_contributions,
        active=active, still_active=left,
    )  # fmt: skip
    # A handle from before the loss works among the ranks that are left.
    again = buffer.dispatch(mine.x, handle=before[4])[0]
    ways = reference.normal_rows(
        [one.topk_idx for one in given], owners_of(EXPERTS, SIZE), me.rank, everybody
    )
    for row, (source, token) in zip(again, ways, strict=True):
        assert torch.equal(row, given[source].x[token] * (source != victim))
    ranks = torch.ones(SIZE, dtype=torch.int32)
    answers = answers_of(given, EXPERTS)
    combined = buffer.combine(answers[me.rank], before[4], active_ranks=ranks)
    assert ranks.tolist() == [int(rank in left) for rank in everybody]
    check_combine(
        me, combined, answers, given, EXPERTS, buffer.missing_contributions, still_active=left
    )
    # New calls, too, also without counts.
    worst = buffer.dispatch(mine.x, **call, num_worst_tokens=300) if num_bytes == AMPLE else None
    fresh = buffer.dispatch(mine.x, **call)
    check_dispatch(me, fresh, given, EXPERTS, left)
    if worst is not None:
        assert torch.equal(worst[0][: len(fresh[0])], fresh[0])
        assert not worst[0][len(fresh[0]) :].any()
    buffer.destroy()


@pytest.mark.ci
@pytest.mark.parametrize("num_bytes", [AMPLE, LITTLE])
@pytest.mark.parametrize("where", ["counts", "rows", "combine"])
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_go_on(victim, where, num_bytes):
    with crew(SIZE) as ranks:
        ranks.start(survivors, victim, where, num_bytes)
        ranks.results(dead=[victim])
        ranks.broken = True


def made_after_a_loss(me, victim):
    """A buffer on a group with a lost rank in its list."""
    left = [rank for rank in range(SIZE) if rank != victim]
    dies(me, victim, left)
    buffer = Buffer(dist.new_group(list(range(SIZE))), AMPLE)
    given = drawn(7, [40, 70, 33, 61], EXPERTS)
    mine, found = given[me.rank], []
    call = a_call(buffer, mine)
    found.append(buffer.dispatch(mine.x, **call))
    runs_kernels(lambda: found.append(buffer.dispatch(mine.x, **call)), 1)
    for one in found:
        check_dispatch(me, one, given, EXPERTS, left)
    answers = answers_of(given, EXPERTS, tuple(left))
    combined = buffer.combine(answers[me.rank], found[0][4])
    check_combine(
        me, combined, answers, given, EXPERTS, buffer.missing_contributions,
        active=left, still_active=left,
    )  # fmt: skip
    buffer.destroy()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_buffer_that_is_made_after_a_loss(victim):
    with crew(SIZE) as ranks:
        ranks.start(made_after_a_loss, victim)
        ranks.results(dead=[victim])
        ranks.broken = True


def expanded(me, victim, once):
    """The victim dies between its counts and its rows. Rows stand as the counts say."""
    buffer = ElasticBuffer(dist.group.WORLD, 1 << 21, allow_multiple_reduction=not once)
    given = drawn(7, [40, 70, 33, 61], EXPERTS)
    mine = given[me.rank]
    form = {"num_experts": EXPERTS, "num_max_tokens_per_rank": 80, "expert_alignment": 4}

    def round_trip():
        active = torch.ones(SIZE, dtype=torch.int32)
        found = buffer.dispatch(mine.x, mine.topk_idx, mine.weights, do_expand=True, **form)
        answers = torch.full_like(found[0], float("nan"))
        begin = 0
        experts = [e for e, owner in enumerate(owners_of(EXPERTS, SIZE)) if owner == me.rank]
        for expert, count in zip(experts, found[3].num_recv_tokens_per_expert_list, strict=True):
            answers[begin : begin + count] = found[0][begin : begin + count] * (expert + 2)
            begin += count
        sums = buffer.combine(answers, found[3], active_ranks=active)[0]
        owners = torch.tensor([*owners_of(EXPERTS, SIZE), -1])[mine.topk_idx]
        is_lost = (owners == victim).any(dim=1)
        if active.tolist() == [1] * SIZE:
            is_lost = torch.zeros_like(is_lost)
        assert torch.equal(buffer.missing_contributions, is_lost)
        scale = ((mine.topk_idx + 2) * (mine.topk_idx >= 0)).sum(1, keepdim=True)
        expected = mine.x.float() * scale
        assert torch.allclose(sums.float()[~is_lost], expected[~is_lost], rtol=0.05, atol=0.05)
        return active.tolist()

    assert round_trip() == [1] * SIZE
    torch.accelerator.synchronize()
    me.board.set(f"ready-{me.rank}")
    me.board.wait_all("ready", range(SIZE))
    if me.rank == victim:
        extension.load().arm_failpoint("peers-launch", 1, False)
    for _ in range(2):
        assert round_trip() == [int(rank != victim) for rank in range(SIZE)]
    buffer.destroy()


@pytest.mark.ci
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("victim", [0, 3])
def test_expanded_rows_after_a_loss(victim, once):
    with crew(SIZE) as ranks:
        ranks.start(expanded, victim, once)
        ranks.results(dead=[victim])
        ranks.broken = True


def dropped(me, name):
    """Results stay valid though the program drops its Buffer before they are there."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    given = drawn(3, COUNTS, EXPERTS)
    mine = given[me.rank]
    found = buffer.dispatch(mine.x, **a_call(buffer, mine))
    answers = answers_of(given, EXPERTS)
    if me.rank == 1:
        me.board.wait_all(f"{name}-called", [0, 2, 3])
    combined = buffer.combine(answers[me.rank], found[4], async_finish=True)
    me.board.set(f"{name}-called-{me.rank}")
    missing = torch.zeros(len(mine.x), dtype=torch.bool)
    del buffer, found
    event = combined[2]
    combined = (combined[0], combined[1], None)
    event.current_stream_wait()
    del event
    torch.accelerator.synchronize()
    check_combine(me, combined, answers, given, EXPERTS, missing)


def test_results_of_a_dropped_buffer():
    run(dropped, "dropped")


# ---- errors


def too_few_places(me):
    """Rows beyond num_worst_tokens are an error on all ranks, which ends the buffer."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    mine = drawn(4, COUNTS, EXPERTS)[me.rank]
    call = a_call(buffer, mine)

    def dispatch():
        buffer.dispatch(mine.x, **call, num_worst_tokens=7)
        torch.accelerator.synchronize()
        buffer.dispatch(mine.x, **call, num_worst_tokens=7)

    kind, text = raised(dispatch)
    found = re.search(r"rank \d: it receives more rows than it has places for", text)
    assert (kind, bool(found)) == ("ValueError", True), text
    buffer.destroy()
    return found[0]


def test_too_few_places():
    assert len(set(run(too_few_places))) == 1


def other_calls(me, what):
    """One rank calls with another handle, or another number of places."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    mine = drawn(4, COUNTS, EXPERTS)[me.rank]
    call = a_call(buffer, mine)
    first = buffer.dispatch(mine.x, **call)
    second = buffer.dispatch(mine.x, **call)

    def wrong():
        if what == "handle":
            buffer.combine(first[0], (first if me.rank == 1 else second)[4])
        else:
            buffer.dispatch(mine.x, **call, num_worst_tokens=300 + me.rank % 2)
        torch.accelerator.synchronize()
        buffer.combine(first[0], second[4])

    kind, text = raised(wrong)
    expected = {"handle": "the rows of another dispatch", "places": "has called another operation"}
    assert (kind, expected[what] in text) == ("DistBackendError", True), text
    buffer.destroy()


@pytest.mark.parametrize("what", ["handle", "places"])
def test_other_calls_of_a_rank(what):
    run(other_calls, what)


def errors_of_one_rank(me):
    """Without counts, a wrong argument is an error of its caller alone, and nothing was sent."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    given = drawn(4, COUNTS, EXPERTS)
    mine = given[me.rank]
    call = a_call(buffer, mine)
    found = buffer.dispatch(mine.x, **call)
    answers = answers_of(given, EXPERTS)
    if me.rank == 1:
        for text, wrong in [
            ("x has 0 rows", lambda: buffer.combine(found[0][:0], found[4])),
            ("x is float32", lambda: buffer.combine(found[0].float(), found[4])),
            ("the handle's dispatch were", lambda: buffer.dispatch(mine.x[1:], handle=found[4])),
        ]:
            kind, message = raised(wrong)
            assert (kind, text in message, "rank 1" in message) == ("ValueError", True, True), (
                message
            )
    combined = buffer.combine(answers[me.rank], found[4])
    check_combine(me, combined, answers, given, EXPERTS, buffer.missing_contributions)
    buffer.destroy()


def test_errors_of_one_rank():
    run(errors_of_one_rank)


def errors_of_all_ranks(me):
    """Tensors of two devices, told before the counts are exchanged; and a handle that is none, for
    which no other rank waits. The buffer goes on."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    given = drawn(4, COUNTS, EXPERTS)
    mine = given[me.rank]
    call = a_call(buffer, mine)
    found = buffer.dispatch(mine.x, **call)
    wrong = {**call, "topk_weights": mine.weights.cpu()} if me.rank == 1 else call
    kind, text = raised(lambda: buffer.dispatch(mine.x, **wrong))
    assert (kind, "on cpu" in text, "rank 1" in text) == ("ValueError", True, True), text
    answers = answers_of(given, EXPERTS)
    if me.rank == 1:
        assert (
            raised(buffer.combine, answers[1], tuple(part.clone() for part in found[4]))[0]
            == "TypeError"
        )
    for _ in range(2):
        combined = buffer.combine(answers[me.rank], found[4])
        check_combine(me, combined, answers, given, EXPERTS, buffer.missing_contributions)
        found = buffer.dispatch(mine.x, **call)
        check_dispatch(me, found, given, EXPERTS)
    buffer.destroy()


def test_errors_of_all_ranks():
    run(errors_of_all_ranks)


def wrong_on_the_cpu(me):
    """Kernels are not set up by calls with CPU tensors, also by wrong ones."""
    torch.accelerator.synchronize()
    with torch.device("cpu"):
        buffer = Buffer(dist.group.WORLD, AMPLE)
        mine = SimpleNamespace(**{
            name: one.cpu() for name, one in vars(drawn(4, COUNTS, EXPERTS)[me.rank]).items()
        })  # fmt: skip
        call = a_call(buffer, mine)
        wrong = {**call, "topk_weights": None} if me.rank == 1 else call
        kind, text = raised(lambda: buffer.dispatch(mine.x, **wrong))
        assert (kind, "both or none" in text) == ("ValueError", True), text
        buffer.dispatch(mine.x, **call)
        buffer.destroy()


def test_wrong_calls_on_the_cpu():
    run(wrong_on_the_cpu)


def a_first_call_that_is_wrong(me):
    """The others wait for it in the set-up of the kernels, and then get its error."""
    buffer = ElasticBuffer(dist.group.WORLD, 1 << 21)
    mine = drawn(4, [6] * SIZE, EXPERTS)[me.rank]
    topk_idx = mine.topk_idx + (100 if me.rank == 2 else 0)
    form = {"num_experts": EXPERTS, "num_max_tokens_per_rank": 8}
    kind, text = raised(buffer.dispatch, mine.x, topk_idx, mine.weights, **form)
    assert (kind, "names expert" in text) == ("ValueError", True), text
    found = buffer.dispatch(mine.x, mine.topk_idx, mine.weights, **form)
    combined = buffer.combine(found[0], found[3])[0]
    assert combined.shape == mine.x.shape
    buffer.destroy()


def test_a_first_call_that_is_wrong():
    run(a_first_call_that_is_wrong)
