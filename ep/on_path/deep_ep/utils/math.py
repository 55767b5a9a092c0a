"""Casts, comparisons and choices of experts."""

from __future__ import annotations

from typing import Any

import torch

from mooncake_backend.ep import fp8

Tensor = torch.Tensor


def calc_diff(x: Tensor, y: Tensor) -> float:
    """0 for equal tensors, 1 for orthogonal ones: 1 - 2<x,y> / (<x,x> + <y,y>), with 1 added to all
    elements so that zeros count."""
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The least multiple of y from x on."""
    return ceil_div(x, y) * y


def safe_div(a: float, b: float) -> float:
    """a / b, and 0 for 0 / 0."""
    return 0 if a == 0 and b == 0 else a / b


def count_bytes(*tensors: Any) -> int:
    """Of tensors, and of tensors in tuples and lists; None counts as 0."""
    total = 0
    for one in tensors:
        if isinstance(one, (tuple, list)):
            total += count_bytes(*one)
        elif one is not None:
            total += one.numel() * one.element_size()
    return total


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [n, h], float32 scales [n, ceil(h / 128)]"""
    values, scales = fp8.cast_to_fp8(x)
    return values, scales


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """Converts to bfloat16. x_scales: float32 scales, or int32 with four exponents in each."""
    if x_fp8.numel() == 0:
        return x_fp8.bfloat16()
    rows: Tensor = fp8.cast_back(x_fp8, x_scales.reshape(len(x_fp8), -1))
    return rows


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Sorts each row of x, keeps each value once, drops negative ones, and fills up with -1. All
    values must be below num_slots."""
    is_there = torch.zeros(len(x), num_slots + 1, dtype=torch.bool, device=x.device)
    is_there.scatter_(1, torch.where(x < 0, num_slots, x).long(), True)
    slots = torch.arange(num_slots, device=x.device)
    ordered = torch.where(is_there[:, :num_slots], slots, num_slots).sort(dim=1).values
    width = min(num_slots, x.size(1))
    x.fill_(-1)
    x[:, :width] = torch.where(ordered == num_slots, -1, ordered)[:, :width].to(x.dtype)


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """scores [n, E] with 0 for all experts outside of a row's groups, group_idx [n, g]."""
    chosen = torch.zeros(len(scores), num_groups, dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx, True)
    return scores * chosen.repeat_interleave(scores.size(1) // num_groups, dim=1)


def hash_tensor(t: Tensor) -> int:
    """The sum of the tensor's bytes, 8 at a time as int64."""
    some = t.flatten().view(torch.uint8)
    return int(torch.nn.functional.pad(some, (0, -len(some) % 8)).view(torch.int64).sum())
