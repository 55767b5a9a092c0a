"""The two operations of the normal mode: rows go to ranks, and come back as sums. Buffer and
ElasticBuffer give the results their own forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from .events import EventOverlap, Operation, profiled
from .layout import CPU
from .normal_handle import Arrived, Joined, Piece, Route, counts_of

if TYPE_CHECKING:
    from mooncake_backend._C import EpWork

    from .runtime import Runtime

Tensor = torch.Tensor
Rows = Tensor | tuple[Tensor, Tensor]
_MOST_WEIGHTS = 32  # of a token, for which there is room in a combine after a dispatch without any


@dataclass(frozen=True)
class Participation:
    """The ranks that take part in a call, see Buffer.low_latency_dispatch()."""

    active_ranks: Tensor | None = None
    timeout_us: int = -1

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
class Sent:
    """The tokens that a rank gives to a dispatch."""

    fields: Sequence[Tensor]  # [n, any] each, on any device: the parts of each token's row
    is_token_in_rank: Tensor  # bool [n, R]
    token_ranks: Tensor  # int32 [n, any], see EpBuffer.dispatch_tokens()
    num_tokens_per_expert: Tensor  # [E]


@dataclass(frozen=True)
class Counts:
    """The numbers that ranks give before a dispatch. Zeros for those that take no part; all zeros
    on a rank that was skipped."""

    tokens: Tensor  # int64 [R]
    for_ranks: Tensor  # int64 [R, R]: tokens of each rank for each rank
    for_experts: Tensor  # int64 [R, E]: tokens of each rank for each expert
    agreed: Tensor  # int64 [R, any]: numbers that have to be equal on all ranks
    most_rows: int  # that a rank receives


class Works:
    """The pieces of one combine: their works, and the masks that show each one's participants."""

    def __init__(
        self, works: Sequence[EpWork], masks: Sequence[Tensor], participation: Participation
    ) -> None:
        self._works = works
        self._masks: Sequence[Tensor] = masks
        self._participation = participation

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._masks:
            self._participation.show(torch.stack(list(self._masks)).all(dim=0))
            self._masks = ()

    def synchronize(self) -> None:
        self.wait()


