"""Rows for each expert of a rank in place of one for each token: the expanded form of
ElasticBuffer."""

from __future__ import annotations

import torch

from .layout import CPU

Tensor = torch.Tensor


def aligned(count: int, to: int) -> int:
    return -(-count // to) * to


class Expansion:
    """The rows of an expert stand side by side, in the order of the received rows, and begin at a
    multiple of the alignment. All tensors are the CPU's.

    local: [rows, k], numbers of the rank's experts, -1 is none
    """

    def __init__(self, local: Tensor, num_local_experts: int, alignment: int) -> None:
        chosen = local.flatten().long()
        places = (chosen >= 0).nonzero().flatten()
        experts = chosen[places]
        counts = torch.bincount(experts, minlength=num_local_experts)
        room = -(-counts // alignment) * alignment
        begins = room.cumsum(0) - room
        order = torch.argsort(experts, stable=True)
        first = (counts.cumsum(0) - counts)[experts[order]]
        rank_in_expert = torch.arange(len(order), device=CPU) - first
        slots = torch.full((chosen.numel(),), -1, dtype=torch.int64, device=CPU)
        slots[places[order]] = begins[experts[order]] + rank_in_expert
        self.slots = slots.view(local.shape)  # the row of each choice, -1 is none
        self.ends = begins + counts  # [L]: the rows up to the last one of the expert
        self.num_rows = int(room.sum())  # with those between the experts
        self._sources = torch.full((self.num_rows,), -1, dtype=torch.int64, device=CPU)
        self._sources[self.slots[local >= 0]] = torch.div(
            places, max(1, local.size(1)), rounding_mode="floor"
        )

    def expand(self, field: Tensor, out: Tensor) -> Tensor:
        """[rows, any] -> out [count, any]. Rows between the experts are zeros; those from num_rows
        on are not written."""
        whole = out[: self.num_rows]
        if len(field) == 0:
            whole.zero_()
            return out
        # As bytes: not every dtype of FP8 can be indexed.
        torch.index_select(_bytes(field), 0, self._sources.clamp(min=0), out=_bytes(whole))
        _bytes(whole)[self._sources < 0] = 0
        return out

    def expand_weights(self, weights: Tensor, count: int) -> Tensor:
        """float32 [rows, k] -> [count]: of each choice the weight."""
        out = weights.new_empty(count)
        out[: self.num_rows] = 0
        are_there = self.slots >= 0
        out[self.slots[are_there]] = weights[are_there]
        return out

    def fold(self, x: Tensor) -> Tensor:
        """bfloat16 [num_rows, h] -> [rows, h]: the sums over a row's choices in their order, made
        in float32 and rounded once."""
        sums = torch.zeros((len(self.slots), x.size(1)), dtype=torch.float32, device=CPU)
        for slots in self.slots.t():
            rows = (slots >= 0).nonzero().flatten()
            sums[rows] += x[slots[rows]].float()
        return sums.to(x.dtype)

    def fold_weights(self, weights: Tensor) -> Tensor:
        """float32 [num_rows] -> [rows, k]."""
        of_choices = weights[self.slots.clamp(min=0)]
        return of_choices.masked_fill(self.slots < 0, 0)


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8)
