"""The handle of a dispatch of the normal mode: DeepEP's entries, and the route for its combine."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .layout import RANKS_PER_RDMA_RANK
from .tuple_handle import TupleHandle

if TYPE_CHECKING:
    from mooncake_backend._C import EpRoute, EpWork

Tensor = torch.Tensor


class NormalHandle(TupleHandle["EpRoute"], place=-1):
    """DeepEP's handle of the normal mode."""

    @property
    def route(self) -> EpRoute:
        return self.way


class Arrived(NamedTuple):
    """The rows of a dispatch, in the order of rank and token, see EpBuffer.normal_dispatch()."""

    fields: list[Tensor]
    sources: Tensor
    table: Tensor
    there: Tensor
    route: EpRoute
    counted: Tensor
    experts: Tensor
    work: EpWork | None


def handle_parts(arrived: Arrived, rank: int, num_channels: int) -> list[Tensor]:
    """The entries of DeepEP's handle. A channel there is a part of each rank's tokens: tokens from
    c * ceil(n / C) on. Waits for no device."""
    route, is_in_rank = arrived.route, arrived.route.is_token_in_rank
    (tokens, size), home = is_in_rank.shape, is_in_rank.device
    prefix = arrived.table[:, :size].cumsum(0).int()
    prefix[:, rank] = route.ends
    steps = (arrived.table[:, size] + num_channels - 1) // num_channels
    step = -(-tokens // num_channels)
    begins = step * torch.arange(num_channels + 1, device=home)
    before = torch.zeros((tokens + 1, size), dtype=torch.int32, device=home)
    before[1:] = is_in_rank.int().cumsum(0)
    at = before[begins.clamp(max=tokens)]  # tokens for each rank ahead of each channel
    channel_prefix = at[1:].t().contiguous()
    first = torch.arange(tokens, device=home) // max(step, 1)
    send_head = (before[:-1] - at[first]).masked_fill(~is_in_rank, -1)
    # The rows of each rank that are ahead of each of its channels.
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
    rdma_prefix.index_add_(0, group, torch.diff(route.ends.long(), prepend=rdma_prefix[:1]))
    return [
        is_in_rank, at_hosts[1:].t().contiguous(), channel_prefix,
        (by_host.cumsum(1) - by_host).int(), rdma_prefix.cumsum(0).int(), recv_channel_prefix,
        route.ends.clone(), recv_src_idx, rdma_send_head, send_head,
    ]  # fmt: skip
