"""ElasticBuffer, bit by bit against mooncake.ep.reference, and losses between its steps."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ep_crew
import harness
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE_LAYOUT
from elastic_crew import (
    AMPLE,
    FORMS,
    HIDDEN,
    LITTLE,
    LONG,
    MOST,
    SIZE,
    TOPK,
    Expected,
    Form,
    answers_of,
    check_combine,
    check_dispatch,
    given_to_combine,
)
from harness import raised

from mooncake.ep import Buffer, ElasticBuffer, reference
from mooncake.mooncake_elastic_buffer import ElasticBuffer as MooncakeElasticBuffer
from mooncake.mooncake_elastic_buffer import EPHandle as MooncakeHandle
from mooncake_backend import extension


def round_trip(
    me: harness.Rank,
    counts: Any,
    experts: int,
    num_bytes: int,
    once: bool,
    duplicates: bool = False,
) -> None:
    buffer = ElasticBuffer(dist.group.WORLD, num_bytes, allow_multiple_reduction=not once)
    assert buffer.get_logical_domain_size() == (1, SIZE)
    hidden = LONG if num_bytes == LITTLE else HIDDEN
    forms = FORMS[::3] if num_bytes == LITTLE else FORMS  # long rows take long to compare
    for number, form in enumerate(forms):
        given = ep_crew.inputs(number, counts, hidden, TOPK, experts, duplicates)
        mine, expected = given[me.rank], Expected(me.rank, given, experts)
        x = ep_crew.cast(mine.x) if form.fp8 else mine.x
        is_async = number % 2 == 1
        stats = torch.ones(len(expected.mine), dtype=torch.int32)
        found = buffer.dispatch(
            x, mine.topk_idx, mine.weights, stats, **form.arguments(experts),
            previous_event=buffer.capture(), allocate_on_comm_stream=True,
            async_with_compute_stream=is_async, use_tma_aligned_col_major_sf=True,
        )  # fmt: skip
        assert (found[4].event is not None) == is_async
        found[4].current_stream_wait()
        check_dispatch(found, form, expected)
        handle = found[3]
        if num_bytes == LITTLE and max(counts) == MOST:
            route = handle.way.route
            assert route.kernels or len(route.pieces) > 1
        received = handle.num_unaligned_recv_tokens_per_expert
        assert torch.equal(stats, received + 1)
        if form.fp8:
            assert found[0][1].stride(0) == 1 or len(found[0][1]) < 2
        all_answers = answers_of(given, experts, form.expand)
        rows = given_to_combine(all_answers[me.rank], handle)
        mine_on_cpu = expected.given[me.rank]
        biases = [(), (mine.x.flip(0),), (mine.x.flip(0), mine.x * 3)][number % 3]
        bias = biases if len(biases) == 2 else biases[0] if biases else None
        weights = found[2] if not (form.expand and once) else None
        combined = buffer.combine(rows, handle, weights, bias, async_with_compute_stream=is_async)
        combined[2].current_stream_wait()
        check_combine(
            buffer, combined, all_answers, expected,
            biases=[one.cpu() for one in biases], rounds_once=once,
        )  # fmt: skip
        if weights is not None:
            sent = mine_on_cpu.weights.masked_fill(mine_on_cpu.topk_idx < 0, 0)
            assert torch.equal(combined[1].cpu(), sent)
        # The same way again.
        again = buffer.dispatch(
            x, topk_weights=mine.weights, handle=handle, do_expand=form.expand,
            do_zero_padding=form.expand,
        )  # fmt: skip
        assert again[3] is handle
        check_dispatch(again, form, expected)
        # A program may change its results: the handle stays as it is.
        if not form.expand:
            found[1].add_(100)
            again = buffer.dispatch(x, topk_weights=mine.weights, handle=handle)
            check_dispatch(again, form, expected)
        bare = buffer.dispatch(x, handle=handle, do_expand=form.expand)
        assert bare[2] is None
    buffer.barrier()
    buffer.destroy()


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("num_bytes", [AMPLE, LITTLE])
@pytest.mark.parametrize("layout", ["shm", "tcp", "hosts", "device", "device-kernels"])
def test_round_trips_are_bit_exact(layout, num_bytes, once, crews):
    ranks = crews.get(layout, SIZE)
    ranks.call(round_trip, [40, 0, 33, 61], 8, num_bytes, once)
    ranks.call(round_trip, [17, 80, 1, 96], 9, num_bytes, once)


@pytest.mark.parametrize("once", [False, True])
def test_an_expert_named_twice(once, crews):
    crews.get("shm", SIZE).call(round_trip, [40, 0, 33, 61], 3, AMPLE, once, True)


def domains_on_rank(me: harness.Rank, expected: Any) -> None:
    buffer = ElasticBuffer(dist.group.WORLD, LITTLE)
    assert buffer.get_physical_domain_size() == expected
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == expected


@pytest.mark.parametrize(
    ("ranks_of_hosts", "expected"), [([2, 2], (2, 2)), ([3, 1], (4, 1)), ([2, 1, 1], (4, 1))]
)
def test_round_trips_over_hosts(ranks_of_hosts, expected):
    with ep_crew.over_hosts(ranks_of_hosts) as ranks:
        ranks.call(domains_on_rank, expected)
        ranks.call(round_trip, [40, 0, 33, 61], 9, AMPLE, False)
        ranks.call(round_trip, [40, 90, 33, 61], 8, LITTLE, True)


def handle_on_rank(me: harness.Rank) -> None:
    """do_handle_copy, and the places at other ranks."""
    experts, buffer = 8, ElasticBuffer(dist.group.WORLD, LITTLE, num_max_tokens_per_rank=MOST)
    given = ep_crew.inputs(3, [20, 31, 1, 44], HIDDEN, TOPK, experts)
    mine = given[me.rank]
    owners = reference.default_owners(experts, SIZE)
    for copies in (True, False):
        *_, handle, _ = buffer.dispatch(
            mine.x, mine.topk_idx, num_experts=experts, do_handle_copy=copies
        )
        assert (handle.topk_idx.data_ptr() != mine.topk_idx.data_ptr()) == copies
        assert torch.equal(handle.topk_idx, mine.topk_idx)
        chosen = [one.topk_idx for one in given]
        rows = [reference.normal_rows(chosen, owners, rank, range(SIZE)) for rank in range(SIZE)]
        for token, experts_of_token in enumerate(mine.topk_idx.tolist()):
            ranks = [owners[one] if one >= 0 else -1 for one in experts_of_token]
            for place, rank in enumerate(ranks):
                is_master = rank >= 0 and rank not in ranks[place + 1 :]
                expected = rows[rank].index((me.rank, token)) if is_master else -1
                assert handle.dst_buffer_slot_idx[token, place] == expected


def test_handles(crews):
    crews.get("shm", SIZE).call(handle_on_rank)


def errors_on_rank(me: harness.Rank) -> None:
    experts = 8
    make = ElasticBuffer
    buffer = make(dist.group.WORLD, LITTLE, num_max_tokens_per_rank=MOST)
    once = make(dist.group.WORLD, LITTLE, allow_multiple_reduction=False)
    mine = ep_crew.inputs(4, [6] * SIZE, HIDDEN, TOPK, experts)[me.rank]
    call = {"topk_idx": mine.topk_idx, "topk_weights": mine.weights, "num_experts": experts}
    recv_x, _, weights, handle, _ = buffer.dispatch(mine.x, **call, do_expand=True)
    *_, other, _ = once.dispatch(mine.x, **call, num_max_tokens_per_rank=MOST, do_expand=True)
    *_, later, _ = once.dispatch(mine.x, **call, num_max_tokens_per_rank=MOST, do_expand=True)
    few = {**call, "num_max_tokens_per_rank": 5}
    ghost = mine.topk_idx.clone()
    ghost[0] = -2 if me.rank == 1 else 0
    differing = {**call, "num_max_tokens_per_rank": 90 + me.rank}
    empty = torch.zeros(0, HIDDEN).bfloat16()
    for function, kind, text in [
        (lambda: make(dist.group.WORLD), "ValueError", "give num_bytes, or"),
        (lambda: make(dist.group.WORLD, 128), "ValueError", "multiple of 2097152"),
        (lambda: make(dist.group.WORLD, num_cpu_bytes=1), "NotImplementedError", "Engram"),
        (lambda: buffer.engram_fetch(weights), "NotImplementedError", "engram_fetch"),
        (lambda: buffer.pp_send(weights, 1), "NotImplementedError", "pp_send"),
        (lambda: buffer.all_gather(weights), "NotImplementedError", "all_gather"),
        (lambda: buffer.dispatch(mine.x), "ValueError", "give a handle, or topk_idx"),
        (lambda: once.dispatch(mine.x, **call), "ValueError", "num_max_tokens_per_rank"),
        (lambda: buffer.dispatch(mine.x, **few), "ValueError", "x has 6 tokens"),
        (lambda: buffer.dispatch(mine.x, **differing), "ValueError", "ranks: 90 on rank 0; 91"),
        (lambda: buffer.dispatch(mine.x, **{**call, "num_experts": 3}), "ValueError", "of 3"),
        (
            lambda: buffer.dispatch(mine.x, **{**call, "topk_idx": ghost}),
            "ValueError", "topk_idx names expert -2 of 8",
        ),
        (
            lambda: once.combine(recv_x, (other, later)[me.rank % 2]),
            "ValueError", "the handle's dispatch differs between the ranks",
        ),
        (lambda: buffer.dispatch(mine.x, **call, do_zero_padding=True), "ValueError", "do_expand"),
        (lambda: buffer.dispatch(mine.x, handle=handle), "ValueError", "do_expand is False"),
        (
            lambda: buffer.dispatch(mine.x, handle=handle, do_expand=True, num_experts=9),
            "ValueError", "num_experts is 9",
        ),
        (lambda: buffer.dispatch(mine.x, mine.topk_idx, handle=handle), "ValueError", "its own"),
        (
            lambda: buffer.dispatch(mine.x[1:], handle=handle, do_expand=True),
            "ValueError", "the handle's dispatch were 6",
        ),
        (lambda: buffer.dispatch(mine.x, handle=(1,)), "TypeError", "EPHandle"),
        (lambda: buffer.combine(recv_x, other), "ValueError", "another buffer"),
        (lambda: buffer.combine(empty, handle), "ValueError", "the dispatch received"),
        (lambda: once.combine(recv_x, other, weights), "ValueError", "allow_multiple_reduction"),
        (lambda: buffer.get_theoretical_num_sms(8, 2, 1), "ValueError", "num_scaleout_topk"),
    ]:  # fmt: skip
        found, message = raised(function)
        assert (found, text in message) == (kind, True), (text, message)
    # Nothing of it is left.
    buffer.combine(recv_x, handle, weights)
    assert not buffer.missing_contributions.any()


def test_errors_send_nothing(crews):
    crews.get("shm", SIZE).call(errors_on_rank)


def mooncake_on_rank(me: harness.Rank) -> None:
    """Mooncake's class of the same name."""
    experts = 9
    buffer = MooncakeElasticBuffer(dist.group.WORLD, AMPLE)
    assert (buffer.rank_idx, buffer.num_ranks) == (me.rank, SIZE)
    given = ep_crew.inputs(5, [40, 12, 33, 61], HIDDEN, TOPK, experts)
    mine, expected = given[me.rank], Expected(me.rank, given, experts)
    for form in (Form(False, True, 1, False), Form(True, False, 16, False)):
        found = buffer.dispatch(mine.x, mine.topk_idx, mine.weights, **form.arguments(experts))
        handle = found[3]
        assert isinstance(handle, MooncakeHandle)
        assert handle.native_handle
        assert found[1][: len(expected.rows)].tolist() == expected.local
        shown = (found[0], None if form.expand else found[1], *found[2:])
        check_dispatch(shown, form, expected)
        answers = answers_of(given, experts, form.expand)
        combined = buffer.combine(given_to_combine(answers[me.rank], handle), handle, found[2])
        assert combined[1] is None
        check_combine(buffer, combined, answers, expected)
        assert buffer.dispatch(mine.x, handle=handle, do_expand=form.expand)[3] is handle
    buffer.update_ep_member()
    for call in (
        lambda: buffer.dispatch(mine.x, handle=handle, do_expand=True),
        lambda: buffer.combine(found[0], handle),
    ):
        kind, text = raised(call)
        assert (kind, "obsolete NCCL ElasticBuffer generation" in text) == ("RuntimeError", True)
    for how in ({"allow_multiple_reduction": False}, {"transport": "nccl"}):
        kind, _ = raised(lambda how=how: MooncakeElasticBuffer(dist.group.WORLD, AMPLE, **how))
        assert kind == "NotImplementedError"
    buffer.barrier()
    buffer.destroy()


