"""The handle of a dispatch of the normal mode: DeepEP's entries, and the route for its combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .layout import CPU, RANKS_PER_RDMA_RANK
from .tuple_handle import TupleHandle

if TYPE_CHECKING:
    from mooncake_backend._C import EpBuffer, EpHandle, EpTokenHandle, EpWork

    from .exchange import Counts, Exchange, Sent

Tensor = torch.Tensor


@dataclass(frozen=True)
class Piece:
    """One native dispatch: the tokens from `begin` to `end` of each rank. Without first_rows and
    rows it has all rows of the call."""

    begin: int
    end: int
    native: EpHandle
    first_rows: Sequence[int] = ()  # by rank: where its rows begin among all of the call
    rows: Tensor | None = None  # its rows among all, -1: of a rank that has gone since
    counts: Sequence[int] = ()  # with first_rows, by rank: its rows

    def of(self, x: Tensor) -> Tensor:
        """What combine_tokens() gets for the piece, of all rows."""
        if self.rows is None:
            return x
        found = x.new_zeros((len(self.rows), x.size(1)))
        are_left = self.rows >= 0
        found[are_left] = x[self.rows[are_left]]
        return found

    def side_by_side(self, x: Tensor) -> Tensor:
        """The piece's rows, of all rows on a device. The host waits only after a loss."""
        if not self.first_rows:
            return self.of(x)
        begins = zip(self.first_rows, self.counts, strict=True)
        return torch.cat([x[first : first + count] for first, count in begins])

    def spread(self, rows: Tensor, whole: Tensor) -> None:
        """Copies the piece's rows, which stand side by side, to their places among all."""
        begin = 0
        for first, count in zip(self.first_rows, self.counts, strict=True):
            whole[first : first + count] = rows[begin : begin + count]
            begin += count


class Joined:
    """The rows of a dispatch in pieces, in the order of rank and token.

    expected: int64 [R]: the rows that come from each rank in all pieces
    """

    def __init__(self, native: EpBuffer, fields: Sequence[Tensor], expected: Tensor) -> None:
        self.ends = expected.cumsum(0)
        self._begins = self.ends - expected
        self.filled = self._begins.clone()  # behind the rows of each rank that are there
        count = int(self.ends[-1])
        self.into = [native.new_result([count, one.size(1)], one) for one in fields]
        self._sources = torch.zeros(count, dtype=torch.int32, device=CPU)
        self.into.append(self._sources)
        self._pieces: list[Piece] = []
        self._counts: list[Tensor] = []
        self._first_tokens: list[int] = []

    def add(self, begin: int, end: int, first_token: int, native: EpHandle, counts: Tensor) -> None:
        """The next piece: the tokens from `first_token` on of each rank. counts: int64 [R]"""
        first_rows = self.filled.tolist()
        self._pieces.append(Piece(begin, end, native, first_rows, counts=counts.tolist()))
        self._counts.append(counts)
        self._first_tokens.append(first_token)
        self.filled += counts

    def among(self, there: Tensor) -> tuple[list[Tensor], Tensor, Tensor, list[Piece]]:
        """Fields, sources, and the ends of each rank's rows, without rows of ranks that have gone
        since; and the pieces."""
        counts = torch.stack(self._counts, dim=1)  # [R, pieces]
        offsets = torch.tensor(self._first_tokens, dtype=torch.int32, device=CPU).repeat(
            len(counts)
        )
        if torch.equal(self.filled, self.ends) and bool(there[counts.sum(1) > 0].all()):
            self._sources += torch.repeat_interleave(offsets, counts.flatten())
            return self.into[:-1], self._sources, self.ends.int(), self._pieces
        ranks = torch.repeat_interleave(
            torch.arange(len(there), device=CPU), self.ends - self._begins
        )
        keep = there[ranks].nonzero().flatten()
        places = torch.full((len(ranks),), -1, dtype=torch.int64, device=CPU)
        places[keep] = torch.arange(len(keep), device=CPU)
        left = counts * there.unsqueeze(1)
        sources = self._sources[keep] + torch.repeat_interleave(offsets, left.flatten())
        pieces = []
        for piece, of_ranks in zip(self._pieces, self._counts, strict=True):
            first = torch.tensor(piece.first_rows, dtype=torch.int64, device=CPU)
            steps = torch.arange(int(of_ranks.sum()), device=CPU)
            begins = torch.repeat_interleave(first - of_ranks.cumsum(0) + of_ranks, of_ranks)
            pieces.append(Piece(piece.begin, piece.end, piece.native, (), places[begins + steps]))
        fields = [_bytes(one)[keep].view(one.dtype) for one in self.into[:-1]]
        return fields, sources, left.sum(1).cumsum(0).int(), pieces


