"""The normal mode and ElasticBuffer with device tensors through host memory: no host waits for a
combine, or for a dispatch with a handle or with a size that is known ahead. Results are in the
suites that run on layout `device`."""

from __future__ import annotations

import contextlib
import os
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
    owners_of,
)

from mooncake.ep import Buffer, ElasticBuffer, reference
from mooncake.mooncake_elastic_buffer import ElasticBuffer as MooncakeElasticBuffer
from mooncake_backend import extension

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


def deferred():
    from fake_device import control

    return control.deferred()


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


WORST = 300  # rows, more than any rank receives


def nothing_waits_at_worst(me, kernels):
    """The tokens come to the device when the calls have returned. A kernel copies the used rows;
    without kernels all are copied."""
    from fake_device import control

    if not kernels:
        control.inject("prepareKernels", code="unsupported")
    buffer = Buffer(dist.group.WORLD, AMPLE)
    buffer._normal_mode()
    native = buffer._normal_runtime.native
    for seed in range(3):
        given = drawn(seed, COUNTS, EXPERTS)
        mine = given[me.rank]
        exact = buffer.dispatch(mine.x, **a_call(buffer, mine))
        rows = len(exact[0])
        sums, *_ = buffer.combine(exact[0], exact[4])
        ways = reference.normal_rows(
            [one.topk_idx for one in given], owners_of(EXPERTS, SIZE), me.rank, range(SIZE)
        )
        x = late(mine.x)
        is_in_rank = late(layout(buffer, mine.topk_idx, EXPERTS)["is_token_in_rank"])
        no_counts = torch.empty(0, dtype=torch.int64, device="cpu")
        active = torch.ones(SIZE, dtype=torch.int32)
        torch.accelerator.synchronize()
        copied = control.kernels_run()
        with deferred(), held():
            fill(x)
            fill(is_in_rank)
            found = native.normal_dispatch(
                [x], is_in_rank, None, no_counts, [("x", x)], 3, (WORST, None), active_ranks=active
            )
            (into,), sources, table, there, route, *_, work = found
            (again,) = native.normal_dispatch_again([x], route, active)
            combined, missing, *_ = native.normal_combine(into, route, active_ranks=active)
            assert not work.is_completed()
        torch.accelerator.synchronize()
        # The rows and their sources; the rows again; those of the combine.
        assert control.kernels_run() - copied == 4 * kernels
        for one in (into, again):
            assert torch.equal(one[:rows], exact[0])
            assert not one[rows:].any()
        assert sources[:rows].tolist() == [token for _, token in ways]
        assert route.ends.tolist() == exact[4][0][:, me.rank].tolist()
        assert torch.equal(table[:, :SIZE].cumsum(0).int(), exact[4][0])
        assert table[:, SIZE].tolist() == COUNTS
        assert there.all()
        assert active.tolist() == [1] * SIZE
        assert torch.equal(combined, sums)
        assert not missing.any()
    buffer.destroy()