def test_mooncakes_class(crews):
    crews.get("shm", SIZE).call(mooncake_on_rank)


def edges_on_rank(me: harness.Rank, tokens: Any, hidden: int, topk: int, experts: int) -> None:
    """Both classes, with experts that return what they get: a token comes back once from each rank
    that has one of its experts."""
    drawn = torch.Generator().manual_seed(me.rank)
    count = tokens[me.rank]
    x = torch.randint(-8, 8, (count, hidden), generator=drawn).bfloat16()
    if topk == 1:  # one expert has all tokens
        topk_idx = torch.full((count, 1), experts - 1)
    else:
        topk_idx = torch.rand(count, experts, generator=drawn).topk(topk, dim=1).indices
    weights = torch.rand(count, topk, generator=drawn)
    owners = torch.tensor(reference.default_owners(experts, SIZE))
    copies = torch.nn.functional.one_hot(owners[topk_idx], SIZE).amax(1).sum(1, keepdim=True)
    elastic = ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=max(1, *tokens), hidden=hidden, num_topk=topk
    )
    for expand in (False, True):
        rows, _, recv_weights, handle, _ = elastic.dispatch(
            x, topk_idx, weights, num_experts=experts, do_expand=expand
        )
        answers = rows
        if expand:  # one choice of each row answers
            slots = handle.recv_src_metadata[:, 2:].long()
            first = slots.gather(1, (slots >= 0).int().argmax(1, keepdim=True)).flatten()
            answers = torch.zeros_like(rows)
            answers[first] = rows[first]
        combined, combined_weights, _ = elastic.combine(answers, handle, recv_weights)
        assert torch.equal(combined, x * copies)
        assert torch.equal(combined_weights, weights)
    normal = Buffer(dist.group.WORLD, elastic.num_bytes)
    _, _, per_expert, is_in_rank, _ = normal.get_dispatch_layout(topk_idx, experts)
    rows, _, recv_weights, counts, handle, _ = normal.dispatch(
        x, is_token_in_rank=is_in_rank, num_tokens_per_expert=per_expert,
        topk_idx=topk_idx, topk_weights=weights,
    )  # fmt: skip
    assert len(counts) == int((owners == me.rank).sum())
    combined, combined_weights, _ = normal.combine(rows, handle, topk_weights=recv_weights)
    assert torch.equal(combined, x * copies)
    assert torch.equal(combined_weights, weights)


