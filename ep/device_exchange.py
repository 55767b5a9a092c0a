"""The two operations of the normal mode by kernels, see exchange. Rows stay on their device, and no
function here waits on the host."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .arguments import check_homes, plain
from .events import EventOverlap, profiled
from .normal_handle import Arrived, Route

if TYPE_CHECKING:
    from mooncake_backend._C import EpTokenHandle

    from .exchange import Exchange, Participation, Sent

Tensor = torch.Tensor
_MOST_OWNERS = 32  # kernels::kMostOwners


@dataclass(frozen=True)
class Sizes:
    """Of the results of a dispatch."""

    capacity: int  # rows that this rank has room for
    # The same on all ranks, as are the others: tokens of one rank; None: not known, so each rank's
    # tokens and rows go at once
    most_tokens: int | None
    most_rows: int  # that one rank receives
    weights: int  # of a token, for which the combine has room


def check(sent: Sent, participation: Participation) -> None:
    """Refuses tensors of several devices, and tokens that kernels do not take."""
    check_homes(sent.fields[0].device, sent.fields, participation.active_ranks)
    width = sent.token_ranks.size(1)
    if width > _MOST_OWNERS:
        raise ValueError(f"tokens have up to {width} ranks, kernels take {_MOST_OWNERS}")


def dispatch_counted(
    exchange: Exchange,
    fields: Sequence[Tensor],
    sent: Sent,
    sizes: Sizes,
    among: Sequence[bool],
    participation: Participation,
) -> Arrived:
    """dispatch() behind the exchange of counts: all ranks are in it, so an error ends the buffer's
    calls on all of them."""
    try:
        return dispatch(exchange, fields, sent, sizes, among, participation)
    except Exception as error:
        why = f"rank {exchange.runtime.rank} could not go on: dispatch: {error}"
        exchange.runtime.native.end_on_device(why)
        raise


def dispatch(
    exchange: Exchange,
    fields: Sequence[Tensor],
    sent: Sent,
    sizes: Sizes,
    among: Sequence[bool],
    participation: Participation,
    agreed: int = 0,
) -> Arrived:
    """among: the ranks that take part, if none is lost meanwhile
    agreed: any number; if ranks give different ones, the buffer ends with an error
    """
    hidden = fields[0].size(1)
    into = [_empty(sizes.capacity, one) for one in fields]
    kernels, sources, ends, table, work = exchange.runtime.native.dispatch_on_device(
        list(fields),
        into,
        choices_of(sent.is_token_in_rank, sent.token_ranks),
        sent.is_token_in_rank.sum(0).int(),
        sizes.capacity,
        sizes.most_tokens,
        sizes.most_rows,
        hidden,
        sizes.weights,
        list(among),
        participation.active_ranks,
        participation.timeout_us,
        agreed,
    )
    tokens = len(sent.token_ranks)
    route = Route(
        exchange,
        tokens,
        hidden,
        tokens if sizes.most_tokens is None else sizes.most_tokens,
        sizes.most_rows,
        sizes.weights,
        ends,
        sizes.capacity,
        sent,
        list(among),
        (),
        kernels,
    )
    there = _participants(kernels, len(among))
    return Arrived(into, sources.clone(), route, table.long(), there, work)


def _participants(kernels: EpTokenHandle, size: int) -> Tensor:
    """bool [R]: the ranks that took part."""
    bits = kernels.dispatched.view(torch.int64)[1]
    return (bits >> torch.arange(size, device=bits.device)) & 1 == 1


def choices_of(is_token_in_rank: Tensor, token_ranks: Tensor) -> Tensor:
    """int32 [n, any, 2]: the ranks of each token, and its place among the tokens for that rank."""
    places = is_token_in_rank.cumsum(0) - 1
    of_ranks = places.gather(1, token_ranks.clamp(min=0).long())
    return torch.stack([token_ranks, of_ranks.int()], dim=2).contiguous()


def dispatch_again(
    exchange: Exchange, fields: Sequence[Tensor], route: Route, participation: Participation
) -> list[Tensor]:
    assert route.kernels is not None
    fields = plain(fields, None)
    same = repr([(one.dtype, one.size(1)) for one in fields]).encode()
    into = [_empty(route.num_rows, one) for one in fields]
    with profiled("dispatch"):
        exchange.runtime.native.dispatch_on_device_again(
            fields,
            into,
            route.kernels,
            list(route.participants),
            participation.active_ranks,
            participation.timeout_us,
            zlib.crc32(same),
        )
    return into


def combine(
    exchange: Exchange,
    x: Tensor,
    route: Route,
    topk_weights: Tensor | None,
    biases: Sequence[Tensor],
    participation: Participation,
    async_finish: bool,
) -> tuple[Tensor, Tensor | None, EventOverlap]:
    assert route.kernels is not None
    x, *biases = plain([x, *biases], None)
    sums = x.new_empty((route.tokens, route.hidden))
    # If the call fails, nothing is written.
    missing = torch.ones(route.tokens, dtype=torch.bool, device=x.device)
    weights = weight_sums = None
    if topk_weights is not None:
        weights = plain([topk_weights], None)[0]
        weight_sums = weights.new_empty((route.tokens, weights.size(1)))
    with profiled("combine"):
        work = exchange.runtime.native.combine_on_device(
            x,
            route.kernels,
            sums,
            missing,
            weights,
            weight_sums,
            list(biases),
            list(route.participants),
            participation.active_ranks,
            participation.timeout_us,
            async_finish,
        )
    return sums, weight_sums, exchange.ended("combine", work, missing, async_finish)


def _empty(rows: int, like: Tensor) -> Tensor:
    return torch.empty((rows, like.size(1)), dtype=like.dtype, device=like.device)
