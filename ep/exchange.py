"""The two operations of the normal mode: rows go to ranks, and come back as sums. Buffer and
ElasticBuffer give the results their own forms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from .arguments import Agreed, check_sizes, check_sums, check_tensor
from .events import EventOverlap, Operation, Work, profiled
from .normal_handle import Arrived

if TYPE_CHECKING:
    from mooncake_backend._C import EpRoute

    from .runtime import Runtime

Tensor = torch.Tensor
# The most rows that a rank receives, and the most tokens of a rank, if that is known.
Bound = tuple[int, int | None]


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

    def among(self, there: Tensor) -> Tensor:
        """int32 [R]: the ranks of bool [R] that the caller does not mask."""
        mask = there.int()
        if self.active_ranks is not None:
            mask &= self.active_ranks[: len(mask)].to(mask.device) != 0
        return mask

    def show(self, mask: Tensor) -> None:
        """Clears the ranks that the mask does not have."""
        if self.active_ranks is not None:
            gone = (mask == 0).to(self.active_ranks.device)
            self.active_ranks[: len(gone)].masked_fill_(gone, 0)


@dataclass(frozen=True)
class Sent:
    """The tokens that a rank gives to a dispatch."""

    fields: Sequence[Tensor]  # [n, any] each, on any device: the parts of each token's row
    is_token_in_rank: Tensor  # bool [n, R]
    token_ranks: Tensor | None  # int32 [n, any], see EpBuffer.normal_dispatch()
    num_tokens_per_expert: Tensor  # int64 [E]; not of a dispatch with a bound


class Exchange:
    """Both operations, over a native buffer: see csrc/backend/experts/ep_normal.h. A dispatch of
    tensors of a device blocks the host until its end, but not one with a handle or with a bound for
    its rows, and neither does a combine."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._last_combine: Operation | None = None

    def by_kernels(self, device: torch.device) -> bool:
        """Whether kernels do the calls with tensors of this device. Collective, the first time."""
        return device.type != "cpu" and self.runtime.native.goes_by_kernels(device)

    def uses_words(self, device: torch.device) -> bool:
        return device.type not in ("cpu", "meta") and self.runtime.native.uses_words(device)

    def is_alone(self, *given: object) -> bool:
        """Whether the host waits for nothing in a call that needs no counts, by the first tensor
        among its arguments. To be asked before the arguments are checked: a rank that finds one
        wrong must not miss the set-up of kernels."""
        home = _device_of(given)
        return home is not None and (self.by_kernels(home) or self.uses_words(home))

    @contextlib.contextmanager
    def call(self, name: str, steps: int = 1, is_alone: bool = False) -> Iterator[None]:
        """Around a dispatch or a combine, with the checks of its arguments. If it raises while the
        other ranks wait for this one, the call ends on all ranks, with the error's text.

        steps: operations of the call, if it does not run in pieces
        is_alone: the host waits for no other rank. Then an error of arguments is this rank's
            alone, and nothing was sent
        """
        if name == "dispatch":
            self.runtime.begin_dispatch()
        native = self.runtime.native
        native.begin_call(steps, is_alone)
        try:
            yield
        except (TypeError, ValueError) as error:
            text = f"{name}: {error}"
            if not native.refuse_call(text):  # an error of all ranks
                raise
            raise type(error)(f"rank {self.runtime.rank}, {text}") from error
        except Exception as error:
            native.refuse_call(f"{name}: {type(error).__name__}: {error}")
            raise

    def takes_bound(
        self,
        fields: Sequence[Tensor],
        bound: Bound,
        weights: int | None,
        participation: Participation,
    ) -> bool:
        """Whether dispatch() takes a bound: the same on all ranks. Through host memory it takes one
        for calls that fit into the buffer at once and skip no rank."""
        native = self.runtime.native
        return native.takes_bound(list(fields), bound, weights, participation.timeout_us)

    def dispatch(
        self,
        sent: Sent,
        participation: Participation,
        *,
        agreed: Agreed,
        weights: int | None,
        bound: Bound | None = None,
        of: EpRoute | None = None,
        shown_rows: int = 0,
    ) -> Arrived:
        """agreed: arguments that all ranks have to give alike
        weights: of a token, for which the combine gets room; None: as many as top-k may be
        bound: then nothing waits for the ranks' counts, and there are as many rows as it says, with
            zeros behind the received ones. If the ranks differ in `agreed`, `of` or `bound`, the
            buffer ends with an error
        of: with a bound, an earlier dispatch to which the rows belong
        shown_rows: of the results, with zeros behind the received ones; 0: only these. Fewer than a
            rank receives are an error of all ranks
        """
        participation.check(self.runtime.size)
        with profiled("dispatch"):
            arrived = Arrived(
                *self.runtime.native.normal_dispatch(
                    list(sent.fields),
                    sent.is_token_in_rank,
                    sent.token_ranks,
                    sent.num_tokens_per_expert,
                    agreed,
                    weights,
                    bound,
                    of,
                    shown_rows,
                    participation.active_ranks,
                    participation.timeout_us,
                )
            )
        self.runtime.note(arrived.route)
        return arrived

    def dispatch_again(
        self, fields: Sequence[Tensor], route: EpRoute, participation: Participation
    ) -> list[Tensor]:
        """Sends other rows the same way, to the places of the route's rows. The rows of ranks that
        have gone since are zeros."""
        participation.check(self.runtime.size)
        with profiled("dispatch"):
            return self.runtime.native.normal_dispatch_again(
                list(fields), route, participation.active_ranks, participation.timeout_us
            )

    def combine(
        self,
        x: Tensor,
        route: EpRoute,
        topk_weights: Tensor | None,
        biases: Sequence[Tensor],
        participation: Participation,
        async_finish: bool,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """See Buffer.combine()."""
        participation.check(self.runtime.size)
        check_sums(x, route.num_rows, route.hidden, biases, route.tokens)
        if topk_weights is not None:
            check_sizes("topk_weights", topk_weights, torch.float32, (-1, -1))
        with profiled("combine"):
            sums, missing, weight_sums, work = self.runtime.native.normal_combine(
                x,
                route,
                topk_weights,
                list(biases),
                participation.active_ranks,
                participation.timeout_us,
                async_finish,
            )
        return sums, weight_sums, self.ended("combine", work, missing, async_finish)

    def participation(self, active_ranks: Tensor | None, timeout_us: int | None) -> Participation:
        """A timeout beyond the buffer's own skips nobody."""
        own = self.runtime.timeout // timedelta(microseconds=1)
        is_short = timeout_us is not None and 0 < timeout_us < own
        return Participation(active_ranks, timeout_us if is_short and timeout_us else -1)

    def ended(self, name: str, work: Work, missing: Tensor, async_finish: bool) -> EventOverlap:
        """The event of a combine."""
        operation = Operation(name, work, missing)
        self._last_combine = operation
        return EventOverlap.of(operation, asynchronous=async_finish)

    def missing_contributions(self) -> Tensor:
        if self._last_combine is None:
            raise RuntimeError(f"rank {self.runtime.rank}: this buffer has combined nothing yet")
        return self._last_combine.missing_contributions()

    def let_go(self) -> None:
        """The Buffer was destroyed: see Operation.let_go()."""
        if self._last_combine is not None:
            self._last_combine.let_go()

    def check_route(self, route: EpRoute) -> None:
        if not route.is_of(self.runtime.native):
            raise ValueError("the handle is of a dispatch of another buffer")


def _device_of(given: Sequence[object]) -> torch.device | None:
    """The device of the first tensor."""
    for one in given:
        first = one[0] if isinstance(one, tuple) and len(one) > 0 else one
        if isinstance(first, Tensor):
            return first.device
    return None