class Exchange:
    """Both operations, over a native buffer. Tensors of a device go through host memory, and a call
    with them blocks the host until its end."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._last_combine: Operation | None = None

    # ---- dispatch

    def dispatch(
        self,
        sent: Sent,
        participation: Participation,
        *,
        agreed: Sequence[int] = (),
        weights: int | None = None,
        refuse: Callable[[Counts], str] = lambda _: "",
    ) -> tuple[Arrived, Counts]:
        """agreed: non-negative numbers that all ranks have to give alike
        weights: of a token, for which the combine gets room; None: as many as top-k may be
        refuse: a reason against the call, which then ends with it on all ranks; "": none
        """
        size, rank = self.runtime.size, self.runtime.rank
        participation.check(size)
        tokens = len(sent.token_ranks)
        everybody = torch.ones(size, dtype=torch.bool, device=CPU)
        num_experts = len(sent.num_tokens_per_expert)
        with profiled("dispatch"):
            numbers, participants = self.runtime.native.count_tokens(
                [
                    tokens,
                    *sent.is_token_in_rank.sum(0).tolist(),
                    *sent.num_tokens_per_expert.tolist(),
                    *agreed,
                ],
                participation.among(everybody),
                participation.timeout_us,
            )
            table = torch.tensor(numbers, dtype=torch.int64, device=CPU)
            parts = table.split([1, size, num_experts, len(agreed)], dim=1)
            there = torch.tensor(participants, dtype=torch.bool, device=CPU)
            most_rows = int(parts[1][there].sum(0).max()) if there.any() else 0
            counts = Counts(parts[0].flatten(), parts[1], parts[2], parts[3], most_rows)
            error = refuse(counts) or _disagreement(counts.agreed, there)
            arrived = self._send(
                _on_host(sent.fields),
                sent,
                int(counts.tokens.max()),
                most_rows,
                weights or _MOST_WEIGHTS,
                counts.for_ranks[:, rank],
                participants,
                participation,
                error,
            )
        counts.tokens[rank] = tokens  # a rank that was skipped has no numbers
        there = torch.tensor(arrived.route.participants, dtype=torch.bool, device=CPU)
        gone = ~there if there[rank] else torch.ones_like(there)
        counts.for_ranks[gone] = 0
        counts.for_experts[gone] = 0
        return arrived, counts

    def participation(self, active_ranks: Tensor | None, timeout_us: int | None) -> Participation:
        """A timeout beyond the buffer's own skips nobody."""
        own = self.runtime.timeout // timedelta(microseconds=1)
        is_short = timeout_us is not None and 0 < timeout_us < own
        return Participation(active_ranks, timeout_us if is_short and timeout_us else -1)

    def dispatch_again(
        self, fields: Sequence[Tensor], route: Route, participation: Participation
    ) -> Arrived:
        """Sends other rows the same way."""
        participation.check(self.runtime.size)
        if len(fields[0]) != route.tokens:
            raise ValueError(
                f"x has {len(fields[0])} tokens, those of the handle's dispatch were {route.tokens}"
            )
        with profiled("dispatch"):
            return self._send(
                _on_host(fields), route.sent, route.most_tokens, route.most_rows,
                route.most_weights, counts_of(route.ends), route.participants, participation,
            )  # fmt: skip

    def _send(
        self,
        fields: list[Tensor],
        sent: Sent,
        most_tokens: int,
        most_rows: int,
        weights: int,
        expected: Tensor,
        participants: Sequence[bool],
        participation: Participation,
        error: str = "",
    ) -> Arrived:
        """Dispatches in as many pieces as the buffer's memory asks for. All ranks compute the same
        number, and each piece has the same tokens of every rank. A rank that was skipped does not
        know the others' numbers, so there is one piece where ranks may be skipped.

        expected: int64 [R]: the rows that come from each rank if all are left
        error: ends the call on all ranks
        """
        native, tokens, hidden = self.runtime.native, len(fields[0]), fields[0].size(1)
        sizes = [one.size(1) * one.dtype.itemsize for one in fields]
        # Wherever the tokens go: a piece may have more rows than its share.
        room = native.most_tokens(sizes, hidden, weights, self.runtime.size)
        fits_at_once = most_tokens <= native.most_tokens(
            sizes, hidden, weights, max(most_rows, 1) / max(most_tokens, 1)
        )
        if room <= 0:
            raise ValueError(
                f"rank {self.runtime.rank}: the buffer has {native.num_bytes} bytes, too few for "
                f"one token of each of {self.runtime.size} ranks: make it larger"
            )
        count, step = 1, room
        if participation.timeout_us <= 0:
            count = 1 if fits_at_once else max(1, -(-most_tokens // room))
            step = max(1, -(-most_tokens // count))
        if tokens > count * step:
            error = error or (
                f"rank {self.runtime.rank} has {tokens} tokens. With timeout_us they all go at "
                f"once, and the buffer has room for {room}: make it larger"
            )
            tokens = 0
        there = torch.tensor(participants, dtype=torch.bool, device=CPU)
        if count == 1:
            rows, sources, ends, participants, handle = native.dispatch_tokens(
                [one[:tokens] for one in fields], sent.token_ranks[:tokens], step, hidden,
                participation.among(there), participation.timeout_us, error,
            )  # fmt: skip
            assert sources is not None
            there &= torch.tensor(participants, dtype=torch.bool, device=CPU)
            pieces = [Piece(0, tokens, handle)]
        else:
            expected = expected * (there & there[self.runtime.rank])
            joined = self._room_for(fields, expected, sent, step, participation.among(there))
            for number in range(count):
                begin, end = min(number * step, tokens), min((number + 1) * step, tokens)
                *_, ends, participants, handle = native.dispatch_tokens(
                    [one[begin:end] for one in fields], sent.token_ranks[begin:end], step, hidden,
                    participation.among(there), participation.timeout_us, error, joined.into,
                    joined.filled.tolist(), joined.ends.tolist(),
                )  # fmt: skip
                joined.add(begin, end, number * step, handle, counts_of(ends))
                there &= torch.tensor(participants, dtype=torch.bool, device=CPU)
            rows, sources, ends, pieces = joined.among(there & there[self.runtime.rank])
        participation.show(there)
        if participation.timeout_us > 0:  # numbers that a rank that was skipped knows, too
            most_tokens, most_rows = step, step * self.runtime.size
        route = Route(
            self,
            tokens,
            hidden,
            most_tokens,
            most_rows,
            weights,
            ends,
            sent,
            there.tolist(),
            pieces,
        )
        return Arrived(rows, sources, route)

    def _room_for(
        self, fields: Sequence[Tensor], expected: Tensor, sent: Sent, step: int, mask: Tensor
    ) -> Joined:
        """Ends the call on all ranks if this rank has no memory."""
        native = self.runtime.native
        try:
            return Joined(native, fields, expected)
        except RuntimeError as failure:
            why = f"rank {self.runtime.rank}: no memory for {int(expected.sum())} rows: {failure}"
            nothing = [one[:0] for one in fields]
            native.dispatch_tokens(
                nothing, sent.token_ranks[:0], step, fields[0].size(1), mask, -1, why
            )
            raise

    # ---- combine

    def combine(
        self,
        x: Tensor,
        route: Route,
        topk_weights: Tensor | None,
        biases: Sequence[Tensor],
        participation: Participation,
        async_finish: bool,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """See Buffer.combine(). async_finish: returns before the end where x is the CPU's."""
        participation.check(self.runtime.size)
        home = x.device
        if topk_weights is not None and topk_weights.size(1) > route.most_weights:
            raise ValueError(
                f"topk_weights has {topk_weights.size(1)} columns, there is room for "
                f"{route.most_weights} after the handle's dispatch"
            )
        if len(x) < route.num_rows:
            raise ValueError(f"x has {len(x)} rows, the dispatch received {route.num_rows}")
        x, *on_host = _on_host([x, *biases])
        sums = self.runtime.native.new_result([route.tokens, route.hidden], x)
        missing = torch.empty(route.tokens, dtype=torch.bool, device=CPU)
        weights = weight_sums = None
        if topk_weights is not None:
            weights = _on_host([topk_weights])[0]
            sizes = (route.tokens, weights.size(1))
            weight_sums = torch.empty(sizes, dtype=torch.float32, device=CPU)
        there = torch.tensor(route.participants, dtype=torch.bool, device=CPU)
        masks = [participation.among(there) for _ in route.pieces]
        works, error = [], None
        with profiled("combine"):
            for piece, mask in zip(route.pieces, masks, strict=True):
                tokens = slice(piece.begin, piece.end)
                try:
                    work = self.runtime.native.combine_tokens(
                        piece.of(x[: route.num_rows]),
                        piece.native,
                        sums[tokens],
                        missing[tokens],
                        None if weights is None else piece.of(weights[: route.num_rows]),
                        None if weight_sums is None else weight_sums[tokens],
                        [one[tokens] for one in on_host],
                        mask,
                        participation.timeout_us,
                        async_finish and home.type == "cpu",
                        list(piece.first_rows),
                    )
                    works.append(work)
                except RuntimeError as failure:
                    # The other pieces run, as they do on a rank that called with async_finish.
                    error = error or failure
        if error is not None:
            raise error
        done = Works(works, masks, participation)
        if not async_finish or home.type != "cpu":
            done.wait()
        event = self.ended("combine", done, missing.to(home), async_finish)
        return sums.to(home), None if weight_sums is None else weight_sums.to(home), event

    def ended(self, name: str, works: Works, missing: Tensor, async_finish: bool) -> EventOverlap:
        """The event of a combine."""
        operation = Operation(name, works, missing)
        self._last_combine = operation
        return EventOverlap.of(operation, asynchronous=async_finish)

    def missing_contributions(self) -> Tensor:
        if self._last_combine is None:
            raise RuntimeError(f"rank {self.runtime.rank}: this buffer has combined nothing yet")
        return self._last_combine.missing_contributions()

    def check_route(self, route: Route) -> None:
        if route.exchange is not self:
            raise ValueError("the handle is of a dispatch of another buffer")


def fields_of(x: Rows) -> list[Tensor]:
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


def check_topk(topk_idx: Tensor, topk_weights: Tensor | None, tokens: int) -> None:
    if topk_weights is not None and (
        topk_weights.dtype != torch.float32 or topk_weights.shape != topk_idx.shape
    ):
        raise ValueError(
            f"topk_weights must be float32 {list(topk_idx.shape)}, not {topk_weights.dtype} "
            f"{list(topk_weights.shape)}"
        )
    if topk_idx.dim() != 2 or len(topk_idx) != tokens or topk_idx.size(1) == 0:
        raise ValueError(f"topk_idx has the sizes {list(topk_idx.shape)}, x has {tokens} tokens")


def local_experts_of(chosen: Tensor, owners: Tensor, rank: int) -> Tensor:
    """Experts as numbers among those of the rank; -1 for all others."""
    numbers = torch.full((len(owners) + 1,), -1, dtype=chosen.dtype, device=CPU)
    mine = (owners == rank).nonzero().flatten()
    numbers[mine] = torch.arange(len(mine), dtype=chosen.dtype, device=CPU)
    return numbers[chosen.long().clamp(min=-1)]  # -1 finds the last one


def _disagreement(agreed: Tensor, there: Tensor) -> str:
    given = agreed[there]
    if len(given) == 0 or (given == given[0]).all():
        return ""
    return f"the ranks give different settings: {given.unique(dim=0).tolist()}"


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one.to(CPU).contiguous() for one in tensors]
