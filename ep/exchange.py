"""The two operations of the normal mode: rows go to ranks, and come back as sums. Buffer and
ElasticBuffer give the results their own forms."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from . import device_exchange, worst_exchange
from .arguments import (
    Agreed,
    check_home,
    check_homes,
    check_sizes,
    check_sums,
    check_tensor,
    difference,
    plain,
)
from .events import EventOverlap, Operation, Work, profiled
from .layout import CPU, on_device
from .normal_handle import Arrived, Joined, Piece, Route, clear_gone, counts_of

if TYPE_CHECKING:
    from mooncake_backend._C import EpWork

    from .runtime import Runtime

Tensor = torch.Tensor
_MOST_WEIGHTS = 32  # of a token, for which there is room in a combine after a dispatch without any


@dataclass(frozen=True)
class Participation:
    """The ranks that take part in a call, see Buffer.low_latency_dispatch()."""

    active_ranks: Tensor | None = None
    timeout_us: int = -1

    def check(self, size: int) -> None:
        given = self.active_ranks
        if given is None:
            return
        check_tensor("active_ranks", given)
        if given.dtype != torch.int32 or given.dim() != 1 or len(given) < size:
            raise ValueError(
                f"active_ranks must be int32 with an element for each of {size} ranks, not "
                f"{given.dtype} {list(given.shape)}"
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
    most_rows: int  # that a rank receives
    given: (
        Tensor  # int64 [R, E]: as for_experts, of all ranks: the same on each that was not skipped
    )


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
        self._show()

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()
        self._show()

    def _show(self) -> None:
        if self._masks:
            self._participation.show(torch.stack(list(self._masks)).all(dim=0))
            self._masks = ()


class Exchange:
    """Both operations, over a native buffer. Kernels do them where they take the tensors' device,
    see device_exchange. Other tensors of a device go through host memory. A dispatch then blocks
    the host until its end, but not one with a handle or with a number of rows that is known ahead,
    and neither does a combine."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._last_combine: Operation | None = None
        self._steps_due = 0  # see call()
        self._is_alone = False  # likewise

    def by_kernels(self, device: torch.device) -> bool:
        """Whether kernels do the calls with tensors of this device. Collective, the first time."""
        return device.type != "cpu" and self.runtime.native.takes_tokens(device)

    def is_alone(self, *given: object) -> bool:
        """Whether the host waits for nothing in a call that needs no counts, by the first tensor
        among its arguments. To be asked before the arguments are checked: a rank that finds one
        wrong must not miss the set-up of kernels."""
        home = _device_of(given)
        return home is not None and (self.by_kernels(home) or self.uses_words(home))

    def uses_words(self, device: torch.device) -> bool:
        return device.type not in ("cpu", "meta") and self.runtime.native.uses_words(device)

    @contextlib.contextmanager
    def call(self, name: str, steps: int = 1, is_alone: bool = False) -> Iterator[None]:
        """Around a dispatch or a combine, with the checks of its arguments. If it raises while the
        other ranks wait for this one, the call ends on all ranks, with the error's text.

        steps: operations of the call, if it does not run in pieces
        is_alone: the host waits for no other rank. Then an error of arguments is that of this rank
            alone, and nothing was sent
        """
        self._steps_due, self._is_alone = steps, is_alone
        try:
            yield
        except (TypeError, ValueError) as error:
            if self._steps_due == 0:  # an error of all ranks
                raise
            text = f"{name}: {error}"
            if not self._is_alone:
                self._announce(text)
            raise type(error)(f"rank {self.runtime.rank}, {text}") from error
        except Exception as error:
            if self._steps_due > 0 and not self._is_alone:
                self._announce(f"{name}: {type(error).__name__}: {error}")
            raise
        finally:
            self._steps_due = 0

    def _announce(self, why: str) -> None:
        """Ends with this error the operation for which the other ranks wait. They may have skipped
        this rank there: then they wait in the next operation of the call."""
        nothing = torch.empty((0, 1), dtype=torch.int32, device=CPU)
        for _ in range(self._steps_due):
            with contextlib.suppress(ValueError):
                self.runtime.native.dispatch_tokens([], nothing, 1, 1, None, -1, why)
                continue
            return

    @contextlib.contextmanager
    def step(self, more: int = 0) -> Iterator[None]:
        """Around an operation of a call: its errors are those of all ranks.

        more: operations of the call that are due behind it
        """
        self._steps_due = 0
        yield
        self._steps_due = more

    # ---- dispatch

    def dispatch(
        self,
        sent: Sent,
        participation: Participation,
        *,
        agreed: Agreed | None = None,
        weights: int | None = None,
        refuse: Callable[[Counts], str] = lambda _: "",
    ) -> tuple[Arrived, Counts]:
        """agreed: non-negative numbers that all ranks have to give alike, by the argument's name
        weights: of a token, for which the combine gets room; None: as many as top-k may be
        refuse: a reason against the call, which then ends with it on all ranks; "": none
        """
        size, rank = self.runtime.size, self.runtime.rank
        participation.check(size)
        on_device = self.by_kernels(sent.fields[0].device)
        if on_device:  # an error that comes later would be that of one rank
            device_exchange.check(sent, participation)
        self._is_alone = False  # from here on the others wait
        tokens = len(sent.token_ranks)
        everybody = torch.ones(size, dtype=torch.bool, device=CPU)
        num_experts = len(sent.num_tokens_per_expert)
        agreed = agreed or {}
        same = [number for numbers in agreed.values() for number in numbers]
        with profiled("dispatch"):
            fields = plain(sent.fields, None if on_device else CPU)
            mine = [
                tokens,
                *sent.is_token_in_rank.sum(0).tolist(),
                *sent.num_tokens_per_expert.tolist(),
                *same,
            ]
            mask = participation.among(everybody)
            with self.step(more=1):
                numbers, participants = self.runtime.native.count_tokens(
                    mine, mask, -1 if on_device else participation.timeout_us
                )
            table = torch.tensor(numbers, dtype=torch.int64, device=CPU)
            parts = table.split([1, size, num_experts, len(same)], dim=1)
            there = torch.tensor(participants, dtype=torch.bool, device=CPU)
            most_rows = int(parts[1][there].sum(0).max()) if there.any() else 0
            given = parts[2].clone()
            counts = Counts(parts[0].flatten(), parts[1], parts[2], most_rows, given)
            ranks = there.nonzero().flatten().tolist() if there[rank] else []
            if error := difference(agreed, parts[3].tolist(), ranks) or refuse(counts):
                raise ValueError(error)
            if on_device:
                there &= there[rank].clone()
                counts.for_ranks[~there] = 0
                counts.for_experts[~there] = 0
                capacity = int(counts.for_ranks[:, rank].sum())
                sizes = device_exchange.Sizes(
                    capacity, int(counts.tokens.max()), most_rows, weights or _MOST_WEIGHTS
                )
                return device_exchange.dispatch_counted(
                    self, fields, sent, sizes, participants, participation
                ), counts
            arrived = self._send(
                fields,
                sent,
                int(counts.tokens.max()),
                most_rows,
                weights or _MOST_WEIGHTS,
                counts.for_ranks[:, rank],
                participants,
                participation,
            )
        counts.tokens[rank] = tokens  # a rank that was skipped has no numbers
        there = torch.tensor(arrived.route.participants, dtype=torch.bool, device=CPU)
        gone = ~there if there[rank] else torch.ones_like(there)
        counts.for_ranks[gone] = 0
        counts.for_experts[gone] = 0
        return arrived, counts

    def dispatch_at_worst(
        self,
        sent: Sent,
        participation: Participation,
        *,
        agreed: Agreed,
        weights: int | None,
        most_rows: int,
        most_tokens: int | None = None,
        of: Route | None = None,
    ) -> Arrived:
        """Without a wait for the ranks' counts: the results have `most_rows` rows, with zeros
        behind the received ones. If the ranks differ in `agreed`, in `of` or in the two numbers,
        the buffer ends with an error.

        of: an earlier dispatch to which the rows belong
        """
        participation.check(self.runtime.size)
        weights = weights or _MOST_WEIGHTS
        sizes = device_exchange.Sizes(most_rows, most_tokens, most_rows, weights)
        with profiled("dispatch"):
            if not self.by_kernels(sent.fields[0].device):
                return worst_exchange.dispatch(self, sent, sizes, participation, agreed, of)
            same = repr((agreed, None if of is None else of.number))
            return device_exchange.dispatch(
                self,
                plain(sent.fields, None),
                sent,
                sizes,
                [True] * self.runtime.size,
                participation,
                zlib.crc32(same.encode()),
            )

    def goes_at_worst(
        self,
        fields: Sequence[Tensor],
        participation: Participation,
        *,
        weights: int | None,
        most_rows: int,
        most_tokens: int | None = None,
    ) -> bool:
        """Whether dispatch_at_worst() takes a call: the same on all ranks. Through host memory it
        takes calls that fit into the buffer at once and skip no rank."""
        home = fields[0].device
        if self.by_kernels(home):
            return True
        if participation.timeout_us > 0 or not self.uses_words(home):
            return False
        most_tokens, weights = most_tokens or most_rows, weights or _MOST_WEIGHTS
        return self.fit_at_once(fields, most_tokens, most_rows, weights)

    def participation(self, active_ranks: Tensor | None, timeout_us: int | None) -> Participation:
        """A timeout beyond the buffer's own skips nobody."""
        own = self.runtime.timeout // timedelta(microseconds=1)
        is_short = timeout_us is not None and 0 < timeout_us < own
        return Participation(active_ranks, timeout_us if is_short and timeout_us else -1)

    def dispatch_again(
        self, fields: Sequence[Tensor], route: Route, participation: Participation
    ) -> list[Tensor]:
        """Sends other rows the same way, to the places of the route's rows. The rows of ranks that
        have gone since are zeros."""
        participation.check(self.runtime.size)
        if len(fields[0]) != route.tokens:
            raise ValueError(
                f"x has {len(fields[0])} tokens, those of the handle's dispatch were {route.tokens}"
            )
        if route.kernels is not None:
            return device_exchange.dispatch_again(self, fields, route, participation)
        if route.is_at_worst:
            return worst_exchange.dispatch_again(self, fields, route, participation)
        # The native call compares only the bytes of a row.
        same = repr([(one.dtype, one.size(1)) for one in fields] + [route.number]).encode()
        with profiled("dispatch"):
            if self.uses_words(fields[0].device):
                found = self._send_again(fields, route, participation, zlib.crc32(same))
                if found is not None:
                    return found
            return self._send(
                plain(fields, CPU), route.sent, route.most_tokens, route.most_rows,
                route.most_weights, counts_of(route.ends), route.participants, participation,
                agreed=zlib.crc32(same),
            ).as_of(route)  # fmt: skip

    def _send_again(
        self, fields: Sequence[Tensor], route: Route, participation: Participation, agreed: int
    ) -> list[Tensor] | None:
        """dispatch_again() of tensors of a device, without a wait on the host. None: they need
        other pieces than the route's, or these have lost rows."""
        check_homes(fields[0].device, fields, participation.active_ranks)
        fields = plain(fields, None)
        tokens, hidden = len(fields[0]), fields[0].size(1)
        count, step = self._pieces(
            fields, route.most_tokens, route.most_rows, route.most_weights, participation
        )
        if count > 1:
            if count != len(route.pieces) or not all(piece.counts for piece in route.pieces):
                return None
            return self._send_pieces_again(fields, route, participation, step, agreed)
        ends = route.ends.tolist()
        into = [one.new_empty((route.num_rows, one.size(1))) for one in fields]
        with self.step():
            self.runtime.native.send_tokens_again(
                fields, into, route.sent.token_ranks, max(step, tokens), hidden, [0, *ends[:-1]],
                ends, list(route.participants), participation.active_ranks,
                participation.timeout_us, agreed,
            )  # fmt: skip
        return into

    def _send_pieces_again(
        self,
        fields: list[Tensor],
        route: Route,
        participation: Participation,
        step: int,
        agreed: int,
    ) -> list[Tensor]:
        home = fields[0].device
        # The ranks that take part in all pieces.
        mask = torch.ones(self.runtime.size, dtype=torch.int32, device=home)
        if participation.active_ranks is not None:
            mask &= participation.active_ranks[: len(mask)] != 0
        whole = [one.new_empty((route.num_rows, one.size(1))) for one in fields]
        for number, piece in enumerate(route.pieces):
            ends = list(itertools.accumulate(piece.counts))
            rows = [one.new_empty((ends[-1], one.size(1))) for one in fields]
            with self.step(more=int(number + 1 < len(route.pieces))):
                self.runtime.native.send_tokens_again(
                    [one[piece.begin : piece.end] for one in fields], rows,
                    route.sent.token_ranks[piece.begin : piece.end], step, fields[0].size(1),
                    [0, *ends[:-1]], ends, list(route.participants), mask, -1, agreed,
                )  # fmt: skip
            for of_piece, one in zip(rows, whole, strict=True):
                piece.spread(of_piece, one)
        clear_gone(whole, on_device(route.ends, home), mask)
        participation.show(mask != 0)
        return whole

    def fit_at_once(
        self, fields: Sequence[Tensor], most_tokens: int, most_rows: int, weights: int
    ) -> bool:
        """Whether the buffer has room for a dispatch in one piece, and for its combine."""
        sizes = [one.size(1) * one.dtype.itemsize for one in fields]
        return most_tokens <= self.runtime.native.most_tokens(
            sizes, fields[0].size(1), weights, max(most_rows, 1) / max(most_tokens, 1)
        )

    def _pieces(
        self,
        fields: Sequence[Tensor],
        most_tokens: int,
        most_rows: int,
        weights: int,
        participation: Participation,
    ) -> tuple[int, int]:
        """The number of pieces of a dispatch, and the tokens of each rank in one of them; see
        _send()."""
        native, tokens, hidden = self.runtime.native, len(fields[0]), fields[0].size(1)
        sizes = [one.size(1) * one.dtype.itemsize for one in fields]
        # Wherever the tokens go: a piece may have more rows than its share.
        room = native.most_tokens(sizes, hidden, weights, self.runtime.size)
        if room <= 0:
            raise ValueError(
                f"the buffer has {native.num_bytes} bytes, too few for one token of each of "
                f"{self.runtime.size} ranks: make it larger"
            )
        count, step = 1, room
        if participation.timeout_us <= 0:
            fit = self.fit_at_once(fields, most_tokens, most_rows, weights)
            count = 1 if fit else max(1, -(-most_tokens // room))
            step = max(1, -(-most_tokens // count))
        if tokens > count * step:
            raise ValueError(
                f"x has {tokens} tokens. With timeout_us they all go at once, and the buffer has "
                f"room for {room}: make it larger"
            )
        return count, step

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
        agreed: int = 0,
    ) -> Arrived:
        """Dispatches in as many pieces as the buffer's memory asks for. All ranks compute the same
        number, and each piece has the same tokens of every rank. A rank that was skipped does not
        know the others' numbers, so there is one piece where ranks may be skipped.

        expected: int64 [R]: the rows that come from each rank if all are left
        agreed: see EpBuffer.dispatch_tokens()
        """
        native, tokens, hidden = self.runtime.native, len(fields[0]), fields[0].size(1)
        count, step = self._pieces(fields, most_tokens, most_rows, weights, participation)
        there = torch.tensor(participants, dtype=torch.bool, device=CPU)
        if count == 1:
            mask = participation.among(there)
            with self.step():
                rows, sources, ends, participants, handle = native.dispatch_tokens(
                    fields, sent.token_ranks, step, hidden, mask, participation.timeout_us,
                    agreed=agreed,
                )  # fmt: skip
            assert sources is not None
            there &= torch.tensor(participants, dtype=torch.bool, device=CPU)
            pieces = [Piece(0, tokens, handle)]
        else:
            expected = expected * (there & there[self.runtime.rank])
            joined = Joined(native, fields, expected)
            for number in range(count):
                begin, end = min(number * step, tokens), min((number + 1) * step, tokens)
                mask, parts = participation.among(there), [one[begin:end] for one in fields]
                begins, most_ends = joined.filled.tolist(), joined.ends.tolist()
                with self.step(more=int(number + 1 < count)):
                    *_, ends, participants, handle = native.dispatch_tokens(
                        parts, sent.token_ranks[begin:end], step, hidden, mask,
                        participation.timeout_us, "", joined.into, begins, most_ends, agreed,
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
            int(ends[-1]),
            sent,
            there.tolist(),
            pieces,
        )
        return Arrived(rows, sources, route)

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
        """See Buffer.combine()."""
        participation.check(self.runtime.size)
        check_sums(x, route.num_rows, route.hidden, biases, route.tokens)
        home = x.device
        if topk_weights is not None:
            check_sizes("topk_weights", topk_weights, torch.float32, (-1, -1))
            _check_weights(topk_weights, route)
        if route.kernels is not None:
            return device_exchange.combine(
                self, x, route, topk_weights, biases, participation, async_finish
            )
        if home.type != "cpu":
            return self._combine_on_device(
                x, route, topk_weights, biases, participation, async_finish
            )
        x, *biases = plain([x, *biases], CPU)
        sums = self.runtime.native.new_result([route.tokens, route.hidden], x)
        missing = torch.empty(route.tokens, dtype=torch.bool, device=CPU)
        weights = weight_sums = None
        if topk_weights is not None:
            weights = plain([topk_weights], CPU)[0]
            sizes = (route.tokens, weights.size(1))
            weight_sums = torch.empty(sizes, dtype=torch.float32, device=CPU)
        there = torch.tensor(route.participants, dtype=torch.bool, device=CPU)
        masks = [participation.among(there) for _ in route.pieces]
        rows = [piece.of(x[: route.num_rows]) for piece in route.pieces]
        of_rows: list[Tensor | None] = [None for _ in route.pieces]
        if weights is not None:
            of_rows = [piece.of(weights[: route.num_rows]) for piece in route.pieces]
        works: list[EpWork] = []
        with profiled("combine"), self.step():
            for number, piece in enumerate(route.pieces):
                tokens = slice(piece.begin, piece.end)
                work = self.runtime.native.combine_tokens(
                    rows[number],
                    piece.native,
                    sums[tokens],
                    missing[tokens],
                    of_rows[number],
                    None if weight_sums is None else weight_sums[tokens],
                    [one[tokens] for one in biases],
                    masks[number],
                    participation.timeout_us,
                    async_finish,
                    list(piece.first_rows),
                    works[-1] if works else None,
                )
                works.append(work)
        done = Works(works, masks, participation)
        if not async_finish:
            done.wait()
        return sums, weight_sums, self.ended("combine", done, missing, async_finish)

    def _combine_on_device(
        self,
        x: Tensor,
        route: Route,
        topk_weights: Tensor | None,
        biases: Sequence[Tensor],
        participation: Participation,
        async_finish: bool,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """combine() of tensors of a device through host memory. With words of streams the host
        waits for nothing."""
        check_home(x.device, topk_weights=topk_weights, active_ranks=participation.active_ranks)
        for bias in biases:
            check_home(x.device, bias=bias)
        x, *biases = plain([x, *biases], None)
        sums = x.new_empty((route.tokens, route.hidden))
        # If the call fails, nothing is written.
        missing = torch.ones(route.tokens, dtype=torch.bool, device=x.device)
        weights = weight_sums = None
        if topk_weights is not None:
            weights = plain([topk_weights], None)[0][: route.num_rows]
            weight_sums = weights.new_empty((route.tokens, weights.size(1)))
        works: list[EpWork] = []
        with profiled("combine"), self.step():
            for piece in route.pieces:
                tokens = slice(piece.begin, piece.end)
                work = self.runtime.native.combine_tokens(
                    piece.side_by_side(x[: route.num_rows]),
                    piece.native,
                    sums[tokens],
                    missing[tokens],
                    None if weights is None else piece.side_by_side(weights),
                    None if weight_sums is None else weight_sums[tokens],
                    [one[tokens] for one in biases],
                    participation.active_ranks,
                    participation.timeout_us,
                    async_finish,
                    [],
                    works[-1] if works else None,
                    list(route.participants),
                )
                works.append(work)
        event = self.ended("combine", Works(works, [], participation), missing, async_finish)
        return sums, weight_sums, event

    def ended(self, name: str, works: Work, missing: Tensor, async_finish: bool) -> EventOverlap:
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


def _device_of(given: Sequence[object]) -> torch.device | None:
    """That of the first tensor."""
    for one in given:
        first = one[0] if isinstance(one, tuple) and len(one) > 0 else one
        if isinstance(first, Tensor):
            return first.device
    return None


def _check_weights(topk_weights: Tensor, route: Route) -> None:
    """Refuses columns beyond the room, and too few rows."""
    if topk_weights.size(1) > route.most_weights:
        raise ValueError(
            f"topk_weights has {topk_weights.size(1)} columns, there is room for "
            f"{route.most_weights} after the handle's dispatch"
        )
    if len(topk_weights) < route.num_rows:
        raise ValueError(
            f"topk_weights has {len(topk_weights)} rows, the dispatch received {route.num_rows}"
        )
