"""Buffer's normal mode: the checks of DeepEP's tests, bit by bit, and losses between its steps."""

from __future__ import annotations

import signal
from typing import Any

import ep_crew
import harness
import pytest
import torch
import torch.distributed as dist
from harness import raised
from normal_crew import (
    AMPLE,
    HIDDEN,
    LITTLE,
    SIZE,
    answers_of,
    check_combine,
    check_dispatch,
    drawn,
    layout,
    owners_of,
)

from mooncake.ep import Buffer, reference
from mooncake.ep import layout as layouts
from mooncake_backend import extension


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
def test_owners_are_the_references(size):
    for experts in range(1, 3 * size + 3):
        owners = reference.default_owners(experts, size)
        assert layouts.owners_of(experts, size, layouts.CPU).tolist() == owners
        for rank in range(size):
            mine = reference.local_experts(owners, rank)
            numbers = [mine.index(e) if e in mine else -1 for e in [*range(experts), -1]]
            chosen = torch.tensor([*range(experts), -1])
            of_rank = layouts.local_range(experts, size, rank)
            assert layouts.local_experts_of(chosen, *of_rank).tolist() == numbers


def round_trip(me: harness.Rank, counts: Any, experts: int, num_bytes: int, how: str) -> None:
    buffer = Buffer(dist.group.WORLD, num_bytes, explicitly_destroy=True)
    for seed in range(3):
        given = drawn(seed, counts, experts)
        mine = given[me.rank]
        x = ep_crew.cast(mine.x) if how == "fp8" else mine.x
        topk = {} if how == "bare" else {"topk_idx": mine.topk_idx, "topk_weights": mine.weights}
        event = buffer.capture() if how == "async" else None
        found = buffer.dispatch(
            x, **layout(buffer, mine.topk_idx, experts), **topk,
            previous_event=event, async_finish=how == "async",
        )  # fmt: skip
        assert (found[5].event is not None) == (how == "async")
        check_dispatch(me, found, given, experts)
        handle = found[4]
        answers = answers_of(given, experts)
        own = answers[me.rank]
        biases = {
            "bias": mine.x.flip(0), "biases": (mine.x.flip(0), mine.x * 3),
        }.get(how)  # fmt: skip
        weights = found[2]
        combined = buffer.combine(
            own, handle, topk_weights=weights, bias=biases, async_finish=how == "async"
        )
        combined[2].current_stream_wait()
        summed = biases if isinstance(biases, tuple) else () if biases is None else (biases,)
        check_combine(
            me, combined, answers, given, experts, buffer.missing_contributions, biases=summed
        )
        if weights is not None:
            assert torch.equal(combined[1], mine.weights.masked_fill(mine.topk_idx < 0, 0))
        # The same way again.
        again = buffer.dispatch(x, handle=handle)
        assert again[1:5] == (None, None, None, None)
        first = found[0][0] if how == "fp8" else found[0]
        second = again[0][0] if how == "fp8" else again[0]
        assert torch.equal(first.float(), second.float())
        combined = buffer.combine(own, handle)
        check_combine(me, combined, answers, given, experts, buffer.missing_contributions)
    buffer.destroy()


