"""Buffer: what DeepEP's and Mooncake's own tests check, and what lies between two calls."""

from __future__ import annotations

import contextlib
from pathlib import Path

import ep_crew
import harness
import pytest
import torch
import torch.distributed as dist
from ep_crew import SIZE, check_combine, check_dispatch, my_answers, round_trip, same_bits
from harness import raised, until

from mooncake.ep import Buffer, reference
from mooncake.ep.on_path.deep_ep.utils import math as deep_ep_math

TOKENS, HIDDEN, TOPK, EXPERTS = 24, 512, 4, 8
OWNERS = reference.default_owners(EXPERTS, SIZE)
RANK_OFFSET = 128
calc_diff, hash_tensor = deep_ep_math.calc_diff, deep_ep_math.hash_tensor


# ---- DeepEP's test of the low latency mode, and Mooncake's


def coded_x(me):
    """The rank, and in the last block the token's number."""
    x = torch.full((TOKENS, HIDDEN), float(me.rank - RANK_OFFSET), dtype=torch.bfloat16)
    x[:, -128:] = torch.arange(TOKENS).bfloat16().view(-1, 1)
    return x


def random_routes(me, seed):
    drawn = torch.Generator().manual_seed(seed * SIZE + me.rank)
    scores = torch.randn(TOKENS, EXPERTS, generator=drawn, device="cpu").abs() + 1
    topk_idx = torch.topk(scores, TOPK, dim=-1).indices
    topk_weights = torch.randn(TOKENS, TOPK, generator=drawn, device="cpu").abs()
    for token in range(0, TOKENS, 3):
        topk_idx[token, token % TOPK] = -1
    there = torch.get_default_device()
    return topk_idx.to(there), topk_weights.to(there)


