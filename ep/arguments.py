"""Checks of the arguments of the normal mode and of ElasticBuffer. Errors do not name the rank and
the operation: Exchange.call() adds them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor
Rows = Tensor | tuple[Tensor, Tensor]
MOST_NUMBER = 2**31 - 1
MOST_ELEMENTS = 2**48  # of a buffer: their bytes, of all ranks, still fit into 63 bits


def check_tensor(name: str, given: Any) -> None:
    """Refuses all that has no rows in memory of the host or of a device."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(given).__name__}")
    if given.layout != torch.strided or given.is_meta or given.is_quantized:
        kind = "quantized" if given.is_quantized else str(given.layout)
        raise ValueError(f"{name} is {kind} on {given.device}: give a plain tensor with memory")


def check_sizes(name: str, given: Any, dtype: torch.dtype, sizes: Sequence[int]) -> None:
    """Refuses all but a tensor of this dtype and of these sizes; -1 is any size."""
    check_tensor(name, given)
    fits = len(sizes) == given.dim() and all(
        due in (-1, size) for due, size in zip(sizes, given.shape, strict=True)
    )
    if given.dtype != dtype or not fits:
        wanted = ", ".join("any" if size < 0 else str(size) for size in sizes)
        raise ValueError(
            f"{name} is {_name(given.dtype)} {list(given.shape)}, expected {_name(dtype)} "
            f"[{wanted}]"
        )


def check_number(name: str, given: Any, least: int) -> None:
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"{name} must be an int, not {type(given).__name__}")
    if given < least:
        raise ValueError(f"{name} is {given}, the least is {least}")
    if given > MOST_NUMBER:
        raise ValueError(f"{name} is {given}, the most is {MOST_NUMBER}")


def check_room(least: int, **sizes: Any) -> None:
    """Refuses sizes of a buffer that are no numbers, or for which no memory suffices. Names the
    largest of them."""
    numbers: dict[str, int] = {}
    for name, given in sizes.items():
        if isinstance(given, bool) or not hasattr(given, "__index__"):
            raise TypeError(f"{name} must be an int, not {type(given).__name__}")
        numbers[name] = operator.index(given)
        if numbers[name] < least:
            raise ValueError(f"{name} is {given}, the least is {least}")
    largest = max(numbers, key=lambda name: numbers[name])
    if numbers[largest] > MOST_NUMBER or math.prod(numbers.values()) > MOST_ELEMENTS:
        raise ValueError(f"{largest} is {numbers[largest]}: no memory suffices for it")


def fields_of(x: Rows) -> list[Tensor]:
    """The rows, and their scales if there are any."""
    fields = list(x) if isinstance(x, tuple) else [x]
    if isinstance(x, tuple) and len(x) != 2:
        raise ValueError(f"x has {len(x)} parts: give rows, or a pair of rows and scales")
    for name, one in zip(("x", "the scales of x"), fields, strict=False):
        check_tensor(name, one)
    if len(fields) == 2 and fields[1].dim() == 1:
        fields[1] = fields[1].unsqueeze(1)  # a scale for each token
    for name, one in zip(("x", "the scales of x"), fields, strict=False):
        if one.dim() != 2 or one.size(1) == 0:
            raise ValueError(f"{name} has the sizes {list(one.shape)}, expected [n, h]")
    if len({len(one) for one in fields}) > 1:
        raise ValueError(f"x has {len(fields[0])} tokens, and scales for {len(fields[-1])}")
    return fields


def check_choices(topk_idx: Any) -> None:
    check_tensor("topk_idx", topk_idx)
    if topk_idx.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"topk_idx is {_name(topk_idx.dtype)}, expected int64 or int32")
    if topk_idx.dim() != 2 or topk_idx.size(1) == 0:
        raise ValueError(f"topk_idx has the sizes {list(topk_idx.shape)}, expected [n, k]")


def check_topk(topk_idx: Tensor, topk_weights: Tensor | None, tokens: int) -> None:
    check_choices(topk_idx)
    if len(topk_idx) != tokens:
        raise ValueError(f"topk_idx has the sizes {list(topk_idx.shape)}, x has {tokens} tokens")
    if topk_weights is not None:
        check_sizes("topk_weights", topk_weights, torch.float32, topk_idx.shape)


def check_experts(topk_idx: Tensor, num_experts: int, refuses_negative: bool = True) -> None:
    """Refuses numbers of no expert. -1 stands for none, and without `refuses_negative` all other
    numbers below 0 do so too."""
    if topk_idx.numel() == 0:
        return
    for wrong in (int(topk_idx.max()), int(topk_idx.min())):
        if wrong >= num_experts or (refuses_negative and wrong < -1):
            raise ValueError(f"topk_idx names expert {wrong} of {num_experts}: -1 stands for none")


def check_sums(x: Tensor, least: int, hidden: int, biases: Sequence[Tensor], tokens: int) -> None:
    """The rows and the biases of a combine. least: rows of its dispatch"""
    check_sizes("x", x, torch.bfloat16, (-1, hidden))
    if len(x) < least:
        raise ValueError(f"x has {len(x)} rows, the dispatch received {least}")
    if len(biases) > 2:
        raise ValueError(f"bias has {len(biases)} tensors: give one, or two")
    for one in biases:
        check_sizes("bias", one, torch.bfloat16, (tokens, hidden))


# Names of arguments that all ranks have to give alike, and their values: of a tensor the dtype and
# the columns count.
Agreed = list[tuple[str, int | Tensor | None]]


def form_of(fields: Sequence[Tensor | None]) -> Agreed:
    return list(zip(("x", "the scales of x", "topk_idx", "topk_weights"), fields, strict=True))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
