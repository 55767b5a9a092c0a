"""The normal mode of Buffer: DeepEP's results of a dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .arguments import (
    Rows,
    check_experts,
    check_number,
    check_sizes,
    check_tensor,
    check_topk,
    fields_of,
    form_of,
)
from .exchange import Counts, Exchange, Participation, Sent
from .layout import CPU, local_experts_of, local_numbers, owners_of, ranks_by_column, ranks_of
from .normal_handle import NormalHandle, Route, handle_parts, padded

Tensor = torch.Tensor


@dataclass(frozen=True)
class Shown:
    """The form of a dispatch's results, see Buffer.dispatch()."""

    expert_alignment: int
    num_worst_tokens: int
    num_channels: int

    def check(self) -> None:
        check_number("expert_alignment", self.expert_alignment, 1)
        check_number("num_worst_tokens", self.num_worst_tokens, 0)


@dataclass(frozen=True)
class Received:
    rows: Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_per_expert: list[int]
    handle: NormalHandle


def dispatch(
    exchange: Exchange,
    x: Rows,
    is_token_in_rank: Tensor,
    num_tokens_per_expert: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    shown: Shown,
    participation: Participation,
) -> Received:
    size, rank = exchange.runtime.size, exchange.runtime.rank
    fields = fields_of(x)
    home, tokens = fields[0].device, len(fields[0])
    shown.check()
    scales = fields[1] if len(fields) > 1 else None
    if topk_idx is not None and topk_weights is not None:
        check_topk(topk_idx, topk_weights, tokens)
        fields += [topk_idx, topk_weights]
    elif topk_idx is not None or topk_weights is not None:
        raise ValueError("topk_idx and topk_weights belong together: give both or none")
    elif shown.num_worst_tokens > 0:
        raise ValueError("num_worst_tokens needs topk_idx and topk_weights")
    weights, most_rows = (
        None if topk_weights is None else topk_weights.size(1),
        shown.num_worst_tokens,
    )
    # Then nothing of the device is read on the host.
    is_at_worst = most_rows > 0 and exchange.goes_at_worst(
        fields, participation, weights=weights, most_rows=most_rows
    )
    on_device = is_at_worst or exchange.by_kernels(home)
    per_expert_here = _checked_counts(num_tokens_per_expert, not is_at_worst)
    num_experts = len(per_expert_here)
    if topk_idx is not None and not is_at_worst:
        check_experts(topk_idx.clamp(min=-1), num_experts)
    agreed = form_of([fields[0], scales, topk_idx, topk_weights])
    check_sizes("is_token_in_rank", is_token_in_rank, torch.bool, (tokens, size))
    is_in_rank = is_token_in_rank.to(home if on_device else CPU).contiguous()
    token_ranks = ranks_by_column(is_in_rank) if on_device else ranks_of(is_in_rank)

    def refuse(counts: Counts) -> str:
        if not 0 < shown.num_worst_tokens < counts.most_rows:
            return ""
        return (
            f"a rank receives {counts.most_rows} tokens, num_worst_tokens is "
            f"{shown.num_worst_tokens} on rank {rank}"
        )

    sent = Sent(fields, is_in_rank, token_ranks, per_expert_here)
    owners = owners_of(num_experts, size, CPU)
    per_expert: list[int] = []
    counts: Counts | None = None
    if not is_at_worst:
        arrived, counts = exchange.dispatch(
            sent, participation, agreed=agreed, weights=weights, refuse=refuse
        )
        align = shown.expert_alignment
        experts = counts.for_experts.sum(0)[owners == rank].tolist()
        per_expert = [-(-count // align) * align for count in experts]
    else:
        arrived = exchange.dispatch_at_worst(
            sent, participation, agreed=agreed, weights=weights, most_rows=most_rows
        )
    route = replace(arrived.route, shown_rows=shown.num_worst_tokens)
    found, ends = _shown(arrived.fields, route), route.ends
    if shown.num_worst_tokens > 0:
        per_expert = []
    recv_idx = recv_weights = None
    if topk_idx is not None:
        numbers = local_numbers(num_experts, size, rank, ends.device)
        local = local_experts_of(found[-2], numbers)
        rows = torch.arange(len(local), device=local.device)
        local = local.masked_fill((rows >= ends[-1]).unsqueeze(1), -1)
        recv_idx = local.to(home)
        recv_weights = found[-1].masked_fill(local < 0, 0).to(home)
    if arrived.table is not None:
        none = torch.empty((0, 0), dtype=torch.int64, device=CPU)
        for_experts = none if counts is None else counts.for_experts
        counts = Counts(arrived.table[:, size], arrived.table[:, :size], for_experts, 0, none)
    assert counts is not None
    parts = handle_parts(arrived, counts, rank, shown.num_channels, shown.num_worst_tokens)
    handle = NormalHandle([part.to(home) for part in parts], route)
    return Received(_rows_like(x, found), recv_idx, recv_weights, per_expert, handle)


def dispatch_again(exchange: Exchange, x: Rows, handle: Any, participation: Participation) -> Rows:
    """Rows in the places of the handle's dispatch; zeros from ranks that have gone since."""
    route = route_of(exchange, handle)
    found = exchange.dispatch_again(fields_of(x), route, participation)
    return _rows_like(x, _shown(found, route))


def route_of(exchange: Exchange, handle: Any) -> Route:
    route = NormalHandle.way_of(handle)
    exchange.check_route(route)
    return route


def _shown(fields: Sequence[Tensor], route: Route) -> list[Tensor]:
    """The fields with Route.shown_rows."""
    return [padded(one, route.shown_rows or len(one)) for one in fields]


def _checked_counts(num_tokens_per_expert: Any, on_host: bool) -> Tensor:
    """num_tokens_per_expert on the host, or as it is."""
    check_tensor("num_tokens_per_expert", num_tokens_per_expert)
    counts: Tensor = num_tokens_per_expert.to(CPU) if on_host else num_tokens_per_expert
    if counts.dim() != 1 or counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"num_tokens_per_expert is {counts.dtype} {list(counts.shape)}, expected int32 [E]"
        )
    if on_host and bool((counts < 0).any()):
        raise ValueError(f"num_tokens_per_expert has the number {int(counts.min())}")
    return counts


def _rows_like(x: Rows, fields: list[Tensor]) -> Rows:
    """The fields in the form and on the device of the given rows."""
    if not isinstance(x, tuple):
        return fields[0].to(x.device)
    scales = fields[1].to(x[0].device)
    return fields[0].to(x[0].device), scales.squeeze(1) if x[1].dim() == 1 else scales
