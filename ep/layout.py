"""Where the tokens of a dispatch of the normal mode go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor
RANKS_PER_RDMA_RANK = 8  # ranks of a host, for DeepEP
CPU = torch.device("cpu")  # named in each call, since programs set another default


@dataclass(frozen=True)
class Layout:
    """Where tokens go, see Buffer.get_dispatch_layout()."""

    num_tokens_per_rank: Tensor
    num_tokens_per_rdma_rank: Tensor | None
    num_tokens_per_expert: Tensor
    is_token_in_rank: Tensor


def layout_of(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Waits for no device. There, an expert that does not exist is none. On the CPU it is an
    error."""
    home = topk_idx.device
    owners = owners_of(num_experts, num_ranks, home)
    chosen = topk_idx.to(torch.int64)
    is_none = (chosen < 0) | (chosen >= num_experts)
    if home == CPU and bool((chosen >= num_experts).any()):
        raise ValueError(f"topk_idx names expert {int(chosen.max())} of {num_experts}")
    ranks = owners[chosen.masked_fill(is_none, 0)].masked_fill(is_none, num_ranks)
    is_token_in_rank = torch.zeros((len(chosen), num_ranks + 1), dtype=torch.bool, device=home)
    is_token_in_rank.scatter_(1, ranks, True)
    is_token_in_rank = is_token_in_rank[:, :num_ranks].contiguous()
    experts = torch.zeros(num_experts + 1, dtype=torch.int64, device=home)
    named = chosen.masked_fill(is_none, num_experts).flatten()
    experts = experts.scatter_add_(0, named, torch.ones_like(named))[:num_experts]
    per_rdma_rank = None
    if num_ranks > RANKS_PER_RDMA_RANK:
        of_hosts = is_token_in_rank.split(RANKS_PER_RDMA_RANK, dim=1)
        per_rdma_rank = torch.stack([one.any(dim=1).sum() for one in of_hosts]).int()
    return Layout(is_token_in_rank.sum(0).int(), per_rdma_rank, experts.int(), is_token_in_rank)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on the device, for which the host does not wait; on the CPU itself."""
    return tensor if device == CPU else tensor.pin_memory().to(device, non_blocking=True)


def keep_until_passed(*tensors: Tensor) -> None:
    """Keeps the memory of a device's tensors until its current stream has passed its work so far,
    also if they are of another stream and are dropped before that."""
    for one in tensors:
        if one.device != CPU:
            one.record_stream(torch.accelerator.current_stream(one.device))


def owners_of(num_experts: int, num_ranks: int, device: torch.device) -> Tensor:
    """int64 [E]: reference.default_owners(), made on the device."""
    share, rest = divmod(num_experts, num_ranks)
    experts = torch.arange(num_experts, device=device)
    later = experts - rest * (share + 1)
    early = torch.div(experts, share + 1, rounding_mode="floor")
    return torch.where(
        later < 0, early, rest + torch.div(later, max(1, share), rounding_mode="floor")
    )


def local_range(num_experts: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """The first expert of a rank, and the number of its experts, as owners_of() has them."""
    share, rest = divmod(num_experts, num_ranks)
    return rank * share + min(rank, rest), share + (rank < rest)


def local_experts_of(chosen: Tensor, first: int, count: int) -> Tensor:
    """Experts as numbers among the `count` ones from `first` on; -1 for all other experts."""
    local = chosen - first
    return local.masked_fill_((local < 0) | (local >= count), -1)


def layout_by_topk(
    topk_idx: Tensor, owners: Tensor, num_ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """topk_idx: int64 [n, k], -1 is no expert; owners: int64 [E], the rank of each expert, on the
    same device. Waits for no device.

    Returns
    is_token_in_rank: bool [n, R]
    token_ranks: int32 [n, any]: the ranks of each token in the order of their last places in
        top-k. On the CPU -1 behind them, else between them
    masters: int32 [n, k]: the rank at its last place, -1 elsewhere
    """
    (tokens, topk), home = topk_idx.shape, topk_idx.device
    ranks = owners[topk_idx.clamp(min=0)].masked_fill(topk_idx < 0, -1)
    is_later = torch.ones((topk, topk), dtype=torch.bool, device=home).triu(1)
    is_again = ((ranks.unsqueeze(2) == ranks.unsqueeze(1)) & is_later).any(dim=2)
    masters = ranks.masked_fill(is_again, -1).int()
    is_in_rank = torch.zeros((tokens, num_ranks + 1), dtype=torch.bool, device=home)
    is_in_rank.scatter_(1, ranks.masked_fill(ranks < 0, num_ranks), True)
    is_in_rank = is_in_rank[:, :num_ranks].contiguous()
    if home != CPU:
        return is_in_rank, masters, masters
    most = max(1, int(is_in_rank.sum(1).max())) if tokens > 0 else 1
    order = torch.argsort((masters < 0).int(), dim=1, stable=True)
    return is_in_rank, masters.gather(1, order)[:, :most].contiguous(), masters