WAYS = ["bare", "topk", "fp8", "bias", "biases", "async"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("num_bytes", [AMPLE, LITTLE])
@pytest.mark.parametrize("layout", ["shm", "tcp", "hosts", "device", "device-kernels"])
def test_round_trips_are_bit_exact(layout, num_bytes, how, crews):
    ranks = crews.get(layout, SIZE)
    ranks.call(round_trip, [40, 0, 33, 61], 8, num_bytes, how)
    ranks.call(round_trip, [17, 80, 1, 5], 9, num_bytes, how)


@pytest.mark.parametrize("ranks_of_hosts", [[2, 1, 1], [3, 1]])
def test_round_trips_over_unequal_hosts(ranks_of_hosts):
    with ep_crew.over_hosts(ranks_of_hosts) as ranks:
        ranks.call(round_trip, [40, 0, 33, 61], 9, AMPLE, "topk")
        ranks.call(round_trip, [40, 90, 33, 61], 8, LITTLE, "fp8")


# ---- the checks of DeepEP's own program


def is_of_ranks(rows: torch.Tensor, ends: torch.Tensor) -> None:
    """Each row has the number of the rank that it came from in all of its elements."""
    assert torch.equal(rows.amin(dim=1), rows.amax(dim=1))
    begin = 0
    for rank, end in enumerate(ends.tolist()):
        assert (rows[begin:end] == rank).all()
        begin = end
    assert begin == len(rows)


def deepep_on_rank(me: harness.Rank) -> None:
    from mooncake.ep.on_path.deep_ep.utils.math import (
        calc_diff,
        per_token_cast_back,
        per_token_cast_to_fp8,
    )  # fmt: skip

    tokens, hidden, topk, experts = 64, 256, 4, 16
    torch.set_default_dtype(torch.bfloat16)  # as its programs do
    buffer = Buffer(dist.group.WORLD, 1 << 22, 0, low_latency_mode=False)
    generator = torch.Generator().manual_seed(me.rank)
    plain = torch.ones(tokens, hidden) * me.rank
    noise = torch.randn(tokens, hidden, generator=generator)
    scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float32)
    topk_idx = scores.topk(topk, dim=1, sorted=False).indices
    ranked = torch.full((tokens, topk), float(me.rank), dtype=torch.float32)
    drawn_weights = torch.randn(tokens, topk, generator=generator, dtype=torch.float32)
    where = layout(buffer, topk_idx, experts)
    copies = where["is_token_in_rank"].sum(dim=1, keepdim=True)
    of_all = torch.empty(me.size * tokens, topk, dtype=torch.int64)
    dist.all_gather_into_tensor(of_all, topk_idx)
    for previous in (False, True):
        for is_async in (False, True):
            for x in (noise, plain, per_token_cast_to_fp8(plain)):
                for has_topk in (False, True):
                    weights = drawn_weights if x is noise else ranked
                    more: dict[str, Any] = {"async_finish": is_async}
                    if previous:
                        more["previous_event"] = buffer.capture()
                    given = {"topk_idx": topk_idx, "topk_weights": weights} if has_topk else {}
                    recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
                        x, **where, **given, **more
                    )
                    event.current_stream_wait()
                    rows = per_token_cast_back(*recv_x) if isinstance(recv_x, tuple) else recv_x
                    share = experts // me.size
                    for local, count in enumerate(counts):
                        assert count == (of_all == me.rank * share + local).sum()
                        assert not has_topk or (recv_idx == local).sum() == count
                    if x is not noise:
                        is_of_ranks(rows, handle[0][:, me.rank])
                    if has_topk and x is not noise:
                        largest = recv_weights.amax(dim=1, keepdim=True).expand_as(recv_weights)
                        recv_weights = torch.where(recv_idx == -1, largest, recv_weights)
                        is_of_ranks(recv_weights, handle[0][:, me.rank])
                    if not has_topk:
                        again = buffer.dispatch(x, handle=handle, **more)
                        again[5].current_stream_wait()
                    combined, sums, event = buffer.combine(
                        rows, handle, topk_weights=recv_weights, **more
                    )
                    event.current_stream_wait()
                    expected = noise if x is noise else plain
                    assert calc_diff(combined.float() / copies, expected) < 5e-6
                    if has_topk:
                        found = sums if x is noise else sums / copies
                        assert calc_diff(found, weights) < 1e-9
    buffer.destroy()
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("layout", ["shm", "device", "device-kernels"])
def test_the_checks_of_deepeps_program(layout, crews):
    crews.get(layout, SIZE).call(deepep_on_rank)


def copied_handles_on_rank(me: harness.Rank) -> None:
    """Programs pack DeepEP's handle, a plain tuple, into others, and unpack it."""
    experts = 8
    buffer = Buffer(dist.group.WORLD, AMPLE)
    given = drawn(4, [5, 9, 0, 12], experts)
    mine = given[me.rank]
    call = {
        **layout(buffer, mine.topk_idx, experts),
        "topk_idx": mine.topk_idx, "topk_weights": mine.weights,
    }  # fmt: skip
    rows = buffer.dispatch(mine.x, **call)[0]
    # The entry left out is the tensor that was given.
    ep_crew.check_copied_handles(
        lambda: buffer.dispatch(mine.x, **call)[4],
        lambda handle: (
            buffer.dispatch(mine.x, handle=handle)[0], buffer.combine(rows, handle)[0],
        ),
        [0, 1, 2, 3, 5],
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["shm", "device", "device-kernels"])
def test_copies_of_handles(layout, crews):
    crews.get(layout, SIZE).call(copied_handles_on_rank)