def check_rows(me, recv_x, recv_count, handle, all_topk_idx, is_coded, is_rounded):
    """recv_x: bfloat16"""
    low = 2**32 - 1
    for local in range(EXPERTS // SIZE):
        expert = me.rank * (EXPERTS // SIZE) + local
        count, layout = int(recv_count[local]), handle[1][local]
        assert count == (layout & low).sum()
        assert count == (all_topk_idx == expert).sum()
        if not is_coded:
            continue
        rows, src_info = recv_x[local, :count], handle[0][local, :count]
        values = rows[:, :-128].amin(dim=-1)
        assert torch.equal(values, rows[:, :-128].amax(dim=-1))
        if is_rounded:
            assert calc_diff(rows[:, -1], src_info) < 0.007
        else:
            assert torch.equal(rows[:, -128:], src_info.view(-1, 1).expand(-1, 128).bfloat16())
        for source in range(SIZE):
            begin, number = int(layout[source] >> 32), int(layout[source] & low)
            assert number == (all_topk_idx[source] == expert).sum()
            if not is_rounded:
                assert (values == source - RANK_OFFSET).sum() == number
                assert (values[begin : begin + number] == source - RANK_OFFSET).all()


def dispatched(call, **how):
    """Of either Buffer, waited for as it was asked for."""
    recv_x, recv_count, handle, event, hook = call(**how)
    wait(event, hook, **how)
    return recv_x, recv_count, handle


def wait(event, hook, *, async_finish=False, return_recv_hook=False):
    assert (hook is not None) == return_recv_hook
    assert (event.event is not None) == async_finish
    hook() if return_recv_hook else event.current_stream_wait()


def low_latency_on_rank(me, cast, use_logfmt):
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS, explicitly_destroy=True)
    digests = [low_latency_once(me, buffer, cast, use_logfmt) for _ in range(3)]
    assert len(set(digests)) == 1
    buffer.destroy()
    return digests[0]


def low_latency_once(me, buffer, cast, use_logfmt):
    topk_idx, topk_weights = random_routes(me, 1)
    all_topk_idx = torch.empty(SIZE, TOKENS, TOPK, dtype=torch.int64)
    dist.all_gather_into_tensor(all_topk_idx, topk_idx)
    sums = topk_weights.masked_fill(topk_idx == -1, 0).sum(dim=1, keepdim=True)
    drawn = torch.Generator().manual_seed(me.rank)
    noise = torch.randn(TOKENS, HIDDEN, generator=drawn, device="cpu").bfloat16() * 0.1
    is_rounded = cast.get("round_scale", False)
    digest = 0
    for x in (coded_x(me), noise.to(torch.get_default_device())):
        for hooked in (False, True):
            how = {"async_finish": not hooked, "return_recv_hook": hooked}
            stats = torch.zeros(EXPERTS // SIZE, dtype=torch.int32)
            recv_x, recv_count, handle = dispatched(
                lambda x=x, stats=stats, **how: buffer.low_latency_dispatch(
                    x, topk_idx, TOKENS, EXPERTS, cumulative_local_expert_recv_stats=stats,
                    **cast, **how,
                ),
                **how,
            )  # fmt: skip
            assert torch.equal(stats, recv_count)
            if cast["use_fp8"]:
                values, scales = recv_x
                rows = deep_ep_math.per_token_cast_back(
                    values.view(-1, HIDDEN), scales.contiguous().view(-1, scales.size(2))
                ).view(values.shape)
            else:
                rows = recv_x.clone()
            is_coded = x is not None and bool((x[:, 0] == me.rank - RANK_OFFSET).all())
            check_rows(me, rows, recv_count, handle, all_topk_idx, is_coded, is_rounded)
            for zero_copy in (False,) if use_logfmt else (False, True):
                if zero_copy:
                    buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
                out = torch.full((TOKENS, HIDDEN), float("nan"), dtype=torch.bfloat16)
                combined_x, event, hook = buffer.low_latency_combine(
                    rows, topk_idx, topk_weights, handle, use_logfmt=use_logfmt,
                    zero_copy=zero_copy, out=out, **how,
                )  # fmt: skip
                wait(event, hook, **how)
                assert combined_x.data_ptr() == out.data_ptr()
                assert not combined_x.isnan().any()
                assert not buffer.missing_contributions.any()
                if not is_rounded:
                    diff = calc_diff(x * sums, combined_x)
                    assert diff < (9e-4 if cast["use_fp8"] or use_logfmt else 1e-5)
                digest ^= hash_tensor(combined_x)
    return digest


@pytest.mark.parametrize("use_logfmt", [False, True])
@pytest.mark.parametrize(
    "cast",
    [
        {"use_fp8": False},
        {"use_fp8": True},
        {"use_fp8": True, "round_scale": True},
        {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
    ],
    ids=lambda cast: "-".join(cast),
)
def test_what_deepep_checks(ep, cast, use_logfmt):
    ep.call(low_latency_on_rank, cast, use_logfmt)


def mooncake_on_rank(me, use_fp8, fallback):
    buffer = ep_crew.mooncake_buffer(TOKENS, HIDDEN, EXPERTS)
    buffer._use_fallback = fallback
    x = coded_x(me)
    topk_idx, topk_weights = random_routes(me, 2)
    all_topk_idx = torch.empty(SIZE, TOKENS, TOPK, dtype=torch.int64)
    dist.all_gather_into_tensor(all_topk_idx, topk_idx)
    sums = topk_weights.masked_fill(topk_idx == -1, 0).sum(dim=1, keepdim=True)
    active_ranks = torch.ones(TOKENS, dtype=torch.int32)
    active_ranks[SIZE:] = 7
    for hooked in (False, True):
        how = {"async_finish": not hooked, "return_recv_hook": hooked}
        recv_x, recv_count, handle, event, hook = buffer.dispatch(
            x, topk_idx, active_ranks, TOKENS, EXPERTS, -1, use_fp8=use_fp8, **how
        )
        hook() if hooked else event.current_stream_wait()
        assert callable(hook) == (hooked or fallback)
        if use_fp8:
            values, scales = recv_x[0], recv_x[1].contiguous()
            rows = deep_ep_math.per_token_cast_back(
                values.view(-1, HIDDEN), scales.view(-1, HIDDEN // 128)
            ).view(values.shape)
        else:
            rows = recv_x.clone()
        check_rows(me, rows, recv_count, handle, all_topk_idx, True, False)
        for zero_copy in (False, True):
            if zero_copy:
                buffer.get_next_combine_buffer(handle)[:, :, :] = rows
            out = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
            combined_x, event, hook = buffer.combine(
                rows, topk_idx, topk_weights, active_ranks, -1, handle, zero_copy=zero_copy,
                out=out, **how,
            )  # fmt: skip
            hook() if hooked else event.current_stream_wait()
            assert not combined_x.isnan().any()
            assert calc_diff(x * sums, combined_x) < 1e-5
            torch.testing.assert_close(combined_x, (x * sums).bfloat16(), rtol=0.15, atol=5e-3)
    assert active_ranks.tolist() == [1] * SIZE + [7] * (TOKENS - SIZE)
    assert not buffer.missing_contributions.any()


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("use_fp8", [False, True])
def test_what_mooncake_checks(ep, use_fp8, fallback):
    ep.call(mooncake_on_rank, use_fp8, fallback)


# ---- several at a time


def two_handles_on_rank(me):
    """Micro-batches: the second dispatch is called before the first combine."""
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    batches = [ep_crew.inputs(seed, [5, 0, 24, 1], HIDDEN, TOPK, EXPERTS) for seed in (1, 2)]
    for asynchronous in (False, True):
        found = [
            buffer.low_latency_dispatch(
                batch[me.rank].x, batch[me.rank].topk_idx, TOKENS, EXPERTS, use_fp8=False,
                return_recv_hook=asynchronous,
            )
            for batch in batches
        ]  # fmt: skip
        for one in found if asynchronous else []:
            one[4]()
        rows = [
            check_dispatch(me, one, batch, TOKENS, EXPERTS, use_fp8=False)
            for one, batch in zip(found, batches, strict=True)
        ]
        combined = [
            buffer.low_latency_combine(
                my_answers(me, of_batch, OWNERS), batch[me.rank].topk_idx, batch[me.rank].weights,
                one[2], async_finish=asynchronous,
            )
            for of_batch, batch, one in zip(rows, batches, found, strict=True)
        ]  # fmt: skip
        for (result, event, _), batch in zip(combined, batches, strict=True):
            with event:
                pass
            check_combine(me, result, event.missing_contributions, batch, TOKENS, EXPERTS)
    buffer.destroy()


def test_two_handles_at_a_time(ep):
    ep.call(two_handles_on_rank)


def copied_handles_on_rank(me):
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    inputs = ep_crew.inputs(1, [5, 0, 24, 1], HIDDEN, TOPK, EXPERTS)
    mine = inputs[me.rank]
    call = (mine.x, mine.topk_idx, TOKENS, EXPERTS)
    found = buffer.low_latency_dispatch(*call, use_fp8=False)
    rows = check_dispatch(me, found, inputs, TOKENS, EXPERTS)
    answers = my_answers(me, rows, OWNERS)

    def use(handle):
        assert len(handle) == 5
        assert buffer.get_next_low_latency_combine_buffer(handle).shape == rows.shape
        combined, event, _ = buffer.low_latency_combine(
            answers, mine.topk_idx, mine.weights, handle
        )
        check_combine(me, combined, event.missing_contributions, inputs, TOKENS, EXPERTS)
        return (combined,)

    ep_crew.check_copied_handles(
        lambda: buffer.low_latency_dispatch(*call, use_fp8=False)[2], use, [0, 1]
    )
    buffer.destroy()


def test_copies_of_handles(ep):
    ep.call(copied_handles_on_rank)


def two_buffers_on_rank(me):
    first = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    second = ep_crew.deepep_buffer(8, 640, 5)
    inputs = ep_crew.inputs(1, [5, 0, 24, 1], HIDDEN, TOPK, EXPERTS)
    others = ep_crew.inputs(2, [5, 0, 8, 1], 640, 2, 5)
    for _ in range(2):
        mine, other = inputs[me.rank], others[me.rank]
        of_first = first.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False)
        of_second = second.low_latency_dispatch(other.x, other.topk_idx, 8, 5, use_fp8=False)
        rows = check_dispatch(me, of_first, inputs, TOKENS, EXPERTS)
        check_dispatch(me, of_second, others, 8, 5)
        combined, event, _ = first.low_latency_combine(
            my_answers(me, rows, OWNERS), mine.topk_idx, mine.weights, of_first[2]
        )
        check_combine(me, combined, event.missing_contributions, inputs, TOKENS, EXPERTS)
        round_trip(me, second, others, 8, 5)
        # The group's own operations go on beside it.
        total = torch.ones(3)
        dist.all_reduce(total)
        assert (total == SIZE).all()
    first.destroy()
    round_trip(me, second, others, 8, 5)
    second.destroy()
    assert raised(round_trip, me, second, others, 8, 5)[0] == "RuntimeError"


def test_two_buffers_of_a_group(ep):
    ep.call(two_buffers_on_rank)


# ---- groups


def foreign_on_rank(me, kind):
    inputs = ep_crew.inputs(1, [3] * SIZE, 256, 2, 6)
    if kind == "gloo":
        group = dist.new_group(backend="gloo")
        buffer = ep_crew.deepep_buffer(3, 256, 6, group)
        assert buffer.group is group
    elif kind == "backend":
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        buffer = ep_crew.deepep_buffer(3, 256, 6, backend)
    else:
        size = ep_crew.Buffer.get_low_latency_rdma_size_hint(3, 256, SIZE, 6)
        buffer = ep_crew.Buffer(
            None, num_rdma_bytes=size, low_latency_mode=True, comm=Communicator(dist.group.WORLD)
        )
    assert (buffer.rank, buffer.group_size) == (me.rank, SIZE)
    for _ in range(2):
        round_trip(me, buffer, inputs, 3, 6)
    buffer.destroy()
    if kind == "gloo":
        dist.destroy_process_group(group)


class Communicator:
    """What is used of mpi4py's."""

    def __init__(self, group):
        self.group = group

    def Get_rank(self):  # noqa: N802
        return self.group.rank()

    def Get_size(self):  # noqa: N802
        return self.group.size()

    def allgather(self, mine):
        of_all = [None] * self.group.size()
        dist.all_gather_object(of_all, mine, group=self.group)
        return of_all


@pytest.mark.parametrize("kind", ["gloo", "backend", "comm"])
def test_groups_of_others(ep, kind):
    ep.call(foreign_on_rank, kind)


def subgroup_on_rank(me):
    members = [3, 1, 2]
    group = dist.new_group(members)
    if me.rank in members:
        buffer = ep_crew.deepep_buffer(3, 256, 7, group)
        me.rank = group.rank()
        inputs = ep_crew.inputs(1, [3, 0, 1], 256, 2, 7)
        for _ in range(2):
            round_trip(me, buffer, inputs, 3, 7)
        buffer.destroy()
        me.rank = dist.get_rank()
        dist.destroy_process_group(group)


def test_a_part_of_the_ranks(ep):
    ep.call(subgroup_on_rank)


def own_job_on_rank(me):
    """A group of ours beside a default group of another backend: its job has other ranks."""
    members = [3, 1]
    group = dist.new_group(members, backend="mooncake")
    if me.rank in members:
        buffer = ep_crew.deepep_buffer(3, 256, 5, group)
        me.rank = group.rank()
        inputs = ep_crew.inputs(1, [3, 2], 256, 2, 5)
        for _ in range(2):
            round_trip(me, buffer, inputs, 3, 5)
        buffer.destroy()
    dist.barrier()


def test_a_group_of_ours_beside_another_backend():
    harness.run_ranks(SIZE, own_job_on_rank, backend="gloo")


# ---- masks


def masks_on_rank(me, face):
    """Rank 2 is masked, by one rank; all leave it out, and it is told so."""
    inputs = ep_crew.inputs(3, [4, 2, 3, 4], 256, 3, EXPERTS)
    mine = inputs[me.rank]
    active = [0, 1, 3]
    status = torch.full((SIZE,), 9, dtype=torch.int32)
    if face == "deepep":
        buffer = ep_crew.deepep_buffer(4, 256, EXPERTS)
        if me.rank == 1:
            buffer.low_latency_update_mask_buffer(2, True)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0, 0, int(me.rank == 1), 0]
        found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, 4, EXPERTS, use_fp8=False)
    else:
        buffer = ep_crew.mooncake_buffer(4, 256, EXPERTS)
        ranks = torch.tensor([1, 1, int(me.rank != 1), 1, 1, 0], dtype=torch.int32)
        found = buffer.dispatch(mine.x, mine.topk_idx, ranks, 4, EXPERTS, -1, use_fp8=False)
        assert ranks.tolist() == [1, 1, 0, 1, 1, 0]
    rows = check_dispatch(me, found, inputs, 4, EXPERTS, active=active)
    given = (my_answers(me, rows, OWNERS), mine.topk_idx, mine.weights)
    if face == "deepep":
        combined, event, _ = buffer.low_latency_combine(*given, found[2])
    else:
        combined, event, _ = buffer.combine(*given, ranks, -1, found[2])
    check_combine(me, combined, event.missing_contributions, inputs, 4, EXPERTS, active=active)
    assert torch.equal(buffer.missing_contributions, event.missing_contributions)
    if face == "deepep":
        if me.rank == 1:
            buffer.low_latency_update_mask_buffer(2, False)
            buffer.low_latency_update_mask_buffer(3, True)
            buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0] * SIZE
        round_trip(me, buffer, inputs, 4, EXPERTS)
        buffer.destroy()