@dataclass(frozen=True)
class Route:
    """The way of a dispatch's rows."""

    exchange: Exchange
    tokens: int
    hidden: int
    most_tokens: int  # of one rank
    most_rows: int  # that one rank receives
    most_weights: int  # of a token, for which the combine has room
    ends: Tensor  # int32 [R]: the rows up to those of the rank, inclusive
    num_rows: int
    sent: Sent
    participants: Sequence[bool]
    pieces: Sequence[Piece]  # none by kernels
    # By kernels. Then `ends` is on the device, and there may be fewer rows than `num_rows`: those
    # behind them are zeros.
    kernels: EpTokenHandle | None = None
    is_at_worst: bool = False  # likewise, through host memory; there is one piece
    shown_rows: int = 0  # of the results, in which zeros follow the received rows; 0: only these

    @property
    def number(self) -> int:
        """Of the dispatch: the same on all ranks."""
        native = self.kernels or self.pieces[0].native
        return native.number


class NormalHandle(TupleHandle[Route], place=-1):
    """DeepEP's handle of the normal mode."""

    @property
    def route(self) -> Route:
        return self.way


@dataclass(frozen=True)
class Arrived:
    """The rows of a dispatch, in the order of rank and token."""

    fields: Sequence[Tensor]
    sources: Tensor  # int32: index of the token at its rank
    route: Route
    # By kernels, or with Route.is_at_worst, int64 [R, R + 1]: of each rank its rows for each rank,
    # and its tokens.
    table: Tensor | None = None
    there: Tensor | None = None  # likewise, bool [R]: the ranks that took part
    work: EpWork | None = None  # likewise

    def as_of(self, route: Route) -> list[Tensor]:
        """The fields in the places of an earlier dispatch's rows. The rows of ranks that have gone
        since are zeros."""
        before, now = counts_of(route.ends), counts_of(self.route.ends)
        if torch.equal(before, now):
            return list(self.fields)
        are_here = torch.repeat_interleave(now == before, before)
        whole = []
        for field in self.fields:
            rows = field.new_zeros((route.num_rows, field.size(1)))
            _bytes(rows)[are_here] = _bytes(field)
            whole.append(rows)
        return whole


def _bytes(rows: Tensor) -> Tensor:
    """Not every dtype of FP8 can be indexed."""
    return rows.view(torch.uint8)


def clear_behind(fields: Sequence[Tensor], ends: Tensor) -> None:
    """Makes rows behind the received ones zeros. Waits for no device."""
    are_behind = torch.arange(len(fields[0]), device=ends.device) >= ends[-1]
    for rows in fields:
        _bytes(rows).masked_fill_(are_behind.unsqueeze(1), 0)


def clear_gone(fields: Sequence[Tensor], ends: Tensor, active_ranks: Tensor) -> None:
    """Makes rows of ranks that are not active zeros. Waits for no device."""
    rows = torch.arange(len(fields[0]), device=ends.device)
    are_gone = active_ranks[torch.searchsorted(ends, rows.int(), right=True)] == 0
    for one in fields:
        _bytes(one).masked_fill_(are_gone.unsqueeze(1), 0)