# ---- numbers, formats, errors


def worst_tokens_on_rank(me: harness.Rank) -> None:
    experts, counts = 8, [5, 9, 0, 12]
    buffer = Buffer(dist.group.WORLD, AMPLE)
    given = drawn(4, counts, experts)
    mine = given[me.rank]
    call = {
        **layout(buffer, mine.topk_idx, experts),
        "topk_idx": mine.topk_idx, "topk_weights": mine.weights,
    }  # fmt: skip
    exact = buffer.dispatch(mine.x, **call, expert_alignment=16)
    rows = len(exact[0])
    plain = buffer.dispatch(mine.x, **call)
    assert exact[3] == [-(-count // 16) * 16 for count in plain[3]]
    if mine.x.device.type == "cpu":  # else an error of the counts ends the buffer
        # One rank's limit ends the call on all ranks.
        few = {"num_worst_tokens": 2 if me.rank == 1 else 100}
        kind, text = raised(buffer.dispatch, mine.x, **call, **few)
        assert (kind, "num_worst_tokens is 2" in text) == ("ValueError", True), text
    worst = buffer.dispatch(mine.x, **call, num_worst_tokens=100)
    assert worst[3] == []
    assert [len(one) for one in worst[:3]] == [100] * 3
    assert torch.equal(worst[0][:rows], exact[0])
    assert torch.equal(worst[1][:rows], exact[1])
    assert (worst[1][rows:] == -1).all()
    again = buffer.dispatch(mine.x, handle=worst[4])[0]
    assert len(again) == 100
    assert torch.equal(again[:rows], exact[0])
    assert not again[rows:].any()
    assert len(buffer.dispatch(mine.x, handle=exact[4])[0]) == rows
    combined = buffer.combine(worst[0], worst[4], topk_weights=worst[2])
    expected = buffer.combine(exact[0], exact[4], topk_weights=exact[2])
    assert torch.equal(combined[0], expected[0])
    assert torch.equal(combined[1], expected[1])
    assert not buffer.missing_contributions.any()


@pytest.mark.parametrize("layout", ["shm", "device", "device-kernels"])
def test_worst_numbers_of_tokens_and_alignment(layout, crews):
    crews.get(layout, SIZE).call(worst_tokens_on_rank)


def errors_on_rank(me: harness.Rank) -> None:
    experts = 8
    buffer = Buffer(dist.group.WORLD, AMPLE)
    mine = drawn(5, [6] * SIZE, experts)[me.rank]
    call = layout(buffer, mine.topk_idx, experts)
    cases: list[tuple[str, Any]] = [
        ("get_dispatch_layout", lambda: buffer.dispatch(mine.x)),
        ("both or none", lambda: buffer.dispatch(mine.x, **call, topk_idx=mine.topk_idx)),
        ("topk_weights is float64", lambda: buffer.dispatch(
            mine.x, **call, topk_idx=mine.topk_idx, topk_weights=mine.weights.double())),
        ("needs topk_idx", lambda: buffer.dispatch(mine.x, **call, num_worst_tokens=9)),
        ("is_token_in_rank is bool [6, 4]", lambda: buffer.dispatch(mine.x[:3], **call)),
    ]  # fmt: skip
    wrong = mine.topk_idx * 0 + 8
    if wrong.device.type == "cpu":
        cases.append(("expert 8 of 8", lambda: buffer.get_dispatch_layout(wrong, experts)))
    else:  # the host waits for nothing, so such an expert is none
        assert not any(layout(buffer, wrong, experts)["num_tokens_per_expert"].tolist())
        cases.append(
            (
                "expert 8 of 8",
                lambda: buffer.dispatch(mine.x, **call, topk_idx=wrong, topk_weights=mine.weights),
            )
        )
    for text, function in cases:
        kind, message = raised(function)
        assert (kind, text in message) == ("ValueError", True), (text, message)
    found = buffer.dispatch(mine.x, **call)
    handle = found[4]
    other = Buffer(dist.group.WORLD, AMPLE)
    for text, function in [
        ("another buffer", lambda: other.combine(found[0], handle)),
        ("rows, the dispatch received", lambda: buffer.combine(found[0][1:], handle)),
        ("x is float32", lambda: buffer.combine(found[0].float(), handle)),
        ("the handle's dispatch were", lambda: buffer.dispatch(mine.x[:2], handle=handle)),
    ]:
        kind, message = raised(function)
        assert (kind, text in message) == ("ValueError", True), (text, message)
    low_latency = ep_crew.deepep_buffer(8, HIDDEN, experts)
    assert "num_nvl_bytes" in raised(low_latency.dispatch, mine.x, handle=handle)[1]
    text = raised(buffer.low_latency_dispatch, mine.x, mine.topk_idx, 8, experts)[1]
    assert "low_latency_mode" in text
    tiny = Buffer(dist.group.WORLD, 128)
    assert "too few for one token" in raised(lambda: tiny.dispatch(mine.x, **call))[1]
    # Nothing of it is left.
    combined = buffer.combine(found[0], handle)
    assert not buffer.missing_contributions.any()
    assert len(combined[0]) == 6


@pytest.mark.parametrize("layout", ["shm", "device", "device-kernels"])
def test_errors_send_nothing(layout, crews):
    crews.get(layout, SIZE).call(errors_on_rank)


def lazy_on_rank(me: harness.Rank) -> None:
    """Tensors that torch marks as conjugated or negated, without a change of their memory."""
    buffer = Buffer(dist.group.WORLD, AMPLE)
    given = drawn(6, [6] * SIZE, 8)
    call = layout(buffer, given[me.rank].topk_idx, 8)
    drawn_numbers = torch.Generator().manual_seed(me.rank)
    numbers = torch.randn(6, 8, dtype=torch.cfloat, generator=drawn_numbers)
    for lazy in (numbers.conj(), numbers.t().contiguous().t().conj(), numbers.conj().imag):
        assert lazy.is_conj() or lazy.is_neg()
        plain = lazy.resolve_conj().resolve_neg()
        found, expected = (buffer.dispatch(one, **call)[0] for one in (lazy, plain))
        assert torch.equal(found, expected)
        assert found.dtype == lazy.dtype


@pytest.mark.parametrize("layout", ["shm", "device", "device-kernels"])
def test_lazily_negated_tensors(layout, crews):
    crews.get(layout, SIZE).call(lazy_on_rank)


def both_modes_on_rank(me: harness.Rank) -> None:
    """Low latency calls on the same buffer."""
    tokens, experts = 12, 8
    size = Buffer.get_low_latency_rdma_size_hint(tokens, HIDDEN, SIZE, experts)
    buffer = Buffer(dist.group.WORLD, AMPLE, size, low_latency_mode=True)
    for seed in range(2):
        given = drawn(seed, [tokens] * SIZE, experts)
        mine = given[me.rank]
        found = buffer.dispatch(
            mine.x, **layout(buffer, mine.topk_idx, experts),
            topk_idx=mine.topk_idx, topk_weights=mine.weights,
        )  # fmt: skip
        check_dispatch(me, found, given, experts)
        ep_crew.round_trip(me, buffer, given, tokens, experts, use_fp8=False)
        answers = answers_of(given, experts)
        combined = buffer.combine(answers[me.rank], found[4])
        check_combine(me, combined, answers, given, experts, buffer.missing_contributions)


@pytest.mark.parametrize("layout", ["shm", "device", "device-kernels"])
def test_both_modes_of_one_buffer(layout, crews):
    crews.get(layout, SIZE).call(both_modes_on_rank)


# ---- ranks that die, are late or are masked


def survivors_on_rank(me: harness.Rank, victim: int, where: str, num_bytes: int) -> tuple[int, ...]:
    experts, counts = 9, [40, 70, 33, 61]
    buffer = Buffer(dist.group.WORLD, num_bytes)
    given = drawn(7, counts, experts)
    mine = given[me.rank]

    def dies(place: str) -> None:
        if (me.rank, where) == (victim, place):
            signal.raise_signal(signal.SIGKILL)

    def dispatch() -> Any:
        return buffer.dispatch(
            mine.x, **layout(buffer, mine.topk_idx, experts),
            topk_idx=mine.topk_idx, topk_weights=mine.weights,
        )  # fmt: skip

    everybody = range(SIZE)
    left = [rank for rank in everybody if rank != victim]
    before = dispatch()
    check_dispatch(me, before, given, experts)
    me.board.set(f"ready-{me.rank}")
    me.board.wait_all("ready", everybody)
    if where in ("take", "later piece") and me.rank == victim:
        extension.load().arm_failpoint("ep-take", 1 if where == "take" else 3, False)
    dies("dispatch")
    found, active = before, tuple(everybody)
    if where in ("dispatch", "take", "later piece"):
        found = dispatch()
        # If it dies after it has given its rows, they may still count.
        there = found[4].route.participants
        active = tuple(rank for rank in everybody if there[rank])
        assert set(active) >= set(left)
        assert where != "dispatch" or victim not in active
        check_dispatch(me, found, given, experts, active=active)
    dies("combine")
    answers = answers_of(given, experts, active)
    combined = buffer.combine(answers[me.rank], found[4], topk_weights=found[2])
    check_combine(
        me, combined, answers, given, experts, buffer.missing_contributions,
        active=active, still_active=left,
    )  # fmt: skip
    # A handle from before the loss works among the ranks that are left.
    again = buffer.dispatch(mine.x, handle=before[4])[0]
    ways = reference.normal_rows(
        [one.topk_idx for one in given], owners_of(experts, SIZE), me.rank, everybody
    )
    assert len(again) == len(ways)
    for row, (source, token) in zip(again, ways, strict=True):
        assert torch.equal(row, given[source].x[token] * (source != victim))
    answers = answers_of(given, experts)
    ranks = torch.ones(SIZE, dtype=torch.int32)
    combined = buffer.combine(answers[me.rank], before[4], active_ranks=ranks)
    assert ranks.tolist() == [int(rank in left) for rank in everybody]
    check_combine(
        me, combined, answers, given, experts, buffer.missing_contributions, still_active=left
    )
    return active


@pytest.mark.parametrize(
    ("where", "num_bytes"),
    [(where, room) for where in ("dispatch", "take", "combine") for room in (AMPLE, LITTLE)]
    + [("later piece", LITTLE)],
)
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_agree(victim, where, num_bytes):
    with harness.starting(SIZE, survivors_on_rank, victim, where, num_bytes) as ranks:
        results = ranks.results(dead=[victim])
    assert len({result for rank, result in enumerate(results) if rank != victim}) == 1


def masked_on_rank(me: harness.Rank, masked: int, num_bytes: int) -> None:
    """Rank 0 masks a rank, which has the most tokens: for this call, then for no other."""
    experts, counts = 9, [40, 70, 33, 61]
    counts[masked] = 90
    buffer = Buffer(dist.group.WORLD, num_bytes)
    given = drawn(8, counts, experts)
    mine = given[me.rank]
    where = layout(buffer, mine.topk_idx, experts)
    topk = {"topk_idx": mine.topk_idx, "topk_weights": mine.weights}
    left = [rank for rank in range(SIZE) if rank != masked]
    mask = torch.ones(SIZE, dtype=torch.int32)
    if me.rank == 0:
        mask[masked] = 0
    found = buffer.dispatch(mine.x, **where, **topk, active_ranks=mask)
    assert mask.tolist() == [int(rank in left) for rank in range(SIZE)]
    if me.rank == masked:
        assert len(found[0]) == 0
        assert sum(found[3]) == 0
    else:
        check_dispatch(me, found, given, experts, active=left)
    answers = answers_of(given, experts, left)
    own = answers[me.rank] if me.rank != masked else found[0]
    combined = buffer.combine(own, found[4])
    missing = buffer.missing_contributions
    if me.rank == masked:
        assert torch.equal(missing, where["is_token_in_rank"].any(dim=1))
        assert not combined[0].any()
    else:
        check_combine(
            me, combined, answers, given, experts, missing, active=left, still_active=left
        )
    found = buffer.dispatch(mine.x, **where, **topk)
    check_dispatch(me, found, given, experts)
    # Masked for the combine only.
    answers = answers_of(given, experts)
    mask = torch.ones(SIZE, dtype=torch.int32)
    if me.rank == 0:
        mask[masked] = 0
    combined = buffer.combine(answers[me.rank], found[4], active_ranks=mask, async_finish=True)
    combined[2].current_stream_wait()
    assert mask.tolist() == [int(rank in left) for rank in range(SIZE)]
    if me.rank != masked:
        check_combine(
            me, combined, answers, given, experts, buffer.missing_contributions, still_active=left
        )
    kind, text = raised(buffer.combine, answers[me.rank], found[4], active_ranks=mask[:2])
    assert (kind, "for each of 4 ranks" in text) == ("ValueError", True), text


@pytest.mark.parametrize("num_bytes", [AMPLE, LITTLE])
@pytest.mark.parametrize("masked", [0, 3])
@pytest.mark.parametrize("layout", ["shm", "device", "device-kernels"])
def test_masked_ranks(layout, masked, num_bytes, crews):
    crews.get(layout, SIZE).call(masked_on_rank, masked, num_bytes)


def late_on_rank(me: harness.Rank, name: str, late: int) -> None:
    experts, counts = 9, [40, 70, 33, 61]
    buffer = Buffer(dist.group.WORLD, AMPLE)
    given = drawn(9, counts, experts)
    mine = given[me.rank]
    where = layout(buffer, mine.topk_idx, experts)
    topk = {"topk_idx": mine.topk_idx, "topk_weights": mine.weights}
    left = [rank for rank in range(SIZE) if rank != late]
    answers = answers_of(given, experts, left)
    if me.rank == late:
        me.board.wait_all(f"{name}-done", left)
        found = buffer.dispatch(mine.x, **where, **topk, timeout_us=1_000_000)
        assert len(found[0]) == sum(found[3]) == 0
        combined = buffer.combine(found[0], found[4], timeout_us=1_000_000)
        assert torch.equal(buffer.missing_contributions, where["is_token_in_rank"].any(dim=1))
        assert not combined[0].any()
    else:
        mask = torch.ones(SIZE, dtype=torch.int32)
        found = buffer.dispatch(mine.x, **where, **topk, timeout_us=1_000_000, active_ranks=mask)
        assert mask.tolist() == [int(rank in left) for rank in range(SIZE)]
        check_dispatch(me, found, given, experts, active=left)
        combined = buffer.combine(answers[me.rank], found[4], timeout_us=1_000_000)
        check_combine(
            me, combined, answers, given, experts, buffer.missing_contributions,
            active=left, still_active=left,
        )  # fmt: skip
        me.board.set(f"{name}-done-{me.rank}")
    # It takes part again.
    found = buffer.dispatch(mine.x, **where, **topk, timeout_us=20_000_000)
    check_dispatch(me, found, given, experts)
    little = Buffer(dist.group.WORLD, LITTLE)
    kind, text = raised(little.dispatch, mine.x, **where, **topk, timeout_us=20_000_000)
    assert (kind, "With timeout_us they all go at once" in text) == ("ValueError", True), text
    check_dispatch(me, little.dispatch(mine.x, **where, **topk), given, experts)


@pytest.mark.parametrize("late", [0, 2])
def test_late_ranks_are_skipped(late, crews):
    crews.get("shm", SIZE).call(late_on_rank, f"late{late}", late)


def different_on_rank(me: harness.Rank) -> None:
    """Rows of the same size with other fields are an error on all ranks."""
    experts = 8
    buffer = Buffer(dist.group.WORLD, AMPLE)
    mine = drawn(5, [6] * SIZE, experts)[me.rank]
    topk = 3 if me.rank == 0 else 4  # 24 and 32 bytes, both sent as 32
    topk_idx = mine.topk_idx[:, :1].expand(-1, topk).contiguous()
    weights = mine.weights[:, :1].expand(-1, topk).contiguous()
    call = {**layout(buffer, topk_idx, experts), "topk_idx": topk_idx, "topk_weights": weights}
    kind, text = raised(buffer.dispatch, mine.x, **call)
    cause = "topk_idx differs between the ranks: int64 [n, 3] on rank 0; int64 [n, 4] on ranks 1-3"
    assert (kind, cause in text) == ("ValueError", True), text


@pytest.mark.parametrize("layout", ["shm", "device", "device-kernels"])
def test_different_fields_are_named(layout, crews):
    crews.get(layout, SIZE).call(different_on_rank)