@pytest.mark.parametrize(
    ("tokens", "hidden", "topk", "experts"),
    [
        ([8192, 8192, 0, 8191], 24, 8, 13),
        ([100, 3, 0, 7], 7, 32, 41),
        ([50, 60, 70, 80], 130, 1, 5),
        ([0, 0, 0, 0], 16, 2, 4),
        ([9, 8, 7, 6], 33, 2, 3),  # a rank without experts
    ],
    ids=["tokens", "topk", "one expert", "nothing", "few experts"],
)
def test_shapes_at_the_edges(tokens, hidden, topk, experts, crews):
    crews.get("shm", SIZE).call(edges_on_rank, tokens, hidden, topk, experts)


def memory_on_rank(me: harness.Rank) -> None:
    """The memory of results that the program has dropped serves again."""
    buffer = ElasticBuffer(dist.group.WORLD, 16 << 20, num_max_tokens_per_rank=MOST)
    mine = ep_crew.inputs(6, [MOST] * SIZE, 8192, TOPK, 8)[me.rank]
    rows, _, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, num_experts=8)
    where = []
    for _ in range(3):
        rows = buffer.dispatch(mine.x, handle=handle)[0]
        combined = buffer.combine(rows, handle, async_with_compute_stream=True)
        combined[2].current_stream_wait()
        where.append((rows.data_ptr(), combined[0].data_ptr()))
        expected = rows.clone()
        kept = buffer.dispatch(mine.x * 2, handle=handle)[0]
        assert torch.equal(rows, expected)
        assert torch.equal(kept, expected * 2)
        del rows, combined, kept
    assert where[1] == where[2], where
    # After destroy() only the memory of living results is left.
    rows, dropped = (buffer.dispatch(mine.x, handle=handle)[0] for _ in range(2))
    expected, idle = rows.clone(), dropped.data_ptr()
    del dropped
    assert is_mapped(idle)
    buffer.destroy()
    assert not is_mapped(idle)
    assert torch.equal(rows, expected)
    used = rows.data_ptr()
    del rows
    assert not is_mapped(used)


