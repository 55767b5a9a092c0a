"""Dispatch and combine in plain torch, for readers, and for tests to compare with.

Every function gets the inputs of all ranks, as lists in rank order, and returns the result of one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .fp8 import cast_to_fp8, pack_ue8m0


def default_owners(num_experts: int, num_ranks: int) -> list[int]:
    """The rank of each expert. Ranks own consecutive experts; the first E % R ranks own one
    more."""
    share, rest = divmod(num_experts, num_ranks)
    return [rank for rank in range(num_ranks) for _ in range(share + (rank < rest))]


def local_experts(owners: Sequence[int], rank: int) -> list[int]:
    """The rank's experts, in their local order."""
    return [expert for expert, owner in enumerate(owners) if owner == rank]


class Route(NamedTuple):
    """A token's way to one of its experts, and the row there."""

    expert: int
    row: int
    source: int
    token: int
    place: int  # in top-k


def routes(
    topk_idx: Sequence[Tensor], owners: Sequence[int], active: Collection[int]
) -> Iterator[Route]:
    """The rows of an expert are in the order of (source, token, place)."""
    for expert, owner in enumerate(owners):
        sources = [rank for rank in range(len(topk_idx)) if {rank, owner} <= set(active)]
        rows = [
            (source, token, place)
            for source in sources
            for token, place in (topk_idx[source] == expert).nonzero().tolist()
        ]
        yield from (Route(expert, row, *found) for row, found in enumerate(rows))


# ---- the normal mode


def normal_rows(
    topk_idx: Sequence[Tensor], owners: Sequence[int], rank: int, active: Collection[int]
) -> list[tuple[int, int]]:
    """(source, token) of each row that the rank receives, in their order."""
    mine = torch.tensor(local_experts(owners, rank), dtype=torch.int64, device="cpu")
    return [
        (source, token)
        for source, chosen in enumerate(topk_idx)
        if {source, rank} <= set(active)
        for token in torch.isin(chosen.long(), mine).any(dim=1).nonzero().flatten().tolist()
    ]


