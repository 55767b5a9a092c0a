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
    """The ranks that take part in a call, see Buffer.low_latency_dispatch()."""

    active_ranks: Tensor | None
    timeout_us: int

    def check(self, size: int) -> None:
        given = self.active_ranks
        if given is not None and (given.dtype != torch.int32 or given.numel() < size):
            raise ValueError(
                f"active_ranks must be int32 with an element for each of {size} ranks, not "
                f"{given.dtype} with {given.numel()}"
            )

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
    """The pieces of one combine: their works, and the masks that show each one's participants."""

    def __init__(
        self, works: Sequence[EpWork], masks: Sequence[Tensor], who: Participation
    ) -> None:
        self._works = works
        self._masks: Sequence[Tensor] = masks
        self._who = who

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._masks:
            self._who.show(torch.stack(list(self._masks)).all(dim=0))
            self._masks = ()

    def synchronize(self) -> None:
        self.wait()


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
        who.check(size)
        fields, home = _fields_of(x), _fields_of(x)[0].device
        tokens = len(fields[0])
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
            is_there = torch.tensor(participants, dtype=torch.bool, device=CPU)
            most_rows = int(counts[is_there, 1 : 1 + size].sum(0).max()) if is_there.any() else 0
            error = ""
            if 0 < shown.num_worst_tokens < most_rows:
                error = (
                    f"a rank receives {most_rows} tokens, num_worst_tokens is "
                    f"{shown.num_worst_tokens} on rank {rank}"
                )
            arrived = self._send(
                _on_host(fields), is_in_rank, most_tokens, participants, who, error
            )
        counts[rank, 0] = tokens  # a rank that was skipped has no numbers
        is_there = torch.tensor(arrived.route.participants, dtype=torch.bool, device=CPU)
        counts[~is_there, 1:] = 0
        if not is_there[rank]:
            counts[:, 1:] = 0
        owners = torch.tensor(
            reference.default_owners(num_experts, size), dtype=torch.int64, device=CPU
        )
        experts = counts[:, 1 + size :].sum(0)[owners == rank].tolist()
        align = shown.expert_alignment
        per_expert = [-(-count // align) * align for count in experts]
        found, num_rows = list(arrived.fields), arrived.route.num_rows
        if shown.num_worst_tokens > 0:
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
        return Received(_rows_like(x, found), recv_idx, recv_weights, per_expert, handle)

    def dispatch_again(self, x: Rows, handle: NormalHandle, who: Participation) -> Rows:
        """Rows in the places of the handle's dispatch; zeros from ranks that have gone since."""
        who.check(self._runtime.size)
        route, fields = self._route_of(handle), _fields_of(x)
        if len(fields[0]) != route.tokens:
            raise ValueError(
                f"x has {len(fields[0])} tokens, those of the handle's dispatch were {route.tokens}"
            )
        with profiled("dispatch"):
            arrived = self._send(
                _on_host(fields), route.is_token_in_rank, route.most_tokens, route.participants, who
            )
        return _rows_like(x, arrived.as_of(route))

    def _send(
        self,
        fields: list[Tensor],
        is_in_rank: Tensor,
        most_tokens: int,
        participants: Sequence[bool],
        who: Participation,
        error: str = "",
    ) -> Arrived:
        """Dispatches in as many pieces as the buffer's memory asks for. All ranks compute the same
        number, and each piece has the same tokens of every rank. A rank that was skipped does not
        know the others' numbers, so there is one piece where ranks may be skipped.

        error: ends the call on all ranks
        """
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
        count = 1 if who.timeout_us > 0 else max(1, -(-most_tokens // room))
        step = room if who.timeout_us > 0 else max(1, -(-most_tokens // count))
        if tokens > count * step:
            error = error or (
                f"rank {self._runtime.rank} has {tokens} tokens. With timeout_us they all go at "
                f"once, and the memory of the normal mode has room for {room}: make num_nvl_bytes "
                "larger"
            )
            tokens = 0
        there = torch.tensor(participants, dtype=torch.bool, device=CPU)
        bounds, found = [], []
        for number in range(count):
            begin, end = min(number * step, tokens), min((number + 1) * step, tokens)
            some = [one[begin:end] for one in fields]
            mask = who.among(there)
            found.append(
                native.dispatch_tokens(
                    some, is_in_rank[begin:end], step, hidden, mask, who.timeout_us, error
                )
            )
            bounds.append((begin, end))
            there = there & torch.tensor(found[-1][3], dtype=torch.bool, device=CPU)
        who.show(there)
        if count == 1:
            rows, sources, ends, _, handle = found[0]
            pieces = [Piece(0, tokens, handle, None)]
        else:
            rows, sources, ends, of_pieces = _joined(found, step, there, self._runtime.rank)
            handles = [one[4] for one in found]
            pieces = [
                Piece(*bound, handle, of_piece)
                for bound, handle, of_piece in zip(bounds, handles, of_pieces, strict=True)
            ]
        route = Route(
            self._runtime, tokens, hidden, most_tokens, weights, ends, is_in_rank,
            there.tolist(), pieces,
        )  # fmt: skip
        return Arrived(rows, sources, route)

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
        who.check(self._runtime.size)
        route, home = self._route_of(handle), x.device
        if topk_weights is not None and topk_weights.size(1) > route.most_weights:
            raise ValueError(
                f"topk_weights has {topk_weights.size(1)} columns, there is room for "
                f"{route.most_weights} after the handle's dispatch"
            )
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
        masks = [who.among(there) for _ in route.pieces]
        works, error = [], None
        with profiled("combine"):
            for piece, mask in zip(route.pieces, masks, strict=True):
                tokens = slice(piece.begin, piece.end)
                try:
                    work = self._runtime.native.combine_tokens(
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
                    works.append(work)
                except RuntimeError as failure:
                    # The other pieces run, as they do on a rank that called with async_finish.
                    error = error or failure
        if error is not None:
            raise error
        done = Works(works, masks, who)
        if not async_finish or home.type != "cpu":
            done.wait()
        operation = Operation("combine", done, missing.to(home))
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
    if len(fields) == 2 and isinstance(fields[1], Tensor) and fields[1].dim() == 1:
        fields[1] = fields[1].unsqueeze(1)  # a scale for each token
    for name, one in zip(("x", "the scales of x"), fields, strict=False):
        if not isinstance(one, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(one).__name__}")
        if one.dim() != 2 or one.size(1) == 0:
            raise ValueError(f"{name} has the sizes {list(one.shape)}, expected [n, h]")
    if len({len(one) for one in fields}) > 1:
        raise ValueError(f"x has {len(fields[0])} tokens, and scales for {len(fields[-1])}")
    return fields


def _rows_like(x: Rows, fields: Sequence[Tensor]) -> Rows:
    """The fields in the form and on the device of the given rows."""
    if not isinstance(x, tuple):
        return fields[0].to(x.device)
    scales = fields[1].to(x[0].device)
    return fields[0].to(x[0].device), scales.squeeze(1) if x[1].dim() == 1 else scales


def _check_topk(topk_idx: Tensor, topk_weights: Tensor, tokens: int) -> None:
    if topk_weights.dtype != torch.float32 or topk_weights.shape != topk_idx.shape:
        raise ValueError(
            f"topk_weights must be float32 {list(topk_idx.shape)}, not {topk_weights.dtype} "
            f"{list(topk_weights.shape)}"
        )
    if topk_idx.dim() != 2 or len(topk_idx) != tokens or topk_idx.size(1) == 0:
        raise ValueError(f"topk_idx has the sizes {list(topk_idx.shape)}, x has {tokens} tokens")


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one.to(CPU).contiguous() for one in tensors]


def _local(chosen: Tensor, owners: Tensor, rank: int) -> Tensor:
    """Experts as numbers among those of the rank; -1 for all others."""
    numbers = torch.full((len(owners) + 1,), -1, dtype=chosen.dtype, device=CPU)
    mine = (owners == rank).nonzero().flatten()
    numbers[mine] = torch.arange(len(mine), dtype=chosen.dtype, device=CPU)
    return numbers[chosen.long()]  # -1 finds the last one


def _joined(
    found: Sequence[Any], step: int, there: Tensor, rank: int
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
    order = order[there[all_ranks[order]] & there[rank]]
    places = torch.full((len(all_ranks),), -1, dtype=torch.int64, device=CPU)
    places[order] = torch.arange(len(order), device=CPU)
    fields = [torch.cat(parts)[order] for parts in zip(*(one[0] for one in found), strict=True)]
    ends = torch.bincount(all_ranks[order], minlength=size).cumsum(0).int()
    lengths = [len(one) for one in ranks]
    return fields, all_tokens[order].int(), ends, list(places.split(lengths))
