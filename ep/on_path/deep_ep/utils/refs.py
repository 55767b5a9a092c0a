"""Dispatch and combine by all_to_all_single of the default group, to compare with."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from .envs import get_global_seed

Tensor = torch.Tensor
Rows = Tensor | tuple[Tensor, Tensor]


def dispatch(
    x: Rows,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_max_tokens_per_rank: int,
    num_experts: int,
) -> tuple[Rows, Tensor, Tensor, Tensor, Tensor]:
    """Returns the received rows in the order of rank and token, as the given ones; their top-k
    with numbers among this rank's experts or -1; their weights; source rank * T + token; and the
    number of rows from each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    per_rank = num_experts // size
    owners = torch.where(topk_idx >= 0, topk_idx // per_rank, -1)
    tokens = [(owners == other).any(dim=1).nonzero().flatten() for other in range(size)]
    sent = torch.tensor([len(one) for one in tokens])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    order, counts = torch.cat(tokens), (received.tolist(), sent.tolist())

    def exchanged(field: Tensor) -> Tensor:
        given = field[order].contiguous().view(torch.uint8)
        found = given.new_empty((sum(counts[0]), given.size(1)))
        dist.all_to_all_single(found, given, *counts)
        return found.view(field.dtype)

    rows = tuple(exchanged(one) for one in (x if isinstance(x, tuple) else (x,)))
    chosen = exchanged(topk_idx)
    is_mine = (chosen >= rank * per_rank) & (chosen < (rank + 1) * per_rank)
    numbers = torch.arange(len(topk_idx)) + rank * num_max_tokens_per_rank
    sources = exchanged(numbers.int().unsqueeze(1)).flatten()
    return (
        (rows[0], rows[1]) if len(rows) == 2 else rows[0],
        torch.where(is_mine, chosen - rank * per_rank, -1),
        exchanged(topk_weights),
        sources,
        received.int(),
    )


def generate_pre_combine_data(
    src_token_global_idx: Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Tensor:
    """bfloat16 [rows, k, h]: an answer for each choice of a token, the same on all ranks."""
    numbers = src_token_global_idx.unsqueeze(1).long() * num_topk + torch.arange(num_topk)
    steps = (numbers * 40503 % 65536).float() / 65536
    angles = steps.unsqueeze(2) * torch.arange(1, hidden + 1, dtype=torch.float32)
    return torch.sin(angles + math.cos(get_global_seed())).bfloat16()


def ordered_accumulate(data: Tensor, initial_value: Tensor | None = None) -> Tensor:
    """[n, k, h] -> [n, h]: sums in float32 in the order of k, rounded once to the dtype of data.
    initial_value: float32 [n, h]"""
    shape = (data.size(0), data.size(2))
    total = torch.zeros(shape, dtype=torch.float32) if initial_value is None else initial_value
    for place in range(data.size(1)):
        total = total + data[:, place].float()
    return total.to(data.dtype)


def combine(
    y: Tensor,
    topk_idx: Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Tensor | tuple[Tensor, Tensor] | None,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> Tensor:
    """[n, k, h] -> [n, h]. The choices of a rank are added and rounded first if reduce_in_local,
    then the choices of a scale-up domain if reduce_in_scaleup."""
    per_rank = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_local:
        y = _grouped(y, torch.div(topk_idx, per_rank, rounding_mode="floor"))
    if reduce_in_scaleup:
        domain = per_rank * num_scaleup_ranks
        y = _grouped(y, torch.div(topk_idx, domain, rounding_mode="floor"))
    biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
    initial = sum((one.float() for one in biases[1:]), biases[0].float()) if biases else None
    return ordered_accumulate(y, initial)


def _grouped(y: Tensor, groups: Tensor) -> Tensor:
    """The sum of a group stands in the place of its last member, zeros in the other places."""
    summed = torch.zeros_like(y)
    for place in range(y.size(1)):
        is_last = (groups[:, place + 1 :] != groups[:, place : place + 1]).all(dim=1)
        members = groups[:, : place + 1] == groups[:, place : place + 1]
        total = torch.zeros(y[:, 0].shape, dtype=torch.float32)
        for earlier in range(place + 1):
            total += torch.where(members[:, earlier, None], y[:, earlier].float(), 0)
        summed[:, place] = torch.where(is_last[:, None], total, 0).to(y.dtype)
    return summed
