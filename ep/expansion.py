"""Rows for each expert of a rank in place of one for each token: the expanded form of
ElasticBuffer."""

from __future__ import annotations

import torch

from .layout import CPU, keep_until_passed, on_device

Tensor = torch.Tensor


def aligned(count: int, to: int) -> int:
    return -(-count // to) * to


class Expansion:
    """The rows of an expert stand side by side, in the order of the received rows, and begin at a
    multiple of the alignment. All tensors are on the device of `local`. Waits for no device.

    local: [rows, k], numbers of the rank's experts, -1 is none
    num_rows: of the expanded form; None: as many as there are, on the CPU
    room: int64 [num_local_experts]: rows from each expert's first one to the next expert's; None:
        their counts, aligned
    """

    def __init__(
        self,
        local: Tensor,
        num_local_experts: int,
        alignment: int,
        num_rows: int | None = None,
        room: Tensor | None = None,
    ) -> None:
        home, none = local.device, num_local_experts
        self._is_on_cpu = home == CPU
        self._copies: dict[torch.Stream, Expansion] = {}  # see on()
        chosen = local.flatten().long()
        places = torch.arange(chosen.numel(), device=home)
        if self._is_on_cpu:
            places = (chosen >= 0).nonzero().flatten()
        experts = chosen[places]
        experts = experts.masked_fill(experts < 0, none)
        counts = torch.zeros(none + 1, dtype=torch.int64, device=home)
        counts.scatter_add_(0, experts, torch.ones_like(experts))
        if room is None:
            room = -(-counts[:none] // alignment) * alignment
        begins = torch.cat([room.new_zeros(1), room.cumsum(0)])  # the last one: of no expert
        order = torch.argsort(experts, stable=True)
        of_order = experts[order]
        first = (counts.cumsum(0) - counts)[of_order]
        rows = begins[of_order] + torch.arange(len(order), device=home) - first
        self.num_rows = int(room.sum()) if num_rows is None else num_rows
        is_none = (of_order == none) | (rows >= self.num_rows)
        slots = torch.full((chosen.numel(),), -1, dtype=torch.int64, device=home)
        slots[places[order]] = rows.masked_fill(is_none, -1)
        self.slots = slots.view(local.shape)  # the row of each choice, -1 is none
        self.ends = (begins + counts)[:none]  # [L]: the rows up to the last one of the expert
        # The received row of each row, -1 is none. The last element is written for no row.
        sources = torch.full((self.num_rows + 1,), -1, dtype=torch.int64, device=home)
        of_places = torch.div(places[order], max(1, local.size(1)), rounding_mode="floor")
        sources[rows.masked_fill(is_none, self.num_rows)] = of_places
        self.sources = sources[: self.num_rows]

    def on(self, device: torch.device) -> Expansion:
        """The same on this device, for its current stream. The host does not wait for it. Each
        stream has a copy of its own, made in its order."""
        if device == self.slots.device:
            keep_until_passed(self.slots, self.ends, self.sources)
            return self
        stream = torch.accelerator.current_stream(device)
        if stream not in self._copies:
            copy = object.__new__(Expansion)
            copy._is_on_cpu = False
            copy._copies = {}
            copy.num_rows = self.num_rows
            copy.slots, copy.ends, copy.sources = (
                on_device(one, device) for one in (self.slots, self.ends, self.sources)
            )
            self._copies[stream] = copy
        return self._copies[stream]

    def expand(self, field: Tensor, out: Tensor) -> Tensor:
        """[rows, any] -> out [count, any]. Rows between the experts are zeros; rows from num_rows
        on are not written."""
        whole = out[: self.num_rows]
        if len(field) == 0:
            whole.zero_()
            return out
        # As bytes: not every dtype of FP8 can be indexed.
        torch.index_select(_bytes(field), 0, self.sources.clamp(min=0), out=_bytes(whole))
        if self._is_on_cpu:
            _bytes(whole)[self.sources < 0] = 0
        else:
            _bytes(whole).masked_fill_((self.sources < 0).unsqueeze(1), 0)
        return out

    def expand_weights(self, weights: Tensor, count: int) -> Tensor:
        """float32 [rows, k] -> [count]: of each choice the weight."""
        out = weights.new_zeros(max(count, self.num_rows) + 1)
        out[self.slots.masked_fill(self.slots < 0, len(out) - 1).flatten()] = weights.flatten()
        return out[:count]

    def places(self) -> Tensor:
        """int64 [num_rows]: the place in top-k of each row's choice; any number for no choice."""
        topk = self.slots.size(1)
        found = self.slots.new_zeros(self.num_rows + 1)
        rows = self.slots.masked_fill(self.slots < 0, self.num_rows).flatten()
        found[rows] = torch.arange(len(rows), device=found.device) % max(1, topk)
        return found[: self.num_rows]

    def fold(self, x: Tensor) -> Tensor:
        """bfloat16 [num_rows, h] -> [rows, h]: the sums over a row's choices in their order, made
        in float32 and rounded once."""
        sums = torch.zeros((len(self.slots), x.size(1)), dtype=torch.float32, device=x.device)
        for slots in self.slots.t():
            if self._is_on_cpu:
                rows = (slots >= 0).nonzero().flatten()
                sums[rows] += x[slots[rows]].float()
            elif self.num_rows > 0:
                is_none = (slots < 0).unsqueeze(1)
                sums += x[slots.clamp(min=0)].float().masked_fill_(is_none, 0)
        return sums.to(x.dtype)

    def fold_weights(self, weights: Tensor) -> Tensor:
        """float32 [num_rows] -> [rows, k]."""
        if len(weights) == 0:
            return weights.new_zeros(self.slots.shape)
        of_choices = weights[self.slots.clamp(min=0)]
        return of_choices.masked_fill(self.slots < 0, 0)


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8)
