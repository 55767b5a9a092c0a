"""The combine of an expanded dispatch of ElasticBuffer that rounds once: without
allow_multiple_reduction. Rows come back one for each choice of an expert, by a dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .elastic_handle import EPHandle
from .events import Enqueued, EventOverlap
from .exchange import Exchange, Participation, Sent
from .layout import CPU, keep_until_passed, on_device

if TYPE_CHECKING:
    from .normal_handle import Arrived

Tensor = torch.Tensor


def is_at_worst(exchange: Exchange, x: Any, handle: Any, timeout_us: Any) -> bool:
    """Whether the host waits for nothing in the combine of an expanded dispatch that rounds once.
    To be asked before the arguments are checked."""
    if not (isinstance(x, Tensor) and isinstance(handle, EPHandle)):
        return False
    if not (timeout_us is None or isinstance(timeout_us, int)):
        return False
    way, home = handle.way, x.device
    if way.returning is None or way.expansion is None or home != handle.topk_idx.device:
        return False
    like = [torch.empty((0, way.route.hidden), dtype=torch.bfloat16, device=home)]
    like.append(torch.empty((0, 1), dtype=torch.int32, device=home))
    bound = way.returning.most_rows, way.returning.most_sent
    return exchange.takes_bound(like, bound, 1, exchange.participation(None, timeout_us))


@torch.no_grad()
def combine(
    exchange: Exchange,
    x: Tensor,
    handle: EPHandle,
    biases: Sequence[Tensor],
    participation: Participation,
    async_finish: bool,
) -> tuple[Tensor, Tensor | None, EventOverlap]:
    """Each expert's row goes to the rank of its token, which adds all of them in the order of
    top-k."""
    route, home = handle.way.route, x.device
    topk = handle.way.local.size(1)
    participation.check(len(route.ends))
    if is_at_worst(exchange, x, handle, participation.timeout_us):
        place, back = home, _return_at_worst(exchange, x, handle, participation)
    else:
        place = CPU if route.kernels is None else home
        back = _return_counted(exchange, x, handle, participation, place)
    returned, numbers = back.fields[0], back.fields[1].flatten().long()
    # There may be rows behind the last one. They are written to a place of no choice.
    behind = torch.arange(len(numbers), device=place) >= back.route.ends[-1]
    behind |= (numbers < 0) | (numbers >= route.tokens * topk)
    row_of = torch.full((route.tokens * topk + 1,), -1, dtype=torch.int64, device=place)
    row_of[numbers.masked_fill(behind, -1)] = torch.arange(len(numbers), device=place)
    row_of = row_of[:-1].view(route.tokens, topk)
    sums = torch.zeros((route.tokens, route.hidden), dtype=torch.float32, device=place)
    for bias in biases:
        sums += bias.to(place).float()
    for found in row_of.t():
        _add_rows(sums, returned, found)
    chosen = handle.topk_idx.to(place)
    is_chosen = (chosen >= 0) & (chosen < handle.num_experts)
    missing = (is_chosen & (row_of < 0)).any(dim=1).to(home)
    combined = sums.bfloat16().to(home)
    ended = Enqueued([] if back.work is None else [back.work], home)
    return combined, None, exchange.ended("combine", ended, missing, async_finish)


def _return_counted(
    exchange: Exchange,
    x: Tensor,
    handle: EPHandle,
    participation: Participation,
    place: torch.device,
) -> Arrived:
    """The host waits for the numbers of rows."""
    route, expansion = handle.way.route, handle.way.expansion
    assert expansion is not None
    size, slots = len(route.ends), expansion.slots.to(place)
    rows, places = (slots >= 0).nonzero(as_tuple=True)
    sources = torch.searchsorted(route.ends.to(place).long(), rows, right=True)
    choices = handle.way.tokens.to(place)[rows] * slots.size(1) + places
    there = torch.tensor(route.participants, dtype=torch.bool, device=place)
    mask = participation.among(there)
    is_in_rank = torch.nn.functional.one_hot(sources, size).bool()
    back = exchange.dispatch(
        Sent(
            [x.to(place)[slots[rows, places]], choices.int().unsqueeze(1)],
            is_in_rank,
            sources.int().unsqueeze(1),
            torch.zeros(0, dtype=torch.int64, device=CPU),
        ),
        Participation(mask, participation.timeout_us),
        # All ranks combine the rows of the same dispatch.
        agreed=[("the handle's dispatch", route.number % 2**32)],
        weights=1,
    )
    participation.show(mask)
    return back


def _return_at_worst(
    exchange: Exchange, x: Tensor, handle: EPHandle, participation: Participation
) -> Arrived:
    """Sends all rows of the expanded form. Rows that no choice has go to no rank."""
    way, home, size = handle.way, x.device, len(handle.way.route.ends)
    assert way.expansion is not None
    assert way.returning is not None
    expansion = way.expansion.on(home)
    ends, tokens = way.route.ends, way.tokens
    if ends.device == home:
        keep_until_passed(ends, tokens)
    else:
        ends, tokens = on_device(ends, home), on_device(tokens, home)
    is_none, rows = expansion.sources < 0, expansion.sources.clamp(min=0)
    ranks = torch.searchsorted(ends.long(), rows, right=True).masked_fill(is_none, -1)
    choices = tokens[rows] * expansion.slots.size(1) + expansion.places()
    there = way.there if way.there.device == home else on_device(way.there, home)
    keep_until_passed(there)
    mask = participation.among(there)
    back = exchange.dispatch(
        Sent(
            [x[: expansion.num_rows], choices.int().unsqueeze(1)],
            ranks.unsqueeze(1) == torch.arange(size, device=home),
            ranks.int().unsqueeze(1),
            torch.zeros(0, dtype=torch.int64, device=CPU),
        ),
        Participation(mask, participation.timeout_us),
        agreed=[],
        weights=1,
        bound=(way.returning.most_rows, way.returning.most_sent),
        of=way.route,
    )
    participation.show(mask)
    return back


def _add_rows(sums: Tensor, rows: Tensor, numbers: Tensor) -> None:
    """Adds to each sum the row of its number; -1 is none. Waits for no device."""
    if sums.device == CPU:
        here = (numbers >= 0).nonzero().flatten()
        sums[here] += rows[numbers[here]].float()
    elif len(rows) > 0:
        is_none = (numbers < 0).unsqueeze(1)
        sums += rows[numbers.clamp(min=0)].float().masked_fill_(is_none, 0)