def padded(rows: Tensor, count: int) -> Tensor:
    if len(rows) == count:
        return rows
    whole = rows.new_zeros((count, *rows.shape[1:]))
    whole[: len(rows)] = rows
    return whole


def counts_of(ends: Tensor) -> Tensor:
    """The inverse of a cumulative sum."""
    counts = ends.long().clone()
    counts[1:] -= ends[:-1]
    return counts


def handle_parts(
    arrived: Arrived, counts: Counts, rank: int, num_channels: int, num_worst_tokens: int
) -> list[Tensor]:
    """The entries of DeepEP's handle. A channel there is a part of each rank's tokens: those from
    c * ceil(n / C) on. Waits for no device."""
    route, is_in_rank = arrived.route, arrived.route.sent.is_token_in_rank
    size, tokens, home = len(counts.tokens), len(is_in_rank), is_in_rank.device
    prefix = counts.for_ranks.cumsum(0).int()
    prefix[:, rank] = route.ends
    steps = (counts.tokens + num_channels - 1) // num_channels
    step = -(-tokens // num_channels)
    begins = step * torch.arange(num_channels + 1, device=home)
    before = torch.zeros((tokens + 1, size), dtype=torch.int32, device=home)
    before[1:] = is_in_rank.int().cumsum(0)
    at = before[begins.clamp(max=tokens)]  # tokens for each rank ahead of each channel
    channel_prefix = at[1:].t().contiguous()
    first = torch.arange(tokens, device=home) // max(step, 1)
    send_head = (before[:-1] - at[first]).masked_fill(~is_in_rank, -1)
    # The rows of each rank that are ahead of each of its channels.
    lengths = counts_of(route.ends)
    rows = torch.arange(len(arrived.sources), device=home)
    sources = torch.searchsorted(route.ends.long(), rows, right=True)
    are_rows = (sources < size).long()
    sources = sources.clamp(max=size - 1)
    channels = arrived.sources.long() // steps[sources].clamp(min=1)
    channels = channels.clamp(max=num_channels - 1)
    received = torch.zeros(size * num_channels, dtype=torch.int64, device=home)
    received.scatter_add_(0, sources * num_channels + channels, are_rows)
    received = received.view(size, num_channels)
    recv_channel_prefix = (received.cumsum(1) - received).int()
    recv_src_idx = arrived.sources
    if num_worst_tokens > 0:
        recv_src_idx = padded(recv_src_idx, num_worst_tokens)
    if size <= RANKS_PER_RDMA_RANK:
        return [
            prefix, channel_prefix, recv_channel_prefix, recv_src_idx, is_in_rank, send_head,
        ]  # fmt: skip
    hosts = is_in_rank.split(RANKS_PER_RDMA_RANK, dim=1)
    of_hosts = torch.stack([one.any(dim=1) for one in hosts], dim=1)
    before_hosts = torch.zeros((tokens + 1, of_hosts.size(1)), dtype=torch.int32, device=home)
    before_hosts[1:] = of_hosts.int().cumsum(0)
    at_hosts = before_hosts[begins.clamp(max=tokens)]
    rdma_send_head = (before_hosts[:-1] - at_hosts[first]).masked_fill(~of_hosts, -1)
    group = torch.arange(size, device=home) // RANKS_PER_RDMA_RANK
    by_host = torch.zeros((of_hosts.size(1), num_channels), dtype=torch.int64, device=home)
    by_host.index_add_(0, group, received)
    rdma_prefix = torch.zeros(of_hosts.size(1), dtype=torch.int64, device=home)
    rdma_prefix.index_add_(0, group, lengths)
    return [
        is_in_rank, at_hosts[1:].t().contiguous(), channel_prefix,
        (by_host.cumsum(1) - by_host).int(), rdma_prefix.cumsum(0).int(), recv_channel_prefix,
        route.ends.clone(), recv_src_idx, rdma_send_head, send_head,
    ]  # fmt: skip
