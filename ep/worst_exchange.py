"""Dispatches of a size that is known ahead, through host memory: Exchange.dispatch_at_worst(). No
function here waits on the host."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .arguments import Agreed, check_homes, plain
from .device_exchange import Sizes
from .events import profiled
from .layout import keep_until_passed
from .normal_handle import Arrived, Piece, Route, clear_behind

if TYPE_CHECKING:
    from .exchange import Exchange, Participation, Sent

Tensor = torch.Tensor


def dispatch(
    exchange: Exchange,
    sent: Sent,
    sizes: Sizes,
    participation: Participation,
    agreed: Agreed,
    of: Route | None = None,
) -> Arrived:
    fields, size, home = plain(sent.fields, None), exchange.runtime.size, sent.fields[0].device
    check_homes(home, fields, participation.active_ranks)
    into = [one.new_empty((sizes.capacity, one.size(1))) for one in fields]
    # If the call fails, nothing is written.
    sources = torch.zeros(sizes.capacity, dtype=torch.int32, device=home)
    ends = torch.zeros(size, dtype=torch.int32, device=home)
    table = torch.zeros((size, size + 1), dtype=torch.int64, device=home)
    there = torch.zeros(size, dtype=torch.bool, device=home)
    same = repr((agreed, sizes.most_tokens, sizes.weights)).encode()
    hidden, tokens = fields[0].size(1), len(fields[0])
    with exchange.step():
        handle, work = exchange.runtime.native.send_tokens_at_worst(
            fields,
            sent.token_ranks,
            hidden,
            sizes.weights,
            into,
            sources,
            ends,
            table,
            there,
            participation.active_ranks,
            zlib.crc32(same),
            None if of is None else of.pieces[0].native,
        )
    clear_behind([*into, sources.unsqueeze(1)], ends)
    route = Route(
        exchange,
        tokens,
        hidden,
        sizes.most_tokens or sizes.most_rows,
        sizes.most_rows,
        sizes.weights,
        ends,
        sizes.capacity,
        sent,
        [True] * size,
        [Piece(0, tokens, handle)],
        is_at_worst=True,
    )
    return Arrived(into, sources, route, table, there, work)


def dispatch_again(
    exchange: Exchange, fields: Sequence[Tensor], route: Route, participation: Participation
) -> list[Tensor]:
    check_homes(route.ends.device, fields, participation.active_ranks)
    fields = plain(fields, None)
    if not exchange.fit_at_once(fields, route.most_tokens, route.most_rows, route.most_weights):
        raise ValueError(
            f"the buffer has {exchange.runtime.native.num_bytes} bytes, too few for "
            f"{route.most_rows} rows at once: make it larger"
        )
    same = repr([(one.dtype, one.size(1)) for one in fields]).encode()
    into = [one.new_empty((route.num_rows, one.size(1))) for one in fields]
    with profiled("dispatch"), exchange.step():
        exchange.runtime.native.send_tokens_as_worst(
            route.pieces[0].native,
            fields,
            into,
            participation.active_ranks,
            participation.timeout_us,
            zlib.crc32(same),
        )
    keep_until_passed(route.ends)
    clear_behind(into, route.ends)
    return into
