"""FP8 with a scale for each block of channels, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # channels that share a scale
FP8_MAX = 448.0
_SMALLEST_AMAX = 1e-4
_EXPONENT_AT = 23  # bits of float32 below the exponent


def cast_to_fp8(x: Tensor, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """bfloat16 [n, h] -> float8_e4m3fn [n, h] and float32 scales [n, ceil(h / 128)]. The last block
    may be short. A NaN is ignored when a block's largest channel is determined."""
    blocks = _in_blocks(x.float())
    sizes = blocks.abs().nan_to_num(nan=0.0, posinf=float("inf"))
    amax = sizes.amax(dim=2, keepdim=True).clamp(min=_SMALLEST_AMAX)
    scales, factors = amax / FP8_MAX, torch.full_like(amax, FP8_MAX) / amax  # not 1 / scales
    if round_scale:
        scales = _round_up_to_power_of_two(scales)
        factors = 1.0 / scales
    cast = (blocks * factors).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return cast.flatten(1)[:, : x.size(1)].contiguous(), scales.squeeze(2)


def cast_back(cast: Tensor, scales: Tensor) -> Tensor:
    """Converts FP8 with float32 or packed scales to bfloat16."""
    if scales.dtype == torch.int32:
        scales = unpack_ue8m0(scales, -(-cast.size(1) // BLOCK))
    rows = _in_blocks(cast.float()) * scales.unsqueeze(2)
    return rows.flatten(1)[:, : cast.size(1)].bfloat16()


def pack_ue8m0(scales: Tensor) -> Tensor:
    """Packs the exponents of powers of two, four in an int32, the first one in the lowest byte."""
    exponents = scales.view(torch.int32) >> _EXPONENT_AT
    padded = torch.nn.functional.pad(exponents, (0, -exponents.size(1) % 4))
    return _in_order(padded.to(torch.uint8)).view(torch.int32)


def unpack_ue8m0(packed: Tensor, count: int) -> Tensor:
    exponents = _in_order(packed).view(torch.uint8).to(torch.int32)[:, :count]
    return (exponents << _EXPONENT_AT).view(torch.float32)


def _in_order(x: Tensor) -> Tensor:
    """Copies to standard strides. contiguous() keeps the strides of dimensions with at most one
    element, and view() refuses them."""
    return x.clone(memory_format=torch.contiguous_format)


def _in_blocks(x: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.size(1) % BLOCK))
    return padded.view(len(x), padded.size(1) // BLOCK, BLOCK)


def _round_up_to_power_of_two(values: Tensor) -> Tensor:
    bits = values.view(torch.int32)
    has_fraction = (bits & ((1 << _EXPONENT_AT) - 1)) != 0
    return (((bits >> _EXPONENT_AT) + has_fraction) << _EXPONENT_AT).view(torch.float32)
