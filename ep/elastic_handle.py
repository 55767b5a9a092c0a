"""EPHandle: the handle that ElasticBuffer.dispatch() returns and combine() takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .expansion import Expansion
from .normal_handle import Arrived

if TYPE_CHECKING:
    from mooncake_backend._C import EpRoute

Tensor = torch.Tensor


@dataclass(frozen=True)
class Returning:
    """Sizes of a dispatch that brings expanded rows back, one for each choice of an expert. The
    same on all ranks."""

    most_rows: int  # that come back to one rank
    most_sent: int  # expanded rows of one rank


@dataclass(frozen=True)
class Way:
    """The parts of a handle that are not DeepEP's. Kept apart, because programs change DeepEP's."""

    route: EpRoute
    local: Tensor  # [rows, k]: numbers of the rank's experts, -1 is none; with `route.ends`
    expansion: Expansion | None
    tokens: Tensor  # int64 [rows]: index of the token at its rank
    returning: Returning | None  # None: the ranks do not all know it
    there: Tensor  # see Arrived


@dataclass
class EPHandle:
    """DeepEP's attributes. T is num_max_tokens_per_rank, R the number of ranks, L the number of
    experts of this rank. Rows are the received tokens. Without do_cpu_sync there are R * T rows;
    rows behind the received ones have undefined contents."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor  # [n, k], as given
    num_recv_tokens: int  # rows
    num_expanded_tokens: int  # rows of the expanded form, 0 without do_expand
    num_recv_tokens_per_expert_list: list[int]  # aligned; empty without do_cpu_sync
    # int32 [R]: number of rows from the ranks 0 to r
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    # int32 [L]: inclusive sums of aligned counts. With do_expand: the row behind the expert's last
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor  # int32 [L]
    # int32 [rows, k + 2]: source rank * T + token | source rank * k + the last place in top-k
    # that names an expert of this rank | with do_expand, the row of each choice, -1 is none
    recv_src_metadata: Tensor
    # int32 [n, k]: the token's row at the rank of a choice, in the last choice there; else -1
    dst_buffer_slot_idx: Tensor
    token_metadata_at_forward: None = None  # DeepEP's hybrid mode uses it
    channel_linked_list: None = None
    way: Way = field(kw_only=True, repr=False)


def metadata_of(arrived: Arrived, way: Way, most_tokens: int, count: int) -> Tensor:
    """EPHandle.recv_src_metadata with `count` rows."""
    topk, ends = way.local.size(1), arrived.route.ends
    home = ends.device
    found = torch.full((count, topk + 2), -1, dtype=torch.int32, device=home)
    rows = found[: len(way.local)]
    numbers = torch.arange(len(rows), device=home)
    sources = torch.searchsorted(ends.long(), numbers, right=True)
    rows[:, 0] = (sources * most_tokens + way.tokens).int()
    places = (way.local >= 0).int() * torch.arange(1, topk + 1, device=home)
    rows[:, 1] = (sources * topk + places.amax(1) - 1).int()
    if way.expansion is not None:
        rows[:, 2:] = way.expansion.slots
    rows.masked_fill_((sources >= len(ends)).unsqueeze(1), -1)
    return found


def places_at_ranks(masters: Tensor, arrived: Arrived, rank: int) -> Tensor:
    """EPHandle.dst_buffer_slot_idx. masters: see layout_by_topk()"""
    is_in_rank, there = arrived.route.is_token_in_rank.long(), arrived.there
    of_ranks_before = arrived.table[:rank, :-1].sum(0)
    places = of_ranks_before + is_in_rank.cumsum(0) - is_in_rank  # [n, R]
    owners = masters.clamp(min=0).long()
    found = places.gather(1, owners)
    is_none = (masters < 0) | ~there[owners] | ~there[rank]
    return found.masked_fill(is_none, -1).int()
