"""The calls of ElasticBuffer over an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import one_rounding
from .arguments import (
    Rows,
    check_experts,
    check_number,
    check_sizes,
    check_sums,
    check_topk,
    fields_of,
    form_of,
)
from .elastic_handle import EPHandle, Returning, Way, metadata_of, places_at_ranks
from .events import EventOverlap, profiled
from .exchange import Bound, Exchange, Participation, Sent
from .expansion import Expansion, aligned
from .layout import (
    CPU,
    keep_until_passed,
    layout_by_topk,
    local_experts_of,
    local_range,
    on_device,
    owners_of,
)
from .normal_handle import Arrived

if TYPE_CHECKING:
    from mooncake_backend._C import EpBuffer

Tensor = torch.Tensor
_SCALE_ALIGNMENT = 16  # bytes, of a column of scales


@dataclass(frozen=True)
class Form:
    """The form of a dispatch's results, see ElasticBuffer.dispatch()."""

    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int
    num_sms: int
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool

    def check(self, tokens: int) -> None:
        check_number("expert_alignment", self.expert_alignment, 1)
        check_number("num_max_tokens_per_rank", self.num_max_tokens_per_rank, 1)
        if tokens > self.num_max_tokens_per_rank:
            raise ValueError(
                f"x has {tokens} tokens, num_max_tokens_per_rank is {self.num_max_tokens_per_rank}"
            )


@dataclass(frozen=True)
class Received:
    rows: Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    handle: EPHandle