def is_mapped(address: int) -> bool:
    ranges = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_results_reuse_memory(crews):
    crews.get("shm", SIZE).call(memory_on_rank)


def exponents_on_rank(me: harness.Rank) -> None:
    """Scales of a dtype that torch cannot index, from a rank that is masked afterwards."""
    buffer = ElasticBuffer(dist.group.WORLD, LITTLE, num_max_tokens_per_rank=MOST)
    given = ep_crew.inputs(7, [40, 12, 33, 61], HIDDEN, TOPK, 9)
    mine = given[me.rank]
    scales = torch.full((len(mine.x), 2), 2.0).to(torch.float8_e8m0fnu)
    x = (mine.x.to(torch.float8_e4m3fn), scales)
    *_, handle, _ = buffer.dispatch(x, mine.topk_idx, num_experts=9)
    mask = torch.tensor([1, 1, 1, 0], dtype=torch.int32)
    rows, found = buffer.dispatch(x, handle=handle, active_ranks=mask)[0]
    expected = Expected(me.rank, given, 9)
    for row, scale, (source, token) in zip(rows, found, expected.rows, strict=True):
        is_there = 3 not in (source, me.rank)
        sent = given[source].x[token].to(torch.float8_e4m3fn).float()
        assert torch.equal(row.float(), sent * is_there)
        assert (scale.view(torch.uint8) != 0).all() == is_there