def known_sizes(me):
    """The results are those of a dispatch that waits, with zeros behind them."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    for seed in range(3):
        given = drawn(seed, COUNTS, EXPERTS)
        mine = given[me.rank]
        call = a_call(buffer, mine)
        exact = buffer.dispatch(mine.x, **call)
        rows = len(exact[0])
        sums = buffer.combine(exact[0], exact[4], topk_weights=exact[2])
        active = torch.ones(SIZE, dtype=torch.int32)
        found = buffer.dispatch(mine.x, **call, num_worst_tokens=WORST, active_ranks=active)
        assert found[4].route.is_at_worst
        again, *_ = buffer.dispatch(mine.x, handle=found[4])
        combined = buffer.combine(found[0], found[4], topk_weights=found[2])
        assert [len(one) for one in found[:3]] == [WORST] * 3
        for one, expected in zip(found[:3], exact[:3], strict=True):
            assert torch.equal(one[:rows], expected)
        assert (found[1][rows:] == -1).all()
        for one in (found[0], found[2], found[4][3], again):
            assert not one[rows:].any()
        for one, expected in zip(found[4], exact[4], strict=True):
            assert torch.equal(one[: len(expected)], expected)
        assert torch.equal(again[:rows], exact[0])
        assert torch.equal(combined[0], sums[0])
        assert torch.equal(combined[1], sums[1])
        assert not buffer.missing_contributions.any()
        assert active.tolist() == [1] * SIZE
    buffer.destroy()


def test_results_of_a_known_size():
    run(known_sizes)


@pytest.mark.parametrize("kernels", [True, False])
def test_no_host_waits_for_counts_of_a_known_size(kernels):
    run(nothing_waits_at_worst, kernels)


def elastic_calls(home, kind, me, do_expand, allows_several, is_counted, masked):
    """A dispatch, the same way again, and their combine, on `home`. Its stream is held until they
    have returned, except for a dispatch of unknown size."""
    with torch.device(home), contextlib.ExitStack() as holding:
        how = {} if kind is MooncakeElasticBuffer else {"allow_multiple_reduction": allows_several}
        buffer = kind(dist.group.WORLD, 1 << 21, **how)
        given = drawn(5, COUNTS, EXPERTS)[me.rank]
        form = {
            "num_experts": EXPERTS, "num_max_tokens_per_rank": 80, "expert_alignment": 4,
            "do_expand": do_expand, "do_cpu_sync": is_counted,
        }  # fmt: skip
        active, then = (torch.ones(SIZE, dtype=torch.int32) for _ in range(2))
        if masked is not None and me.rank == 0:
            active[masked] = 0
        if home != "cpu":
            buffer._exchange.by_kernels(given.x.device)  # the first time all ranks wait
            holding.enter_context(deferred())
        if home != "cpu" and not is_counted:
            holding.enter_context(held())
        rows, recv_idx, weights, handle, _ = buffer.dispatch(
            given.x, given.topk_idx, given.weights, active_ranks=active, **form
        )
        if home != "cpu" and is_counted:
            holding.enter_context(held())
        route = handle.way.route
        is_at_worst = home != "cpu" and not is_counted
        assert route.is_at_worst == (is_at_worst and route.kernels is None)
        by_kernels = home != "cpu" and os.environ.get("MOONCAKE_EP_KERNELS") == "1"
        assert (route.kernels is not None) == by_kernels
        again, *_ = buffer.dispatch(given.x * 2, handle=handle, do_expand=do_expand)
        sums, *_ = buffer.combine(rows, handle, active_ranks=then)
        missing = buffer.missing_contributions
        holding.close()
        torch.accelerator.synchronize()
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        if do_expand:
            count = int((handle.psum_num_recv_tokens_per_expert).max())
        found = [one[:count] for one in (rows, again, weights)]
        found += [recv_idx[:count]] if recv_idx is not None and not do_expand else []
        found += [sums, missing, handle.dst_buffer_slot_idx, active, then]
        found += [handle.num_unaligned_recv_tokens_per_expert]
        assert {one.device.type for one in found} == {home}
        sizes = [len(rows), len(weights), handle.num_recv_tokens, handle.num_expanded_tokens]
        buffer.destroy()
        return [one.cpu() for one in found], sizes


def bits_of_elastic_calls(me, kind, do_expand, allows_several, is_counted=False, masked=None):
    how = (kind, me, do_expand, allows_several, is_counted, masked)
    on_device, sizes = elastic_calls("fake", *how)
    on_host, expected = elastic_calls("cpu", *how)
    assert sizes == expected
    for one, other in zip(on_device, on_host, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [ElasticBuffer, MooncakeElasticBuffer])
@pytest.mark.parametrize("do_expand", [False, True])
def test_elastic_calls_of_a_known_size(kind, do_expand):
    run(bits_of_elastic_calls, kind, do_expand, True)


@pytest.mark.parametrize("kernels", [0, 1])
@pytest.mark.parametrize("masked", [None, 3])
@pytest.mark.parametrize("is_counted", [False, True])
def test_no_host_waits_for_one_rounding(is_counted, masked, kernels):
    how = ElasticBuffer, True, False, is_counted, masked
    run(bits_of_elastic_calls, *how, MOONCAKE_EP_KERNELS=str(kernels))


def first_dispatch(me):
    """The first dispatch of a known size waits for nothing either."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    mine = drawn(3, COUNTS, EXPERTS)[me.rank]
    x = late(mine.x)
    with deferred(), held():
        fill(x)
        found = buffer.dispatch(x, **a_call(buffer, mine), num_worst_tokens=WORST)
    exact = buffer.dispatch(mine.x, **a_call(buffer, mine))
    rows = len(exact[0])
    for one, expected in zip(found[:3], exact[:3], strict=True):
        assert torch.equal(one[:rows], expected)
    buffer.destroy()


