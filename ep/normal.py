"""DeepEP's normal mode: dispatch and combine of which only all ranks' tokens tell the sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import reference
from .events import EventOverlap, Operation, profiled
from .layout import CPU, Layout
from .normal_handle import Arrived, NormalHandle, Piece, Route, counts_of, handle_parts, padded

if TYPE_CHECKING:
    from mooncake_backend._C import EpWork

    from .runtime import Runtime

Tensor = torch.Tensor
Rows = Tensor | tuple[Tensor, Tensor]
_MOST_WEIGHTS = 32  # of a token, for which there is room in a combine after a dispatch without any


@dataclass(frozen=True)
class Participation:
    """Who takes part in a call, see Buffer.low_latency_dispatch()."""

    active_ranks: Tensor | None
    timeout_us: int

    def among(self, participants: Tensor) -> Tensor:
        """int32 [R]: those of `participants` that the caller does not mask."""
        mask = participants.int()
        if self.active_ranks is not None:
            mask &= (self.active_ranks[: len(mask)].to(CPU) != 0).int()
        return mask

    def show(self, participants: Tensor) -> None:
        if self.active_ranks is not None:
            gone = (~participants).to(self.active_ranks.device)
            self.active_ranks[: len(gone)].masked_fill_(gone, 0)


@dataclass(frozen=True)
class Shown:
    """The form of a dispatch's results, see Buffer.dispatch()."""

    expert_alignment: int
    num_worst_tokens: int
    num_channels: int


@dataclass(frozen=True)
class Received:
    rows: Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_per_expert: list[int]
    handle: NormalHandle