@pytest.mark.parametrize("face", ["deepep", "mooncake"])
def test_a_masked_rank_is_left_out(ep, face):
    ep.call(masks_on_rank, face)


def masked_between_on_rank(me):
    """Masked between dispatch and combine: what it was sent does not come back."""
    inputs = ep_crew.inputs(4, [4, 2, 3, 4], 256, 3, EXPERTS)
    mine = inputs[me.rank]
    buffer = ep_crew.deepep_buffer(4, 256, EXPERTS)
    found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, 4, EXPERTS, use_fp8=False)
    rows = check_dispatch(me, found, inputs, 4, EXPERTS)
    ranks = torch.tensor([1, int(me.rank != 3), 1, 1], dtype=torch.int32)
    combined, event, _ = buffer.low_latency_combine(
        my_answers(me, rows, OWNERS), mine.topk_idx, mine.weights, found[2], active_ranks=ranks
    )
    assert ranks.tolist() == [1, 0, 1, 1]
    check_combine(
        me, combined, event.missing_contributions, inputs, 4, EXPERTS, still_active=[0, 2, 3]
    )
    round_trip(me, buffer, inputs, 4, EXPERTS)
    buffer.destroy()


def test_a_rank_masked_between_dispatch_and_combine(ep):
    ep.call(masked_between_on_rank)