def test_no_host_waits_for_the_first_dispatch_of_a_known_size():
    run(first_dispatch)


def pieces_again(me, form):
    """A dispatch with a handle of several pieces. Parts of the rows are of other bytes."""
    buffer = ElasticBuffer(dist.group.WORLD, 1 << 21)
    mine = drawn(3, [60, 2300, 0, 1900], EXPERTS, hidden=512)[me.rank]
    form = {"num_experts": EXPERTS, "num_max_tokens_per_rank": 2300, **form}
    rows, _, weights, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, mine.weights, **form)
    route = handle.way.route
    assert len(route.pieces) > 1
    x, other_weights = late(mine.x * 2), late(mine.weights * 2)
    active = torch.ones(SIZE, dtype=torch.int32)
    torch.accelerator.synchronize()
    with deferred(), held():
        fill(x)
        fill(other_weights)
        again = buffer.dispatch(
            x, topk_weights=other_weights, handle=handle, active_ranks=active,
            do_expand=handle.do_expand,
        )  # fmt: skip
    torch.accelerator.synchronize()
    assert torch.equal(again[0], rows * 2)
    assert torch.equal(again[2], weights * 2)
    assert active.tolist() == [1] * SIZE
    # Rows that go in other pieces.
    few = buffer.dispatch(mine.x[:, :8].contiguous(), handle=handle, do_expand=handle.do_expand)
    assert torch.equal(few[0], rows[:, :8])
    buffer.destroy()


@pytest.mark.parametrize("form", [{}, {"do_expand": True, "expert_alignment": 4}])
def test_no_host_waits_for_pieces_with_a_handle(form):
    run(pieces_again, form)


def two_streams(me, allows_several):
    """A handle's combines on two streams, of which one is held; and a wait on another stream than
    the call's."""
    buffer = ElasticBuffer(dist.group.WORLD, 1 << 21, allow_multiple_reduction=allows_several)
    mine = drawn(5, COUNTS, EXPERTS)[me.rank]
    form = {"num_experts": EXPERTS, "num_max_tokens_per_rank": 80, "do_expand": True}
    rows, *_, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, mine.weights, **form)
    expected = buffer.combine(rows, handle)[0]
    *_, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, mine.weights, **form)
    torch.accelerator.synchronize()
    one, other, third = (torch.Stream(device=rows.device) for _ in range(3))
    with deferred(), held(one):
        with one:
            first, _, event = buffer.combine(rows, handle, async_with_compute_stream=True)
        with other:
            event.current_stream_wait()
            seen = first.clone()
        with third:
            second = buffer.combine(rows, handle)[0]
    event.event.synchronize()
    assert torch.equal(first, expected)
    torch.accelerator.synchronize()
    assert torch.equal(seen, expected)
    assert torch.equal(second, expected)
    buffer.destroy()


@pytest.mark.parametrize("allows_several", [False, True])
def test_a_handle_on_two_streams(allows_several):
    run(two_streams, allows_several)


def little_memory(me):
    """A dispatch that does not fit at once goes in pieces, and the host waits."""
    buffer = Buffer(dist.group.WORLD, LITTLE)
    given = drawn(6, COUNTS, EXPERTS)
    mine = given[me.rank]
    exact = buffer.dispatch(mine.x, **a_call(buffer, mine))
    found = buffer.dispatch(mine.x, **a_call(buffer, mine), num_worst_tokens=WORST)
    assert not found[4].route.is_at_worst
    assert torch.equal(found[0][: len(exact[0])], exact[0])
    skips = {"num_worst_tokens": WORST, "timeout_us": 10_000_000}
    buffer.destroy()
    buffer = Buffer(dist.group.WORLD, AMPLE)
    found = buffer.dispatch(mine.x, **a_call(buffer, mine), **skips)
    assert not found[4].route.is_at_worst
    assert torch.equal(found[0][: len(exact[0])], exact[0])
    buffer.destroy()