class Works:
    """The works of the pieces of one combine."""

    def __init__(self, works: Sequence[EpWork]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()


class NormalMode:
    """Both calls, over a native buffer. Tensors of a device go through host memory, and a call with
    them blocks the host until its end."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last_combine: Operation | None = None

    # ---- dispatch

    def dispatch(
        self,
        x: Rows,
        layout: Layout,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        shown: Shown,
        who: Participation,
    ) -> Received:
        size, rank = self._runtime.size, self._runtime.rank
        fields, home = _fields_of(x), _fields_of(x)[0].device
        num_fields, tokens = len(fields), len(fields[0])
        if topk_idx is not None and topk_weights is not None:
            _check_topk(topk_idx, topk_weights, tokens)
            fields += [topk_idx, topk_weights]
        elif topk_idx is not None or topk_weights is not None:
            raise ValueError("topk_idx and topk_weights belong together: give both or none")
        elif shown.num_worst_tokens > 0:
            raise ValueError("num_worst_tokens needs topk_idx and topk_weights")
        is_in_rank = layout.is_token_in_rank.to(CPU).contiguous()
        if tuple(is_in_rank.shape) != (tokens, size):
            raise ValueError(
                f"is_token_in_rank has the sizes {list(is_in_rank.shape)}, expected "
                f"{[tokens, size]}"
            )
        num_experts = len(layout.num_tokens_per_expert)
        everybody = torch.ones(size, dtype=torch.bool, device=CPU)
        with profiled("dispatch"):
            numbers, participants = self._runtime.native.count_tokens(
                [tokens, *is_in_rank.sum(0).tolist(), *layout.num_tokens_per_expert.tolist()],
                who.among(everybody),
                who.timeout_us,
            )
            counts = torch.tensor(numbers, dtype=torch.int64, device=CPU)
            most_tokens = int(counts[:, 0].max())
            arrived = self._send(_on_host(fields), is_in_rank, most_tokens, participants, who)
        counts[~torch.tensor(arrived.route.participants, device=CPU)] = 0
        owners = torch.tensor(
            reference.default_owners(num_experts, size), dtype=torch.int64, device=CPU
        )
        experts = counts[:, 1 + size :].sum(0)[owners == rank].tolist()
        align = shown.expert_alignment
        per_expert = [-(-count // align) * align for count in experts]
        found, num_rows = list(arrived.fields), arrived.route.num_rows
        if shown.num_worst_tokens > 0:
            if num_rows > shown.num_worst_tokens:
                raise ValueError(
                    f"rank {rank} receives {num_rows} tokens, num_worst_tokens is "
                    f"{shown.num_worst_tokens}"
                )
            per_expert = []
            found = [padded(one, shown.num_worst_tokens) for one in found]
        recv_idx = recv_weights = None
        if topk_idx is not None:
            local = _local(found[-2], owners, rank)
            local[num_rows:] = -1
            recv_idx = local.to(home)
            recv_weights = found[-1].masked_fill(local < 0, 0).to(home)
        parts = handle_parts(arrived, counts, rank, shown.num_channels, shown.num_worst_tokens)
        handle = NormalHandle([part.to(home) for part in parts], arrived.route)
        return Received(
            _rows_of(found[:num_fields], home), recv_idx, recv_weights, per_expert, handle
        )

    def dispatch_again(
        self, x: Rows, handle: NormalHandle, who: Participation
    ) -> tuple[Rows, NormalHandle]:
        route, fields = self._route_of(handle), _fields_of(x)
        if len(fields[0]) != route.tokens:
            raise ValueError(
                f"x has {len(fields[0])} tokens, those of the handle's dispatch were {route.tokens}"
            )
        with profiled("dispatch"):
            arrived = self._send(
                _on_host(fields), route.is_token_in_rank, route.most_tokens, route.participants, who
            )
        home = fields[0].device
        return _rows_of(arrived.fields, home), NormalHandle(handle, arrived.route)

    def _send(
        self,
        fields: list[Tensor],
        is_in_rank: Tensor,
        most_tokens: int,
        participants: Sequence[bool],
        who: Participation,
    ) -> Arrived:
        """Dispatches in as many pieces as the buffer's memory asks for. All ranks compute the same
        number, and each piece has the same tokens of every rank."""
        native, tokens, hidden = self._runtime.native, len(fields[0]), fields[0].size(1)
        weights = fields[-1].size(1) if len(fields) > 2 else _MOST_WEIGHTS
        room = native.most_tokens(
            [one.size(1) * one.dtype.itemsize for one in fields], hidden, weights
        )
        if room <= 0:
            raise ValueError(
                f"rank {self._runtime.rank}: the normal mode has {native.num_bytes} bytes, too few "
                f"for one token of each of {self._runtime.size} ranks: make num_nvl_bytes larger"
            )
        count = max(1, -(-most_tokens // room))
        step = max(1, -(-most_tokens // count))
        there = torch.tensor(participants, dtype=torch.bool, device=CPU)
        bounds, found = [], []
        for number in range(count):
            begin, end = min(number * step, tokens), min((number + 1) * step, tokens)
            some = [one[begin:end] for one in fields]
            mask = who.among(there)
            found.append(
                native.dispatch_tokens(
                    some, is_in_rank[begin:end], step, hidden, mask, who.timeout_us
                )
            )
            bounds.append((begin, end))
            there = there & torch.tensor(found[-1][3], dtype=torch.bool, device=CPU)
        who.show(there)
        if count == 1:
            rows, sources, ends, _, handle = found[0]
            pieces = [Piece(0, tokens, handle, None)]
        else:
            rows, sources, ends, of_pieces = _joined(found, step, there)
            handles = [one[4] for one in found]
            pieces = [
                Piece(*bound, handle, of_piece)
                for bound, handle, of_piece in zip(bounds, handles, of_pieces, strict=True)
            ]
        route = Route(
            self._runtime, tokens, hidden, most_tokens, len(sources), is_in_rank,
            there.tolist(), pieces,
        )  # fmt: skip
        return Arrived(rows, sources, ends, route)

    # ---- combine

    def combine(
        self,
        x: Tensor,
        handle: NormalHandle,
        topk_weights: Tensor | None,
        biases: Sequence[Tensor],
        who: Participation,
        async_finish: bool,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        route, home = self._route_of(handle), x.device
        if len(x) < route.num_rows:
            raise ValueError(f"x has {len(x)} rows, the dispatch received {route.num_rows}")
        x, *on_host = _on_host([x, *biases])
        sums = torch.empty((route.tokens, route.hidden), dtype=torch.bfloat16, device=CPU)
        missing = torch.empty(route.tokens, dtype=torch.bool, device=CPU)
        weights = weight_sums = None
        if topk_weights is not None:
            weights = _on_host([topk_weights])[0]
            sizes = (route.tokens, weights.size(1))
            weight_sums = torch.empty(sizes, dtype=torch.float32, device=CPU)
        there = torch.tensor(route.participants, dtype=torch.bool, device=CPU)
        mask = who.among(there)
        works = []
        with profiled("combine"):
            for piece in route.pieces:
                tokens = slice(piece.begin, piece.end)
                works.append(
                    self._runtime.native.combine_tokens(
                        piece.of(x, route.num_rows),
                        piece.native,
                        sums[tokens],
                        missing[tokens],
                        None if weights is None else piece.of(weights, route.num_rows),
                        None if weight_sums is None else weight_sums[tokens],
                        [one[tokens] for one in on_host],
                        mask,
                        who.timeout_us,
                        async_finish and home.type == "cpu",
                    )
                )
        operation = Operation("combine", Works(works), missing.to(home))
        self._last_combine = operation
        event = EventOverlap.of(operation, asynchronous=async_finish)
        return sums.to(home), None if weight_sums is None else weight_sums.to(home), event

    def missing_contributions(self) -> Tensor:
        if self._last_combine is None:
            raise RuntimeError(f"rank {self._runtime.rank}: this Buffer has combined nothing yet")
        return self._last_combine.missing_contributions()

    def _route_of(self, handle: Any) -> Route:
        if not isinstance(handle, NormalHandle):
            raise TypeError(
                f"rank {self._runtime.rank}: handle must be the object that dispatch returned, not "
                f"{type(handle).__name__}; a copy of its parts does not suffice"
            )
        if handle.route.runtime is not self._runtime:
            raise ValueError("the handle is of a dispatch of another buffer")
        return handle.route


def _fields_of(x: Any) -> list[Tensor]:
    """The rows, and their scales if there are any."""
    fields = list(x) if isinstance(x, tuple) else [x]
    for name, one in zip(("x", "the scales of x"), fields, strict=False):
        if not isinstance(one, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(one).__name__}")
        if one.dim() != 2:
            raise ValueError(f"{name} has {one.dim()} dimensions, expected 2")
    if len({len(one) for one in fields}) > 1:
        raise ValueError(f"x has {len(fields[0])} tokens, and scales for {len(fields[-1])}")
    return fields


def _rows_of(fields: Sequence[Tensor], home: torch.device) -> Rows:
    moved = [one.to(home) for one in fields]
    return moved[0] if len(moved) == 1 else (moved[0], moved[1])


def _check_topk(topk_idx: Tensor, topk_weights: Tensor, tokens: int) -> None:
    if topk_weights.dtype != torch.float32 or topk_weights.shape != topk_idx.shape:
        raise ValueError(
            f"topk_weights must be float32 {list(topk_idx.shape)}, not {topk_weights.dtype} "
            f"{list(topk_weights.shape)}"
        )
    if len(topk_idx) != tokens:
        raise ValueError(f"topk_idx has {len(topk_idx)} tokens, x has {tokens}")


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one.to(CPU).contiguous() for one in tensors]


def _local(chosen: Tensor, owners: Tensor, rank: int) -> Tensor:
    """Experts as numbers among those of the rank; -1 for all others."""
    numbers = torch.full((len(owners) + 1,), -1, dtype=chosen.dtype, device=CPU)
    mine = (owners == rank).nonzero().flatten()
    numbers[mine] = torch.arange(len(mine), dtype=chosen.dtype, device=CPU)
    return numbers[chosen.long()]  # -1 finds the last one


def _joined(
    found: Sequence[Any], step: int, there: Tensor
) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
    """The rows of all pieces in the order of rank and token, without those of ranks that have gone
    since. Also the places of each piece's rows among them."""
    size = len(there)
    ranks, tokens = [], []
    for number, (_, sources, ends, _, _) in enumerate(found):
        everybody = torch.arange(size, device=CPU)
        ranks.append(torch.repeat_interleave(everybody, counts_of(ends)))
        tokens.append(sources.long() + number * step)
    all_ranks, all_tokens = torch.cat(ranks), torch.cat(tokens)
    order = torch.argsort(all_ranks * (len(found) * step) + all_tokens)
    order = order[there[all_ranks[order]]]
    places = torch.full((len(all_ranks),), -1, dtype=torch.int64, device=CPU)
    places[order] = torch.arange(len(order), device=CPU)
    fields = [torch.cat(parts)[order] for parts in zip(*(one[0] for one in found), strict=True)]
    ends = torch.bincount(all_ranks[order], minlength=size).cumsum(0).int()
    lengths = [len(one) for one in ranks]
    return fields, all_tokens[order].int(), ends, list(places.split(lengths))