# ---- owners, statistics, memory


def owners_on_rank(me):
    owners = [3, 0, 0, 1, 3, 0]
    inputs = ep_crew.inputs(5, [4, 2, 3, 4], 256, 3, len(owners))
    mine = inputs[me.rank]
    # An expert more than the even share needs more room.
    size = 2 * ep_crew.Buffer.get_low_latency_rdma_size_hint(4, 256, SIZE, 3 * SIZE)
    buffer = ep_crew.Buffer(dist.group.WORLD, num_rdma_bytes=size, low_latency_mode=True)
    buffer.runtime.set_expert_owners(owners)
    found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, 4, len(owners), use_fp8=False)
    rows = check_dispatch(me, found, inputs, 4, len(owners), owners=owners)
    combined, event, _ = buffer.low_latency_combine(
        my_answers(me, rows, owners), mine.topk_idx, mine.weights, found[2]
    )
    check_combine(me, combined, event.missing_contributions, inputs, 4, len(owners), owners=owners)
    buffer.destroy()


def test_owners_of_experts(ep):
    ep.call(owners_on_rank)


def statistics_on_rank(me):
    inputs = ep_crew.inputs(6, [4, 2, 3, 4], 256, 3, EXPERTS)
    mine = inputs[me.rank]
    buffer = ep_crew.deepep_buffer(4, 256, EXPERTS)
    received = torch.tensor([10, 20], dtype=torch.int32)
    waited = torch.full((SIZE,), 5, dtype=torch.int64)
    expected = received.clone()
    for _ in range(3):
        found = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, 4, EXPERTS, received, waited, use_fp8=False
        )
        rows = check_dispatch(me, found, inputs, 4, EXPERTS)
        buffer.low_latency_combine(
            rows, mine.topk_idx, mine.weights, found[2], combine_wait_recv_cost_stats=waited
        )
        expected += found[1]
        assert torch.equal(received, expected)
        assert (waited >= 5).all()
    buffer.destroy()


