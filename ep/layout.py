"""Where the tokens of a dispatch of the normal mode go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import reference

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
    owners = torch.tensor(
        reference.default_owners(num_experts, num_ranks), device=topk_idx.device, dtype=torch.int64
    )
    chosen = topk_idx.to(torch.int64)
    is_none = chosen < 0
    if bool((chosen >= num_experts).any()):
        raise ValueError(f"topk_idx names expert {int(chosen.max())} of {num_experts}")
    ranks = owners[chosen.clamp(min=0)].masked_fill(is_none, num_ranks)
    is_token_in_rank = torch.zeros(
        (len(chosen), num_ranks + 1), dtype=torch.bool, device=topk_idx.device
    )
    is_token_in_rank.scatter_(1, ranks, True)
    is_token_in_rank = is_token_in_rank[:, :num_ranks].contiguous()
    experts = torch.bincount(chosen[~is_none], minlength=num_experts)
    per_rdma_rank = None
    if num_ranks > RANKS_PER_RDMA_RANK:
        of_hosts = is_token_in_rank.split(RANKS_PER_RDMA_RANK, dim=1)
        per_rdma_rank = torch.stack([one.any(dim=1).sum() for one in of_hosts]).int()
    return Layout(is_token_in_rank.sum(0).int(), per_rdma_rank, experts.int(), is_token_in_rank)