def test_dtypes_that_torch_cannot_index(crews):
    crews.get("shm", SIZE).call(exponents_on_rank)


# ---- ranks that die, are late or are masked


def survivors_on_rank(
    me: harness.Rank, victim: int, where: str, num_bytes: int, form: Form, once: bool
) -> tuple[int, ...]:
    experts, counts = 9, [40, 70, 33, 61]
    buffer = ElasticBuffer(dist.group.WORLD, num_bytes, allow_multiple_reduction=not once)
    hidden = LONG if num_bytes == LITTLE else HIDDEN
    given = ep_crew.inputs(7, counts, hidden, TOPK, experts)
    mine, everybody = given[me.rank], range(SIZE)
    left = [rank for rank in everybody if rank != victim]

    def dispatch() -> Any:
        return buffer.dispatch(mine.x, mine.topk_idx, mine.weights, **form.arguments(experts))

    def dies(place: str) -> None:
        if (me.rank, where) == (victim, place):
            signal.raise_signal(signal.SIGKILL)

    before = dispatch()
    check_dispatch(before, form, Expected(me.rank, given, experts))
    me.board.set(f"ready-{me.rank}")
    me.board.wait_all("ready", everybody)
    if where in ("take", "later piece") and me.rank == victim:
        extension.load().arm_failpoint("ep-take", 1 if where == "take" else 2, False)
    dies("dispatch")
    found, active = before, tuple(everybody)
    if where in ("dispatch", "take", "later piece"):
        found = dispatch()
        # If it dies after it has given its rows, they may still count.
        there = found[3].way.route.participants
        active = tuple(rank for rank in everybody if there[rank])
        assert set(active) >= set(left)
        check_dispatch(found, form, Expected(me.rank, given, experts, active))
    dies("combine")
    answers = answers_of(given, experts, form.expand, active)
    expected = Expected(me.rank, given, experts, active)
    combined = buffer.combine(given_to_combine(answers[me.rank], found[3]), found[3])
    how = {"still_active": left, "rounds_once": once}
    check_combine(buffer, combined, answers, expected, active=active, **how)
    # A handle from before the loss works among the ranks that are left.
    again = buffer.dispatch(
        mine.x, topk_weights=mine.weights, handle=before[3], do_expand=form.expand
    )
    lost = [
        SimpleNamespace(
            x=one.x * (rank != victim),
            topk_idx=one.topk_idx,
            weights=one.weights * (rank != victim),
        )
        for rank, one in enumerate(given)
    ]
    check_dispatch(again, form, Expected(me.rank, lost, experts))
    answers = answers_of(given, experts, form.expand)
    ranks = torch.ones(SIZE, dtype=torch.int32)
    rows = given_to_combine(answers[me.rank], before[3])
    combined = buffer.combine(rows, before[3], active_ranks=ranks)
    assert ranks.tolist() == [int(rank in left) for rank in everybody]
    check_combine(buffer, combined, answers, Expected(me.rank, given, experts), **how)
    return active