def test_statistics_are_added(ep):
    ep.call(statistics_on_rank)


def memory_on_rank(me):
    """As vLLM does after a fault: the memory may be zeroed between operations."""
    inputs = ep_crew.inputs(7, [4, 2, 3, 4], 256, 3, EXPERTS)
    buffer = ep_crew.deepep_buffer(4, 256, EXPERTS)
    for filling in (0, 0x55):
        round_trip(me, buffer, inputs, 4, EXPERTS)
        memory = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
        assert memory.numel() == buffer.num_rdma_bytes
        dist.barrier()
        memory.fill_(filling)
        dist.barrier()
        buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(4, 256, EXPERTS)
        round_trip(me, buffer, inputs, 4, EXPERTS)
    words = buffer.get_local_buffer_tensor(torch.int32, (3, 5), offset=128, use_rdma_buffer=True)
    assert words.shape == (3, 5)
    assert words.data_ptr() == memory.data_ptr() + 128
    much = [buffer.num_rdma_bytes]
    kind, text = raised(buffer.get_local_buffer_tensor, torch.int16, much, use_rdma_buffer=True)
    assert kind == "ValueError"
    assert str(much[0]) in text
    kind, text = raised(buffer.get_local_buffer_tensor, torch.int8)
    assert (kind, "num_nvl_bytes" in text) == ("RuntimeError", True)
    normal = Buffer(dist.group.WORLD, num_nvl_bytes=1280)
    assert normal.get_local_buffer_tensor(torch.int8).numel() == 1280
    buffer.destroy()


