"""The normal mode of Buffer: DeepEP's results of a dispatch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from .exchange import Bound, Exchange, Participation, Sent
from .layout import CPU, local_experts_of, local_range
from .normal_handle import NormalHandle, handle_parts

if TYPE_CHECKING:
    from mooncake_backend._C import EpRoute

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
    weights = None if topk_weights is None else topk_weights.size(1)
    # With a bound nothing of the device is read on the host.
    bound: Bound | None = (shown.num_worst_tokens, None)
    if shown.num_worst_tokens == 0 or not exchange.takes_bound(
        fields, (shown.num_worst_tokens, None), weights, participation
    ):
        bound = None
    stays = bound is not None or exchange.by_kernels(home)
    per_expert_here = _checked_counts(num_tokens_per_expert, on_host=bound is None)
    num_experts = len(per_expert_here)
    if topk_idx is not None and bound is None:
        check_experts(topk_idx, num_experts, refuses_negative=False)
    check_sizes("is_token_in_rank", is_token_in_rank, torch.bool, (tokens, size))
    arrived = exchange.dispatch(
        Sent(
            fields,
            is_token_in_rank.to(home if stays else CPU).contiguous(),
            None,
            per_expert_here,
        ),
        participation,
        agreed=form_of([fields[0], scales, topk_idx, topk_weights]),
        weights=weights,
        bound=bound,
        shown_rows=shown.num_worst_tokens,
    )
    per_expert: list[int] = []
    first, count = local_range(num_experts, size, rank)
    if shown.num_worst_tokens == 0:
        align = shown.expert_alignment
        experts = arrived.experts[:, first : first + count].sum(0).tolist()
        per_expert = [-(-number // align) * align for number in experts]
    found, route, ends = arrived.fields, arrived.route, arrived.route.ends
    recv_idx = recv_weights = None
    if topk_idx is not None:
        local = local_experts_of(found[-2], first, count)
        if shown.num_worst_tokens > 0 or route.kernels is not None:  # there may be rows behind
            rows = torch.arange(len(local), device=local.device)
            local.masked_fill_((rows >= ends[-1]).unsqueeze(1), -1)
        recv_idx = local.to(home)
        recv_weights = found[-1].masked_fill(local < 0, 0).to(home)
    parts = handle_parts(arrived, rank, shown.num_channels)
    handle = NormalHandle([part.to(home) for part in parts], route)
    return Received(_rows_like(x, found), recv_idx, recv_weights, per_expert, handle)


def dispatch_again(exchange: Exchange, x: Rows, handle: Any, participation: Participation) -> Rows:
    """Rows in the places of the handle's dispatch; zeros from ranks that have gone since."""
    route = route_of(exchange, handle)
    return _rows_like(x, exchange.dispatch_again(fields_of(x), route, participation))


def refuse_old(exchange: Exchange, operation: str, handle: Any) -> None:
    """Raises for a handle from before the members changed, on this rank alone. What is no handle is
    an error of the call on all ranks."""
    with contextlib.suppress(TypeError):
        exchange.runtime.refuse_old(operation, NormalHandle.way_of(handle))


def route_of(exchange: Exchange, handle: Any) -> EpRoute:
    route = NormalHandle.way_of(handle)
    exchange.check_route(route)
    return route


def _checked_counts(num_tokens_per_expert: Any, on_host: bool) -> Tensor:
    """num_tokens_per_expert as int64 on the host, or as it is."""
    check_tensor("num_tokens_per_expert", num_tokens_per_expert)
    counts: Tensor = num_tokens_per_expert
    if counts.dim() != 1 or counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"num_tokens_per_expert is {counts.dtype} {list(counts.shape)}, expected int32 [E]"
        )
    if not on_host:
        return counts
    counts = counts.to(CPU, torch.int64).contiguous()
    if len(counts) > 0 and int(counts.min()) < 0:
        raise ValueError(f"num_tokens_per_expert has the number {int(counts.min())}")
    return counts


def _rows_like(x: Rows, fields: list[Tensor]) -> Rows:
    """The fields in the form and on the device of the given rows."""
    if not isinstance(x, tuple):
        return fields[0].to(x.device)
    scales = fields[1].to(x[0].device)
    return fields[0].to(x[0].device), scales.squeeze(1) if x[1].dim() == 1 else scales
