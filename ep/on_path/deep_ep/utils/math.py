"""Casts, comparisons and choices of experts."""

from __future__ import annotations

import torch

from mooncake.ep import fp8

Tensor = torch.Tensor


def calc_diff(x: Tensor, y: Tensor) -> float:
    """0 for the same, 1 for what has nothing in common: 1 - 2<x,y> / (<x,x> + <y,y>), with 1 added
    to both so that zeros count."""
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [n, h], float32 scales [n, ceil(h / 128)]"""
    values, scales = fp8.cast_to_fp8(x)
    return values, scales


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """bfloat16; of scales, or of four exponents in each int32."""
    if x_fp8.numel() == 0:
        return x_fp8.bfloat16()
    rows: Tensor = fp8.cast_back(x_fp8, x_scales.reshape(len(x_fp8), -1))
    return rows


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Each row of x, whose values are below num_slots or negative, holds each value only once
    then, in ascending order, and is filled up with -1."""
    is_there = torch.zeros(len(x), num_slots + 1, dtype=torch.bool, device=x.device)
    is_there.scatter_(1, torch.where(x < 0, num_slots, x).long(), True)
    slots = torch.arange(num_slots, device=x.device)
    ordered = torch.where(is_there[:, :num_slots], slots, num_slots).sort(dim=1).values
    width = min(num_slots, x.size(1))
    x.fill_(-1)
    x[:, :width] = torch.where(ordered == num_slots, -1, ordered)[:, :width].to(x.dtype)


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """scores [n, E] as they are for experts of each row's groups, group_idx [n, g], 0 elsewhere."""
    chosen = torch.zeros(len(scores), num_groups, dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx, True)
    return scores * chosen.repeat_interleave(scores.size(1) // num_groups, dim=1)


def hash_tensor(t: Tensor) -> int:
    """Of its bytes: the sum of 8 at a time."""
    some = t.flatten().view(torch.uint8)
    return int(torch.nn.functional.pad(some, (0, -len(some) % 8)).view(torch.int64).sum())