def test_the_memory_itself(ep):
    ep.call(memory_on_rank)


def renormalized_on_rank(me):
    """The mask takes two experts of eight; the weights of the others are scaled up."""
    inputs = ep_crew.inputs(8, [4, 2, 3, 4], 256, 4, EXPERTS)
    mine = inputs[me.rank]
    buffer = ep_crew.deepep_buffer(4, 256, EXPERTS, renormalize=True)
    ranks = torch.tensor([1, 0, 1, 1], dtype=torch.int32)
    found = buffer.low_latency_dispatch(
        mine.x, mine.topk_idx, 4, EXPERTS, use_fp8=False, active_ranks=ranks
    )
    rows = found[0].clone()
    combined, event, _ = buffer.low_latency_combine(
        rows, mine.topk_idx, mine.weights, found[2], active_ranks=ranks
    )
    if me.rank != 1:
        lost = (mine.topk_idx == 2) | (mine.topk_idx == 3)
        named = mine.topk_idx >= 0
        has_others = (named & ~lost).any(dim=1, keepdim=True)
        sums = (mine.weights * named).sum(dim=1, keepdim=True) * has_others
        torch.testing.assert_close(combined.float(), mine.x.float() * sums, rtol=1e-2, atol=1e-2)
        assert event.missing_contributions.tolist() == (lost & named).any(dim=1).tolist()
        assert event.missing_contributions.any()
    buffer.destroy()


def test_renormalized_weights(ep):
    ep.call(renormalized_on_rank)


def test_same_bits_finds_a_wrong_bit():
    with pytest.raises(AssertionError, match="1 of 16 bytes differ"):
        same_bits(torch.zeros(4), torch.tensor([0, 0, -0.0, 0]))


# ---- what is let go of


def dropped_on_rank(me, waits):
    """A Buffer and all that it returned are let go of while its thread still has the tensors of
    the last call in its hands, or still runs it."""
    inputs = ep_crew.inputs(10, [4, 2, 3, 4], 256, 3, EXPERTS)
    mine = inputs[me.rank]
    for _ in range(20):
        drop(ep_crew.deepep_buffer(4, 256, EXPERTS), mine, waits)
    until(lambda: "mooncake-ep" not in threads(), "the threads of the buffers to end")
    buffer = ep_crew.deepep_buffer(4, 256, EXPERTS)
    round_trip(me, buffer, inputs, 4, EXPERTS)
    buffer.destroy()


def threads():
    """Names of those that this process has."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ends meanwhile
            names.append((task / "comm").read_text().strip())
    return names


def drop(buffer, mine, waits):
    found = buffer.low_latency_dispatch(
        mine.x.clone(), mine.topk_idx.clone(), 4, EXPERTS, use_fp8=False, async_finish=True
    )
    found[3].current_stream_wait()
    event = buffer.low_latency_combine(
        found[0], mine.topk_idx.clone(), mine.weights.clone(), found[2], async_finish=True
    )[1]
    if waits:
        event.current_stream_wait()


@pytest.mark.parametrize("waits", [True, False])
def test_everything_is_let_go_of(ep, waits):
    ep.call(dropped_on_rank, waits)


def deepep_bytes(tokens, hidden, experts):
    """What DeepEP needs for the same: two areas to send, to receive and to signal, where every
    expert has a place for every token of a rank."""
    row_there = 16 + max(2 * hidden, hidden + 4 * hidden // 128)
    row_back = 2 * hidden + 4 * hidden // 128
    send = max(tokens * row_there, experts * tokens * row_back)
    receive = experts * tokens * max(row_there, row_back)
    signals = -(-4 * experts // 128) * 128
    return 2 * (send + receive + signals)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_needs_no_more_memory_than_deepep(ranks):
    needed = ep_crew.Buffer.get_low_latency_rdma_size_hint(128, 7168, ranks, 256)
    assert needed <= deepep_bytes(128, 7168, 256)
