"""Functions of ranks that dispatch and combine, and that compare the results with the reference."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import harness
import hosts
import pytest
import torch
import torch.distributed as dist

from mooncake.ep import Buffer, fp8, reference
from mooncake.mooncake_ep_buffer import Buffer as MooncakeBuffer

SIZE = 4


@contextlib.contextmanager
def over_hosts(ranks_of_hosts: Sequence[int]) -> Iterator[harness.Crew]:
    """A crew over so many hosts, with so many ranks on each."""
    if why := hosts.why_not():
        pytest.skip(why)
    with hosts.Hosts(len(ranks_of_hosts)) as made:
        where = made.places(ranks_of_hosts)
        with harness.Crew(len(where), namespaces=where) as ranks:
            yield ranks


class EpCrew:
    """A crew that is made at a test's first call."""

    def __init__(self, layout: str, crew: Callable[[], harness.Crew]) -> None:
        self.layout = layout
        self.crew = crew

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.crew().call(function, *args)


def deepep_buffer(tokens: int, hidden: int, experts: int, group: Any = None, **more: Any) -> Buffer:
    group = group or dist.group.WORLD
    size = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, group.size(), experts)
    return Buffer(group, num_rdma_bytes=size, low_latency_mode=True, **more)


def mooncake_buffer(tokens: int, hidden: int, experts: int, **more: Any) -> MooncakeBuffer:
    size = MooncakeBuffer.get_ep_buffer_size_hint(tokens, hidden, SIZE, experts)
    return MooncakeBuffer(dist.group.WORLD, size, **more)


def inputs(
    seed: int, counts: Sequence[int], hidden: int, topk: int, experts: int, duplicates: bool = False
) -> list[SimpleNamespace]:
    """For every rank x, topk_idx and weights, the same wherever it is called. A tenth of the
    choices are -1. On the default device."""
    drawn = torch.Generator().manual_seed(seed)
    of_all, there = [], torch.get_default_device()
    with torch.device("cpu"):
        for count in counts:
            x = torch.randn(count, hidden, generator=drawn).bfloat16()
            if duplicates or topk > experts:
                idx = torch.randint(0, experts, (count, topk), generator=drawn)
            else:
                idx = torch.rand(count, experts, generator=drawn).topk(topk, dim=1).indices
            idx[torch.rand(count, topk, generator=drawn) < 0.1] = -1
            weights = torch.rand(count, topk, generator=drawn) + 0.1
            of_all.append(SimpleNamespace(x=x, topk_idx=idx, weights=weights))
    return [moved(one, there) for one in of_all]


def cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Something of FP8's form; the scales stand column by column, as programs give them."""
    scales = torch.rand(3, len(x), generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    return x.to(torch.float8_e4m3fn), scales.t().to(x.device)


def moved(given: SimpleNamespace, device: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: one.to(device) for name, one in vars(given).items()})


def on_cpu(given: Sequence[SimpleNamespace]) -> list[SimpleNamespace]:
    return [moved(one, "cpu") for one in given]


def are_at_home(*tensors: torch.Tensor) -> bool:
    """Results are on the device that the inputs are on."""
    return all(tensor.device == torch.get_default_device() for tensor in tensors)