def dispatch(
    exchange: Exchange,
    x: Rows,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    form: Form,
    are_scales_by_column: bool,
    participation: Participation,
) -> Received:
    size, rank = exchange.runtime.size, exchange.runtime.rank
    fields = fields_of(x)
    home, num_parts = fields[0].device, len(fields)
    form.check(len(fields[0]))
    check_topk(topk_idx, topk_weights, len(fields[0]))
    num_experts, most = form.num_experts, form.num_max_tokens_per_rank
    sent_fields = [*fields, topk_idx] if topk_weights is None else [*fields, topk_idx, topk_weights]
    align, weights = form.expert_alignment, topk_idx.size(1)
    # With a bound nothing of the device is read on the host.
    bound: Bound | None = (size * most, most)
    if form.do_cpu_sync or not exchange.takes_bound(
        sent_fields, (size * most, most), weights, participation
    ):
        bound = None
    is_counted, stays = bound is None, bound is not None or exchange.by_kernels(home)
    first, num_local = local_range(num_experts, size, rank)
    place = home if stays else CPU
    chosen = topk_idx.to(place).long()
    if is_counted:
        check_experts(chosen, num_experts)
    else:
        chosen = chosen.masked_fill((chosen < 0) | (chosen >= num_experts), -1)
    owners_here = owners_of(num_experts, size, place)
    is_in_rank, token_ranks, masters = layout_by_topk(chosen, owners_here, size)
    scales = fields[1] if len(fields) > 1 else None
    per_expert = torch.empty(0, dtype=torch.int64, device=CPU)
    if is_counted:
        per_expert = torch.bincount(chosen[chosen >= 0], minlength=num_experts).to(CPU)
    arrived = exchange.dispatch(
        Sent(sent_fields, is_in_rank, token_ranks, per_expert),
        participation,
        agreed=[
            ("num_max_tokens_per_rank", most),
            *form_of([fields[0], scales, topk_idx, topk_weights]),
        ],
        weights=weights,
        bound=bound,
    )
    room, num_expanded = [], _most_expanded(size * most, weights, num_local, align)
    if is_counted:
        experts = arrived.experts[:, first : first + num_local].sum(0).tolist()
        room = [aligned(count, align) for count in experts]
        num_expanded = sum(room)
    places = torch.tensor(room, dtype=torch.int64, device=CPU)
    if stays and is_counted:
        places = on_device(places, home)
    local = local_experts_of(arrived.fields[num_parts], first, num_local)
    if stays:  # behind the received rows are zeros
        rows = torch.arange(len(local), device=home)
        local.masked_fill_((rows >= arrived.route.ends[-1]).unsqueeze(1), -1)
    expansion = None
    if form.do_expand:
        counted = places if is_counted else None
        expansion = Expansion(local, num_local, align, num_expanded, counted)
    returning: Returning | None = None
    if not is_counted:
        most_local = -(-num_experts // size)
        most_sent = _most_expanded(size * most, weights, most_local, align)
        returning = Returning(most * weights, most_sent)
    elif participation.timeout_us <= 0:  # else a rank that was skipped does not know the numbers
        rooms = -(-arrived.counted.sum(0) // align) * align
        owners = owners_of(num_experts, size, CPU)
        of_ranks = torch.zeros(size, dtype=torch.int64, device=CPU).index_add_(0, owners, rooms)
        most_back = max(1, int(arrived.counted.sum(1).max()))
        returning = Returning(most_back, max(1, int(of_ranks.max())))
    way = Way(arrived.route, local, expansion, arrived.sources.long(), returning, arrived.there)
    slots = places_at_ranks(masters, arrived, rank)
    handle = _handle(arrived, way, num_local, topk_idx, slots, form, room, places)
    received_weights = arrived.fields[-1] if topk_weights is not None else None
    native = exchange.runtime.native
    return _received(
        native, x, arrived.fields[:num_parts], received_weights, handle, are_scales_by_column, home
    )


def _most_expanded(rows: int, topk: int, num_local: int, align: int) -> int:
    """Rows of an expanded dispatch, if each token names an expert at most once."""
    return aligned(rows * min(topk, num_local) + (align - 1) * num_local, align)


def dispatch_again(
    exchange: Exchange,
    x: Rows,
    topk_weights: Tensor | None,
    handle: EPHandle,
    are_scales_by_column: bool,
    participation: Participation,
) -> Received:
    """Rows in the places of the handle's dispatch; zeros from ranks that have gone since."""
    route, fields = way_of(exchange, handle).route, fields_of(x)
    home, num_parts = fields[0].device, len(fields)
    if topk_weights is not None:
        check_topk(handle.topk_idx, topk_weights, len(fields[0]))
        fields.append(topk_weights)
    received = exchange.dispatch_again(fields, route, participation)
    weights = received[-1] if topk_weights is not None else None
    native = exchange.runtime.native
    return _received(native, x, received[:num_parts], weights, handle, are_scales_by_column, home)


def combine(
    exchange: Exchange,
    x: Tensor,
    handle: EPHandle,
    topk_weights: Tensor | None,
    biases: Sequence[Tensor],
    adds_at_experts: bool,
    participation: Participation,
    async_finish: bool,
) -> tuple[Tensor, Tensor | None, EventOverlap]:
    """adds_at_experts: ElasticBuffer's allow_multiple_reduction"""
    way = way_of(exchange, handle)
    expansion, route = way.expansion, way.route
    least = route.num_rows if expansion is None else expansion.num_rows
    check_sums(x, least, route.hidden, biases, route.tokens)
    home = x.device
    if expansion is not None:
        if topk_weights is not None:
            check_sizes("topk_weights", topk_weights, torch.float32, (-1,))
            if len(topk_weights) < least:
                raise ValueError(
                    f"topk_weights has {len(topk_weights)} elements, the dispatch made {least} rows"
                )
        if not adds_at_experts:
            if topk_weights is not None:
                raise ValueError(
                    "the combine of an expanded dispatch takes topk_weights only with "
                    "allow_multiple_reduction"
                )
            with profiled("combine"):
                return one_rounding.combine(
                    exchange, x, handle, biases, participation, async_finish
                )
        place = home if exchange.uses_words(home) else route.ends.device
        expansion = expansion.on(place)
        x = expansion.fold(x.to(place)).to(home)
        if topk_weights is not None:
            topk_weights = expansion.fold_weights(topk_weights.to(place)).to(home)
    return exchange.combine(x, way.route, topk_weights, biases, participation, async_finish)


def way_of(exchange: Exchange, handle: Any) -> Way:
    if not isinstance(handle, EPHandle):
        raise TypeError(
            f"handle must be the EPHandle that dispatch returned, not {type(handle).__name__}"
        )
    exchange.check_route(handle.way.route)
    return handle.way


def _handle(
    arrived: Arrived,
    way: Way,
    num_local: int,
    topk_idx: Tensor,
    slots: Tensor,
    form: Form,
    room_of_experts: list[int],
    places: Tensor,
) -> EPHandle:
    """places: int64 [L]: room_of_experts on the device of `way.local`; empty without counts"""
    most, align = form.num_max_tokens_per_rank, form.expert_alignment
    numbers = way.local.flatten().long()
    counts = torch.zeros(num_local + 1, dtype=torch.int64, device=numbers.device)
    counts.scatter_add_(0, numbers.masked_fill(numbers < 0, num_local), torch.ones_like(numbers))
    counts = counts[:num_local]
    room = places if room_of_experts else -(-counts // align) * align
    num_rows, num_expanded, ends = arrived.route.num_rows, 0, room.cumsum(0)
    if way.expansion is not None:
        ends, num_expanded = way.expansion.ends, way.expansion.num_rows
    if not form.do_cpu_sync:
        num_rows = len(arrived.route.ends) * most
        if way.expansion is not None:
            # More, if a token names an expert several times.
            bound = _most_expanded(num_rows, topk_idx.size(1), num_local, align)
            num_expanded = max(num_expanded, bound)
    home = topk_idx.device
    return EPHandle(
        form.do_expand,
        form.num_experts,
        align,
        most,
        form.num_sms,
        topk_idx.clone() if form.do_handle_copy else topk_idx,
        num_rows,
        num_expanded,
        room_of_experts if form.do_cpu_sync else [],
        arrived.route.ends.to(home, copy=True),
        ends.int().to(home),
        counts.int().to(home),
        metadata_of(arrived, way, most, num_rows).to(home),
        slots.to(home),
        way=way,
    )


def _received(
    native: EpBuffer,
    x: Rows,
    fields: Sequence[Tensor],
    weights: Tensor | None,
    handle: EPHandle,
    are_scales_by_column: bool,
    home: torch.device,
) -> Received:
    """The fields and the weights of the received tokens, in the form of the handle's dispatch."""
    local, expansion = handle.way.local, handle.way.expansion
    shown_topk: Tensor | None = None
    keep_until_passed(local)
    if expansion is not None:
        count, expansion = handle.num_expanded_tokens, expansion.on(fields[0].device)
        fields = [expansion.expand(one, _new_rows(native, count, one)) for one in fields]
        if weights is not None:
            weights = expansion.expand_weights(weights, count)
    else:
        count = handle.num_recv_tokens
        fields = [_longer(one, count) for one in fields]
        if local.device != home:
            shown_topk = _longer(on_device(local, home), count, -1)
        else:
            shown_topk = _longer(local, count, -1).clone()
        if weights is not None:
            local = local if local.device == weights.device else on_device(local, weights.device)
            weights = _longer(weights.masked_fill(local < 0, 0), count, 0)
    rows: Rows = fields[0].to(home)
    if isinstance(x, tuple):
        scales = _by_column(fields[1]) if are_scales_by_column else fields[1]
        if x[1].dim() == 1:
            scales = scales.squeeze(1)
        rows = fields[0].to(home), scales.to(home)
    return Received(rows, shown_topk, None if weights is None else weights.to(home), handle)


def _new_rows(native: EpBuffer, count: int, like: Tensor) -> Tensor:
    if like.device == CPU:
        return native.new_result([count, like.size(1)], like)
    return torch.empty((count, like.size(1)), dtype=like.dtype, device=like.device)


def _longer(rows: Tensor, count: int, filler: int | None = None) -> Tensor:
    """The rows, and further ones up to `count`: not written, or filled."""
    if len(rows) == count:
        return rows
    sizes = (count, *rows.shape[1:])
    whole = rows.new_empty(sizes) if filler is None else rows.new_full(sizes, filler)
    whole[: len(rows)] = rows
    return whole


def _by_column(scales: Tensor) -> Tensor:
    """The same values, column by column. Columns begin at multiples of 16 bytes."""
    count, columns = scales.shape
    step = aligned(count, _SCALE_ALIGNMENT // scales.dtype.itemsize)
    whole = scales.new_empty((columns, step))
    whole[:, :count] = scales.t()
    return whole[:, :count].t()