@pytest.mark.parametrize(
    ("form", "once"),
    [(Form(False, True, 1, False), False), (Form(True, False, 16, False), False),
     (Form(True, True, 1, False), True)],
    ids=["compact", "expanded", "once"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("where", "num_bytes"),
    [(where, room) for where in ("dispatch", "take", "combine") for room in (AMPLE, LITTLE)]
    + [("later piece", LITTLE)],
)
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_agree(victim, where, num_bytes, form, once):
    with harness.starting(SIZE, survivors_on_rank, victim, where, num_bytes, form, once) as ranks:
        results = ranks.results(dead=[victim])
    assert len({result for rank, result in enumerate(results) if rank != victim}) == 1


def absent_on_rank(me: harness.Rank, name: str, absent: int, late: bool, once: bool) -> None:
    """A rank is masked by rank 0, or late for a call with a timeout. Then it takes part again."""
    experts, counts = 9, [40, 70, 33, 61]
    buffer = ElasticBuffer(dist.group.WORLD, AMPLE, allow_multiple_reduction=not once)
    given = ep_crew.inputs(8, counts, HIDDEN, TOPK, experts)
    mine, left = given[me.rank], [rank for rank in range(SIZE) if rank != absent]
    form = Form(once, True, 1, False)
    topk = (mine.topk_idx, mine.weights)
    mask = torch.ones(SIZE, dtype=torch.int32)
    how: dict[str, Any] = {"active_ranks": mask}
    if late:
        how["timeout_us"] = 2_000_000  # the others come within it on a busy machine, too
    elif me.rank == 0:
        mask[absent] = 0
    if late and me.rank == absent:
        me.board.wait_all(f"{name}-done", left)
    found = buffer.dispatch(mine.x, *topk, **form.arguments(experts), **how)
    handle, missing_all = found[3], (mine.topk_idx >= 0).any(dim=1)
    answers = answers_of(given, experts, form.expand, left)
    expected = Expected(me.rank, given, experts, left)
    if me.rank == absent:
        assert handle.num_recv_tokens == 0
        assert (handle.dst_buffer_slot_idx == -1).all()
        combined = buffer.combine(found[0], handle, **how)
        assert torch.equal(buffer.missing_contributions, missing_all)
        assert not combined[0].any()
    else:
        assert mask.tolist() == [int(rank in left) for rank in range(SIZE)]
        check_dispatch(found, form, expected)
        rows = given_to_combine(answers[me.rank], handle)
        combined = buffer.combine(rows, handle, **how)
        check_combine(
            buffer, combined, answers, expected, active=left, still_active=left, rounds_once=once
        )
    me.board.set(f"{name}-done-{me.rank}")
    # The handle works without the timeout, too.
    again = buffer.dispatch(mine.x, topk_weights=mine.weights, handle=handle, do_expand=form.expand)
    if me.rank != absent:
        check_dispatch(again, form, expected)
    found = buffer.dispatch(mine.x, *topk, **form.arguments(experts))
    check_dispatch(found, form, Expected(me.rank, given, experts))


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("absent", [0, 3])
@pytest.mark.parametrize("layout", ["shm", DEVICE_LAYOUT])
def test_absent_ranks(layout, absent, late, once, crews):
    if late or absent:  # rank 0 does not mask itself
        name = f"elastic-{layout}-{absent}-{late}-{once}"
        crews.get(layout, SIZE).call(absent_on_rank, name, absent, late, once)