def check_dispatch(
    me: harness.Rank,
    found: tuple[Any, ...],
    given: Sequence[SimpleNamespace],
    tokens: int,
    experts: int,
    *,
    active: Sequence[int] | None = None,
    owners: Sequence[int] | None = None,
    **cast: bool,
) -> torch.Tensor:
    """Compares with the reference bit by bit. Returns recv_x as bfloat16; unused rows are 0."""
    received, recv_count, handle, _, _ = found
    size, hidden = len(given), given[0].x.size(1)
    owners = owners or reference.default_owners(experts, size)
    there, given = torch.get_default_device(), on_cpu(given)
    with torch.device("cpu"):
        expected = reference.dispatch(
            me.rank, [one.x for one in given], [one.topk_idx for one in given], owners,
            active=active, **cast,
        )  # fmt: skip
    recv_x, scales = received if isinstance(received, tuple) else (received, None)
    assert (scales is not None) == cast.get("use_fp8", False)
    shape = (len(expected), size * tokens, hidden)
    assert tuple(recv_x.shape) == shape
    assert recv_x.is_contiguous()
    assert recv_x.dtype == (torch.bfloat16 if scales is None else torch.float8_e4m3fn)
    if scales is not None:
        packed = cast.get("use_ue8m0", False)
        assert scales.dtype == (torch.int32 if packed else torch.float32)
        assert tuple(scales.shape) == (*shape[:2], -(-hidden // (512 if packed else 128)))
        assert scales.stride(1) == 1 or scales.numel() == 0
    src_info, layout_range, *numbers = handle
    assert numbers == [tokens, hidden, experts]
    assert (src_info.dtype, tuple(src_info.shape)) == (torch.int32, shape[:2])
    assert (layout_range.dtype, tuple(layout_range.shape)) == (torch.int64, (shape[0], size))
    assert (recv_count.dtype, recv_count.shape) == (torch.int32, shape[:1])
    assert are_at_home(recv_x, recv_count, src_info, layout_range)
    recv_x, recv_count = recv_x.cpu(), recv_count.cpu()
    src_info, layout_range = src_info.cpu(), layout_range.cpu()
    if scales is not None:
        assert are_at_home(scales)
        scales = scales.cpu()

    rows = torch.zeros(shape, dtype=torch.bfloat16, device="cpu")
    for local, one in enumerate(expected):
        count = int(recv_count[local])
        assert count == len(one.rows)
        assert src_info[local, :count].tolist() == one.src_info
        counts = [int(entry) & 0xFFFFFFFF for entry in layout_range[local]]
        begins = [int(entry) >> 32 for entry in layout_range[local]]
        assert counts == one.counts
        for source, begin in enumerate(begins):
            assert counts[source] == 0 or begin == sum(counts[:source])
        same_bits(recv_x[local, :count], one.rows)
        if scales is not None:
            same_bits(scales[local, :count], one.scales)
            rows[local, :count] = fp8.cast_back(one.rows, one.scales)
        else:
            rows[local, :count] = one.rows
    return rows.to(there)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    a, b = (
        one.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for one in (found, expected)
    )
    assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} bytes differ"


def answers(rows: torch.Tensor, expert: int) -> torch.Tensor:
    """The answer of an expert to its rows; it differs by expert."""
    return (rows.float() * (1 + expert / 8) + expert / 4).bfloat16()


def all_answers(
    given: Sequence[SimpleNamespace],
    tokens: int,
    experts: int,
    *,
    active: Sequence[int] | None = None,
    owners: Sequence[int] | None = None,
    **cast: bool,
) -> list[torch.Tensor]:
    """The answers of every rank's experts, [L, R * T, h] in rank order, from the reference alone.
    On the CPU."""
    size, hidden = len(given), given[0].x.size(1)
    owners = owners or reference.default_owners(experts, size)
    of_all, given = [], on_cpu(given)
    with torch.device("cpu"):
        for rank in range(size):
            mine = reference.local_experts(owners, rank)
            rows = torch.zeros(len(mine), size * tokens, hidden, dtype=torch.bfloat16)
            for local, one in enumerate(
                reference.dispatch(
                    rank, [one.x for one in given], [one.topk_idx for one in given], owners,
                    active=active, **cast,
                )
            ):  # fmt: skip
                back = fp8.cast_back(one.rows, one.scales) if one.scales.size(1) else one.rows
                rows[local, : len(back)] = answers(back, mine[local])
            of_all.append(rows)
    return of_all


def my_answers(me: harness.Rank, rows: torch.Tensor, owners: Sequence[int]) -> torch.Tensor:
    mine = reference.local_experts(owners, me.rank)
    parts = [answers(rows[local], expert) for local, expert in enumerate(mine)]
    return torch.stack(parts) if parts else rows


def check_combine(
    me: harness.Rank,
    combined: torch.Tensor,
    missing: torch.Tensor,
    given: Sequence[SimpleNamespace],
    tokens: int,
    experts: int,
    *,
    active: Sequence[int] | None = None,
    still_active: Sequence[int] | None = None,
    owners: Sequence[int] | None = None,
    wanted: torch.Tensor | None = None,
    **cast: bool,
) -> None:
    owners = owners or reference.default_owners(experts, len(given))
    assert are_at_home(combined, missing)
    given = on_cpu(given)
    with torch.device("cpu"):
        expected, lacks = reference.combine(
            me.rank,
            all_answers(given, tokens, experts, active=active, owners=owners, **cast),
            [one.topk_idx for one in given],
            given[me.rank].weights,
            owners,
            active=active,
            still_active=still_active,
            wanted=None if wanted is None else wanted.cpu(),
        )
    assert missing.dtype == torch.bool
    assert missing.tolist() == lacks.tolist()
    same_bits(combined, expected)


# By rank: the rank that it masks, or None.
Masks = Sequence[int | None]


def unmasked(masks: Masks) -> list[int]:
    """The ranks that take part: no rank masks them."""
    return [rank for rank in range(len(masks)) if rank not in masks]


def round_trip(
    me: harness.Rank,
    buffer: Buffer,
    given: Sequence[SimpleNamespace],
    tokens: int,
    experts: int,
    *,
    masks: tuple[Masks, Masks] | None = None,
    drops: int | None = None,
    zero_copy: bool = False,
    **cast: bool,
) -> torch.Tensor:
    """Runs one dispatch and one combine and checks both, so the buffer is in order. masks: in the
    dispatch, and in the combine; drops: the place in top-k that the combine leaves out"""
    mine, size = given[me.rank], len(given)
    cast = {"use_fp8": False, **cast}
    in_dispatch, in_combine = masks or ([None] * size, [None] * size)
    active = unmasked(in_dispatch)
    still = [rank for rank in unmasked(in_combine) if rank in active]
    ranks = [torch.tensor([int(rank != whom[me.rank]) for rank in range(size)]).int()
             for whom in (in_dispatch, in_combine)]  # fmt: skip
    found = buffer.low_latency_dispatch(
        mine.x, mine.topk_idx, tokens, experts, active_ranks=ranks[0], **cast
    )
    assert ranks[0].tolist() == [int(rank in active) for rank in range(size)]
    rows = check_dispatch(me, found, given, tokens, experts, active=active, **cast)
    owners = reference.default_owners(experts, size)
    answered = my_answers(me, rows, owners)
    if zero_copy:
        buffer.get_next_low_latency_combine_buffer(found[2]).copy_(answered)
    wanted = mine.topk_idx
    if drops is not None:
        wanted = wanted.clone()
        wanted[:, drops % wanted.size(1)] = -1
    combined, event, hook = buffer.low_latency_combine(
        answered, wanted, mine.weights, found[2], zero_copy=zero_copy, active_ranks=ranks[1]
    )
    assert ranks[1].tolist() == [int(rank in still) for rank in range(size)]
    assert hook is None
    assert event.event is None
    check_combine(
        me, combined, buffer.missing_contributions, given, tokens, experts, active=active,
        still_active=still, wanted=wanted, **cast,
    )  # fmt: skip
    return combined


def check_copied_handles(
    dispatch: Callable[[], Any],
    use: Callable[[Any], Sequence[torch.Tensor]],
    tensors: Sequence[int],
) -> None:
    """Programs pack DeepEP's handle, a plain tuple, into others, and unpack it.

    dispatch: returns a handle; use: returns the results of calls with it, the same for each
    tensors: places of the entries that live as long as the handle or a copy
    """
    expected = use(dispatch())
    for copied in (copy.copy, copy.deepcopy, tuple, list):
        found = use(copied(dispatch()))
        assert all(map(torch.equal, found, expected))
    handle = dispatch()
    lasting = [weakref.ref(one) for one in (handle.way, *(handle[place] for place in tensors))]
    copies = [copy.copy(handle), tuple(handle)]
    del handle
    gc.collect()
    assert all(one() is not None for one in lasting)
    copies.clear()
    gc.collect()
    assert [one() for one in lasting] == [None] * len(lasting)