def test_calls_that_wait_for_counts():
    run(little_memory)


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


def killed_at_worst(me, victim, where):
    """Each call of a known size is one with the victim or one without it, the same on all."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    given = drawn(7, [40, 70, 33, 61], EXPERTS)
    mine = given[me.rank]
    left = [rank for rank in range(SIZE) if rank != victim]
    call = a_call(buffer, mine)
    full = buffer.dispatch(mine.x, **call, num_worst_tokens=WORST)
    torch.accelerator.synchronize()
    me.board.set(f"running-{me.rank}")
    if where == "rows" and me.rank == victim:  # behind its counts
        extension.load().arm_failpoint("ep-take", 3, False)
    after, seen = 0, []
    while after < 3:
        active, then = (torch.ones(SIZE, dtype=torch.int32) for _ in range(2))
        found = buffer.dispatch(mine.x, **call, num_worst_tokens=WORST, active_ranks=active)
        again, *_ = buffer.dispatch(mine.x, handle=full[4])
        combined = buffer.combine(found[0], found[4], topk_weights=found[2], active_ranks=then)
        missing = buffer.missing_contributions
        here = [rank for rank, is_active in enumerate(active.tolist()) if is_active]
        still = [rank for rank, is_active in enumerate(then.tolist()) if is_active]
        ways = reference.normal_rows(
            [one.topk_idx for one in given], owners_of(EXPERTS, SIZE), me.rank, here
        )
        rows = len(ways)
        for row, (source, token) in zip(found[0][:rows], ways, strict=True):
            assert torch.equal(row, given[source].x[token])
        assert not found[0][rows:].any()
        handle = list(found[4])
        handle[3] = handle[3][:rows]
        check_dispatch(
            me, (*(one[:rows] for one in found[:3]), None, handle, None), given, EXPERTS, here
        )
        if here == left:
            assert still == left
            are_left = again.cpu().any(dim=1).to(again.device)
            assert torch.equal(again[are_left], full[0][are_left])
        answers = []
        for rank in range(SIZE):
            ways = reference.normal_rows(
                [one.topk_idx for one in given], owners_of(EXPERTS, SIZE), rank, here
            )
            rows = [given[source].x[token] for source, token in ways]
            answers.append(torch.stack(rows) if rows else mine.x[:0])
        check_combine(
            me, (combined[0], None, None), answers, given, EXPERTS, missing,
            active=here, still_active=still,
        )  # fmt: skip
        seen.append((here, still))
        after += here == left
    buffer.destroy()
    return [one for one in seen if one != (list(range(SIZE)),) * 2]


@pytest.mark.ci
@pytest.mark.parametrize("where", ["anywhere", "rows"])
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_in_a_call_of_a_known_size(victim, where):
    with crew() as ranks:
        ranks.start(killed_at_worst, victim, where)
        if where == "anywhere":
            ranks.board.wait_all("running", range(SIZE))
            ranks.signal(victim, signal.SIGKILL)
        first, *others = [one for one in ranks.results(dead=[victim]) if one is not None]
        ranks.broken = True
    assert all(one == first for one in others)


def killed_once(me, victim, where, is_counted):
    """Each combine of expanded rows that rounds once is one with the victim or one without it, the
    same on all survivors; sums have the bits of those that are left."""
    buffer = ElasticBuffer(dist.group.WORLD, 1 << 21, allow_multiple_reduction=False)
    mine = drawn(7, [40, 70, 33, 61], EXPERTS)[me.rank]
    left = [int(rank != victim) for rank in range(SIZE)]
    owners = torch.tensor([*owners_of(EXPERTS, SIZE), -1], device="cpu")[mine.topk_idx.cpu()]
    form = {
        "num_experts": EXPERTS, "num_max_tokens_per_rank": 80, "do_expand": True,
        "do_cpu_sync": is_counted,
    }  # fmt: skip

    def answers(found):
        """Those of the expert e: e + 2 times the row. All others are never read."""
        counts = found[3].num_unaligned_recv_tokens_per_expert.tolist()
        made, end = torch.full_like(found[0], float("nan")), 0
        experts = [e for e, owner in enumerate(owners_of(EXPERTS, SIZE)) if owner == me.rank]
        for expert, count in zip(experts, counts, strict=True):
            begin, end = end, end + count
            made[begin:end] = found[0][begin:end] * (expert + 2)
        return made

    def check(sums, missing, active):
        x, there = mine.x.cpu(), torch.tensor([*active, 0], device="cpu")[owners] == 1
        expected = torch.zeros_like(x, dtype=torch.float32)
        for expert, is_there in zip(mine.topk_idx.cpu().t(), there.t(), strict=True):
            rows = (x * (expert + 2).unsqueeze(1).bfloat16()).float()
            expected += rows.masked_fill(~is_there.unsqueeze(1), 0)
        assert torch.equal(sums.cpu(), expected.bfloat16())
        assert torch.equal(missing.cpu(), (~there & (owners >= 0)).any(dim=1))

    full = buffer.dispatch(mine.x, mine.topk_idx, mine.weights, **form)
    rows = answers(full)
    torch.accelerator.synchronize()
    me.board.set(f"running-{me.rank}")
    me.board.wait_all("running", range(SIZE))
    if where == "rows" and me.rank == victim:  # of a combine, behind their counts
        extension.load().arm_failpoint("ep-take", 2, False)
    seen, after = [], 0
    while after < 3:
        active, then, later = (torch.ones(SIZE, dtype=torch.int32) for _ in range(3))
        found = buffer.dispatch(mine.x, mine.topk_idx, mine.weights, active_ranks=active, **form)
        sums, *_ = buffer.combine(answers(found), found[3], active_ranks=then)
        check(sums, buffer.missing_contributions, then.tolist())
        # The rows of a dispatch from before the loss.
        sums, *_ = buffer.combine(rows, full[3], active_ranks=later)
        check(sums, buffer.missing_contributions, later.tolist())
        seen.append([one.tolist() for one in (active, then, later)])
        after += seen[-1] == [left] * 3
    buffer.destroy()
    return [one for one in seen if one != [[1] * SIZE] * 3], len(seen)


@pytest.mark.ci
@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("where", ["anywhere", "rows"])
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_in_a_combine_that_rounds_once(victim, where, is_counted):
    with crew() as ranks:
        ranks.start(killed_once, victim, where, is_counted)
        if where == "anywhere":
            ranks.board.wait_all("running", range(SIZE))
            ranks.signal(victim, signal.SIGKILL)
        first, *others = [one for one in ranks.results(dead=[victim]) if one is not None]
        ranks.broken = True
    assert all(one == first for one in others)


def killed_between_pieces(me, victim, piece):
    """A dispatch with a handle has no row of a rank that is lost in any of its pieces."""
    buffer = Buffer(dist.group.WORLD, LITTLE)
    given = drawn(7, [40, 70, 33, 61], EXPERTS)
    mine = given[me.rank]
    found = buffer.dispatch(mine.x, **a_call(buffer, mine))
    assert len(found[4].route.pieces) > piece
    torch.accelerator.synchronize()
    me.board.set(f"ready-{me.rank}")
    me.board.wait_all("ready", range(SIZE))
    if me.rank == victim:
        extension.load().arm_failpoint("ep-take", piece, False)
    ends = found[4].route.ends.tolist()
    begins = [0, *ends[:-1]]
    for _ in range(2):
        active = torch.ones(SIZE, dtype=torch.int32)
        again, *_ = buffer.dispatch(mine.x, handle=found[4], active_ranks=active)
        expected = found[0].clone()
        expected[begins[victim] : ends[victim]] = 0
        assert active.tolist() == [int(rank != victim) for rank in range(SIZE)]
        assert torch.equal(again, expected)
    buffer.destroy()


@pytest.mark.ci
@pytest.mark.parametrize("piece", [1, 2, 3])
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_between_pieces(victim, piece):
    with crew() as ranks:
        ranks.start(killed_between_pieces, victim, piece)
        ranks.results(dead=[victim])
        ranks.broken = True


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


def errors_of_sizes(me, wrong):
    """An error of the counts comes to all ranks and ends the buffer; no stream waits."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    mine = drawn(4, COUNTS, EXPERTS)[me.rank]
    call = a_call(buffer, mine)
    most = WORST + (me.rank == 2) if wrong == "differs" else 7

    def dispatch():
        buffer.dispatch(mine.x, **call, num_worst_tokens=most)
        torch.accelerator.synchronize()
        buffer.dispatch(mine.x, **call, num_worst_tokens=most)

    kind, text = raised(dispatch)
    torch.accelerator.synchronize()
    assert kind == "ValueError", text
    assert raised(buffer.dispatch, mine.x, **call) == (kind, text)
    buffer.destroy()
    return text