def normal_combine(
    rank: int,
    x: Sequence[Tensor],
    topk_idx: Sequence[Tensor],
    owners: Sequence[int],
    *,
    active: Collection[int] | None = None,
    still_active: Collection[int] | None = None,
    biases: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """x: for each rank its rows, in the order of normal_rows(); active, still_active: ranks that
    took part in the dispatch, and in the combine.

    Returns the sums in the dtype of x, and the missing contributions, bool [n].
    """
    everybody = range(len(x))
    first = set(everybody if active is None else active)
    both = first & set(everybody if still_active is None else still_active)
    tokens = len(topk_idx[rank])
    total = torch.zeros(tokens, x[rank].size(1), dtype=torch.float32)
    missing = torch.zeros(tokens, dtype=torch.bool)
    for bias in biases:
        total += bias.float()
    for other in everybody:
        rows = normal_rows(topk_idx, owners, other, first if other in first else everybody)
        for place, (source, token) in enumerate(rows):
            if source != rank:
                continue
            if {rank, other} <= both:
                total[token] += x[other][place].float()
            else:
                missing[token] = True
    return total.to(x[rank].dtype), missing


# ---- ElasticBuffer, which dispatches the same rows


def expanded_rows(
    topk_idx: Sequence[Tensor],
    owners: Sequence[int],
    rank: int,
    active: Collection[int],
    alignment: int,
) -> tuple[list[list[int]], list[int]]:
    """The expanded row of each choice of each row of normal_rows(), -1 is none; and for each expert
    the row behind its last one."""
    rows = normal_rows(topk_idx, owners, rank, active)
    slots = [[-1] * topk_idx[source].size(1) for source, _ in rows]
    ends, begin = [], 0
    for expert in local_experts(owners, rank):
        end = begin
        for row, (source, token) in enumerate(rows):
            for place, chosen in enumerate(topk_idx[source][token].tolist()):
                if chosen == expert:
                    slots[row][place], end = end, end + 1
        ends.append(end)
        begin = -(-end // alignment) * alignment
    return slots, ends


def elastic_combine(
    rank: int,
    x: Sequence[Tensor],
    topk_idx: Sequence[Tensor],
    owners: Sequence[int],
    *,
    active: Collection[int] | None = None,
    still_active: Collection[int] | None = None,
    biases: Sequence[Tensor] = (),
    rounds_once: bool = False,
) -> tuple[Tensor, Tensor]:
    """x: for each rank the answers to its rows, in the order of normal_rows(): [rows, h], or
    [rows, k, h] of an expanded dispatch. rounds_once: without allow_multiple_reduction.

    Returns the sums in the dtype of x, and the missing contributions, bool [n].
    """
    everybody = range(len(x))
    first = set(everybody if active is None else active)
    both = first & set(everybody if still_active is None else still_active)
    found: dict[tuple[int, int, int], Tensor] = {}  # by expert's rank, source and token
    for other in everybody:
        rows = normal_rows(topk_idx, owners, other, first if other in first else everybody)
        found |= {(other, *way): x[other][row] for row, way in enumerate(rows)}
    total = torch.zeros(len(topk_idx[rank]), x[rank].size(-1), dtype=torch.float32)
    missing = torch.zeros(len(total), dtype=torch.bool)
    for bias in biases:
        total += bias.float()
    for token, chosen in enumerate(topk_idx[rank].tolist()):
        ranks = [owners[expert] if expert >= 0 else -1 for expert in chosen]
        for place, other in enumerate(ranks):
            if other < 0:
                continue
            if not {rank, other} <= both:
                missing[token] = True
                continue
            answer = found[other, rank, token]
            is_last = other not in ranks[place + 1 :]
            if answer.dim() == 1:
                total[token] += answer.float() * is_last
            elif rounds_once:
                total[token] += answer[place].float()
            elif is_last:
                partial = torch.zeros_like(total[token])
                for earlier in range(place + 1):
                    if ranks[earlier] == other:
                        partial += answer[earlier].float()
                total[token] += partial.to(answer.dtype).float()
    return total.to(x[rank].dtype), missing


# ---- the low latency mode


class Received(NamedTuple):
    """Rows that one expert receives. Only the used rows: the Buffer's tensors have R * T."""

    rows: Tensor  # [count, h]
    scales: Tensor  # with FP8; otherwise without columns
    src_info: list[int]
    counts: list[int]  # from each source rank


def dispatch(
    rank: int,
    x: Sequence[Tensor],
    topk_idx: Sequence[Tensor],
    owners: Sequence[int],
    *,
    use_fp8: bool = False,
    round_scale: bool = False,
    use_ue8m0: bool = False,
    active: Collection[int] | None = None,
) -> list[Received]:
    """Returns the rows of each expert of the rank. active: ranks that take part; None: all."""
    cast = [cast_to_fp8(rows, round_scale) if use_fp8 else (rows, rows[:, :0]) for rows in x]
    ways = list(routes(topk_idx, owners, range(len(x)) if active is None else active))
    received = []
    for expert in local_experts(owners, rank):
        tokens = [
            [way.token for way in ways if (way.expert, way.source) == (expert, source)]
            for source in range(len(x))
        ]
        rows = torch.cat([cast[source][0][sent] for source, sent in enumerate(tokens)])
        scales = torch.cat([cast[source][1][sent] for source, sent in enumerate(tokens)])
        scales = pack_ue8m0(scales) if use_ue8m0 else scales
        src_info = [token for sent in tokens for token in sent]
        received.append(Received(rows, scales, src_info, [len(sent) for sent in tokens]))
    return received


def combine(
    rank: int,
    x: Sequence[Tensor],
    topk_idx: Sequence[Tensor],
    topk_weights: Tensor,
    owners: Sequence[int],
    *,
    active: Collection[int] | None = None,
    still_active: Collection[int] | None = None,
    wanted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x: for each rank its experts' answers, [L, R * T, h]; topk_idx: for each rank, as in the
    dispatch; topk_weights: of this rank; active, still_active: ranks that took part in the
    dispatch, and in the combine, None: all; wanted: this rank's topk_idx in the combine, which may
    have more -1.

    Returns bfloat16 [n, h] and the missing contributions, bool [n].
    """
    everybody = range(len(x))
    first = set(everybody if active is None else active)
    both = first & set(everybody if still_active is None else still_active)
    mine = {(way.token, way.place): way for way in routes(topk_idx, owners, first)
            if way.source == rank and {rank, owners[way.expert]} <= both}  # fmt: skip
    combined = torch.zeros(len(topk_weights), x[rank].size(2), dtype=torch.bfloat16)
    missing = torch.zeros(len(topk_weights), dtype=torch.bool)
    for token, experts in enumerate((topk_idx[rank] if wanted is None else wanted).tolist()):
        total = torch.zeros(combined.size(1), dtype=torch.float32)
        for place, expert in enumerate(experts):
            way = mine.get((token, place))
            if expert >= 0 and way is not None:
                answers = x[owners[expert]][local_experts(owners, owners[expert]).index(expert)]
                # A fused multiply-add: the product is exact in float64.
                product = answers[way.row].double() * topk_weights[token, place].double()
                total = (product + total.double()).float()
            elif expert >= 0:
                missing[token] = True
        combined[token] = total.bfloat16()
    return combined, missing
