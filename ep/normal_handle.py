"""The handle of a dispatch of the normal mode: DeepEP's entries, and the route for its combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .layout import CPU, RANKS_PER_RDMA_RANK

if TYPE_CHECKING:
    from mooncake_backend._C import EpHandle

    from .exchange import Counts, Exchange, Sent

Tensor = torch.Tensor


@dataclass(frozen=True)
class Piece:
    """One native dispatch: the tokens from `begin` to `end` of each rank."""

    begin: int
    end: int
    native: EpHandle
    rows: Tensor | None  # its rows among all, -1: left out since; None: these are all rows

    def of(self, x: Tensor, num_rows: int) -> Tensor:
        """The piece's rows of x, zeros for those that were left out."""
        if self.rows is None:
            return x[:num_rows]
        rows = x.new_zeros((len(self.rows), x.size(1)))
        are_left = self.rows >= 0
        rows[are_left] = x[self.rows[are_left]]
        return rows


@dataclass(frozen=True)
class Route:
    """The way of a dispatch's rows."""

    exchange: Exchange
    tokens: int
    hidden: int
    most_tokens: int  # of one rank
    most_weights: int  # of a token, for which the combine has room
    ends: Tensor  # int32 [R]: the rows up to those of the rank, inclusive
    sent: Sent
    participants: Sequence[bool]
    pieces: Sequence[Piece]

    @property
    def num_rows(self) -> int:
        return int(self.ends[-1])


class NormalHandle(tuple[Any, ...]):
    """DeepEP's handle of the normal mode, with a further attribute."""

    route: Route

    def __new__(cls, parts: Sequence[Any], route: Route) -> NormalHandle:
        handle = super().__new__(cls, parts)
        handle.route = route
        return handle


@dataclass(frozen=True)
class Arrived:
    """The rows of a dispatch, in the order of rank and token."""

    fields: Sequence[Tensor]
    sources: Tensor  # int32: index of the token at its rank
    route: Route

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
            rows[are_here] = field
            whole.append(rows)
        return whole


def padded(rows: Tensor, count: int) -> Tensor:
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
    c * ceil(n / C) on."""
    size = len(counts.tokens)
    is_in_rank = arrived.route.sent.is_token_in_rank
    tokens = len(is_in_rank)
    prefix = counts.for_ranks.cumsum(0).int()
    prefix[:, rank] = arrived.route.ends
    steps = -(-counts.tokens // num_channels)
    begins = steps[rank] * torch.arange(num_channels + 1, device=CPU)
    before = torch.zeros((tokens + 1, size), dtype=torch.int32, device=CPU)
    before[1:] = is_in_rank.int().cumsum(0)
    at = before[begins.clamp(max=tokens)]  # tokens for each rank ahead of each channel
    channel_prefix = at[1:].t().contiguous()
    first = torch.arange(tokens, device=CPU) // max(int(steps[rank]), 1)
    send_head = (before[:-1] - at[first]).masked_fill(~is_in_rank, -1)
    # The rows of each rank that are ahead of each of its channels.
    lengths = counts_of(arrived.route.ends)
    sources = torch.repeat_interleave(torch.arange(size, device=CPU), lengths)
    channels = arrived.sources.long() // steps[sources].clamp(min=1)
    received = torch.zeros((size, num_channels), dtype=torch.int64, device=CPU)
    ones = torch.ones(len(sources), dtype=torch.int64, device=CPU)
    received.index_put_((sources, channels), ones, accumulate=True)
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
    before_hosts = torch.zeros((tokens + 1, of_hosts.size(1)), dtype=torch.int32, device=CPU)
    before_hosts[1:] = of_hosts.int().cumsum(0)
    at_hosts = before_hosts[begins.clamp(max=tokens)]
    rdma_send_head = (before_hosts[:-1] - at_hosts[first]).masked_fill(~of_hosts, -1)
    group = torch.arange(size, device=CPU) // RANKS_PER_RDMA_RANK
    by_host = torch.zeros((of_hosts.size(1), num_channels), dtype=torch.int64, device=CPU)
    by_host.index_add_(0, group, received)
    rdma_prefix = torch.zeros(of_hosts.size(1), dtype=torch.int64, device=CPU)
    rdma_prefix.index_add_(0, group, lengths)
    return [
        is_in_rank, at_hosts[1:].t().contiguous(), channel_prefix,
        (by_host.cumsum(1) - by_host).int(), rdma_prefix.cumsum(0).int(), recv_channel_prefix,
        arrived.route.ends, recv_src_idx, rdma_send_head, send_head,
    ]  # fmt: skip