@pytest.mark.parametrize("wrong", ["differs", "too few"])
def test_errors_of_sizes(wrong):
    found = run(errors_of_sizes, wrong)
    says = "rank 0 and rank 2 have places for" if wrong == "differs" else "and has places for 7"
    assert all(says in text for text in found), found


def wrong_argument_at_worst(me):
    """An error of its caller alone, and nothing was sent."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    given = drawn(4, COUNTS, EXPERTS)
    mine = given[me.rank]
    call = a_call(buffer, mine)
    exact = buffer.dispatch(mine.x, **call)
    if me.rank == 1:
        for text, wrong in (
            ("both or none", {"topk_weights": None}),
            ("on cpu", {"topk_weights": mine.weights.cpu()}),
        ):
            kind, message = raised(
                lambda wrong=wrong: buffer.dispatch(
                    mine.x, **{**call, **wrong}, num_worst_tokens=WORST
                )
            )
            assert (kind, text in message, "rank 1" in message) == ("ValueError", True, True)
    found = buffer.dispatch(mine.x, **call, num_worst_tokens=WORST)
    assert torch.equal(found[0][: len(exact[0])], exact[0])
    buffer.destroy()


def test_a_wrong_argument_of_a_known_size():
    run(wrong_argument_at_worst)


def other_handles(me):
    """One rank combines the rows of another dispatch: that ends the buffer, and no stream waits."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    mine = drawn(4, COUNTS, EXPERTS)[me.rank]
    call = a_call(buffer, mine)
    handles = [buffer.dispatch(mine.x, **call)[4] for _ in range(2)]
    rows = buffer.dispatch(mine.x, **call)[0]
    kind, text = raised(
        lambda: buffer.combine(rows, handles[me.rank == 1], async_finish=True)[
            2
        ].event.synchronize()
    )
    torch.accelerator.synchronize()
    assert raised(buffer.combine, rows, handles[0]) == (kind, text)
    assert raised(buffer.dispatch, mine.x, **call)[0] == kind
    buffer.destroy()
    return kind


def test_other_handles():
    assert len(set(run(other_handles))) == 1


def other_expanded_handles(me, is_counted):
    """The same in a combine that rounds once. The event's wait on the host raises it, or the call
    itself where it has failed by its return."""
    buffer = ElasticBuffer(dist.group.WORLD, 1 << 21, allow_multiple_reduction=False)
    mine = drawn(4, COUNTS, EXPERTS)[me.rank]
    form = {"num_experts": EXPERTS, "do_expand": True, "do_cpu_sync": is_counted}
    found = [
        buffer.dispatch(mine.x, mine.topk_idx, num_max_tokens_per_rank=most, **form)
        for most in (80, 70)
    ]
    rows, *_, handle, _ = found[me.rank == 1]
    kind, text = raised(
        lambda: buffer.combine(rows, handle, async_with_compute_stream=True)[2].event.synchronize()
    )
    torch.accelerator.synchronize()
    assert raised(buffer.combine, rows, handle) == (kind, text)
    buffer.destroy()
    return kind, text


@pytest.mark.parametrize("is_counted", [False, True])
def test_other_handles_of_expanded_rows(is_counted):
    found = run(other_expanded_handles, is_counted)
    assert len(set(found)) == 1, found
    assert "rank 0 and rank 1 combine rows of different dispatches" in found[0][1]


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
