"""The common part of both Buffers: a native buffer, and the group that it runs over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mooncake_backend import extension
from mooncake_backend.group import find_backend
from mooncake_backend.options import ON_FAILURE, device_filter, transfer_engine

from .arguments import check_choices, check_room
from .events import EventOverlap, Operation, profiled
from .tuple_handle import TupleHandle

if TYPE_CHECKING:
    from mooncake_backend._C import EpBuffer, EpHandle, MooncakeBackend

Tensor = torch.Tensor
Received = Tensor | tuple[Tensor, Tensor]
Hook = Callable[[], None]
OnFailure = Literal["continue", "raise"]


def native() -> type[EpBuffer]:
    found: type[EpBuffer] = extension.load().EpBuffer
    return found


def size_hint(num_max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    check_room(
        0,
        num_max_dispatch_tokens_per_rank=num_max_tokens,
        hidden=hidden,
        num_ranks=num_ranks,
        num_experts=num_experts,
    )
    return native().size_hint(num_max_tokens, hidden, num_ranks, num_experts)


@dataclass(frozen=True)
class Members:
    """The ranks of a buffer. A group of ours shares its engine with the buffer. A group of another
    backend is used in the constructor only, to exchange keys and addresses."""

    rank: int
    size: int
    timeout: timedelta
    backend: MooncakeBackend | None = None
    exchange: Callable[[bytes], list[bytes]] | None = None
    route_hint: str = ""


def members_of(group: Any, comm: Any = None) -> Members:
    """group: a process group, or the backend of one of ours; comm: an mpi4py-like communicator, if
    group is None."""
    if group is None and comm is None:
        raise ValueError(
            "Buffer needs a group or a comm. dist.group.WORLD is None before init_process_group()"
        )
    if group is None:
        timeout = dist.distributed_c10d.default_pg_timeout
        return Members(comm.Get_rank(), comm.Get_size(), timeout, exchange=comm.allgather)
    backend = find_backend(group)
    if backend is not None:
        return Members(backend.rank(), backend.size(), backend.options._timeout, backend)

    def exchange(mine: bytes) -> list[bytes]:
        of_all: list[Any] = [None] * group.size()
        dist.all_gather_object(of_all, mine, group=group)
        return of_all

    return Members(
        group.rank(),
        group.size(),
        _timeout_of(group),
        exchange=exchange,
        route_hint=_rendezvous_host(),
    )


def _timeout_of(group: Any) -> timedelta:
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return timeout


def _rendezvous_host() -> str:
    """The host of the default group's store, or "" if it has none."""
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host: str = getattr(store, "host", "")
    return host


class Handle(TupleHandle["EpHandle"], place=0):
    """DeepEP's handle, (src_info, layout_range, T, hidden, num_experts)."""


class Runtime:
    """One native buffer, and the options that both Buffers have beyond upstream's:

    timeout: longest time of every operation; None: the group's own
    renormalize: if contributions to a token are missing, its other weights are scaled up to the
        full sum
    on_failure: "continue" without lost ranks, or "raise"; None: the group's own
    is_normal: for the normal mode, whose results are not in the buffer's memory
    beside: another runtime of the same members, whose connections this one uses
    bytes_beside: of the runtimes that are made beside this one
    """

    def __init__(
        self,
        members: Members,
        num_bytes: int,
        *,
        timeout: timedelta | None,
        renormalize: bool,
        on_failure: OnFailure | None,
        is_normal: bool = False,
        beside: Runtime | None = None,
        bytes_beside: int = 0,
    ) -> None:
        if on_failure not in (None, *ON_FAILURE):
            raise ValueError(f"on_failure is {on_failure!r}, not one of {ON_FAILURE}")
        mode = on_failure or (members.backend.on_failure if members.backend else "continue")
        self.rank, self.size = members.rank, members.size
        self.timeout = timeout or members.timeout
        self._last_combine: Operation | None = None
        self._backend = members.backend
        self._is_due = False
        self._masked: set[int] = set()
        self._rounds = 0  # how often the members have changed
        # Of each handle, by its way: `_rounds` at its dispatch.
        self._ways: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._companions: list[Runtime] = []  # made beside this one
        self._beside = beside
        if beside is not None:
            beside._companions.append(self)
        self._make = partial(
            native(),
            members.rank,
            members.size,
            num_bytes,
            self.timeout,
            backend=members.backend,
            exchange=members.exchange,
            route_hint=members.route_hint,
            renormalize=renormalize,
            raises=mode == "raise",
            engine=transfer_engine() if members.backend is None and beside is None else None,
            devices=device_filter(),
            has_results=not is_normal,
            bytes_beside=bytes_beside,
        )
        self._native: EpBuffer | None = self._make(beside=None if beside is None else beside.native)
        self._series = self._series_now()

    @property
    def native(self) -> EpBuffer:
        if self._native is None:
            raise RuntimeError(f"rank {self.rank}: this Buffer was destroyed: make a new one")
        return self._native

    def _series_now(self) -> int:
        return 0 if self._backend is None else self._backend.series

    def update_members(self) -> None:
        """If the group has let new processes in since this runtime was made, the next dispatch
        begins with them, also of the runtimes made beside this one. Local. Raises if this runtime
        cannot be used any more."""
        self.native.update_members()
        self._is_due = self._series != self._series_now()

    def begin_dispatch(self) -> None:
        """Called before a dispatch sends anything: with new processes in the group, makes native
        buffers with them, in the order of the constructors. All members come to the same dispatch,
        and a new process makes its Buffer. Handles of the native buffers before are refused."""
        first = self._beside or self
        if not first._is_due:
            return
        first._is_due = False
        runtimes = [first, *first._companions]
        before = [one.native for one in runtimes]
        made: list[EpBuffer] = []
        try:
            for one in runtimes:
                made.append(one._make(beside=made[0] if made else None))
        except BaseException:
            for one, native in zip(runtimes, made, strict=False):
                native.close(one.timeout)
            raise
        for one, native in zip(runtimes, made, strict=True):
            one._native, one._series = native, one._series_now()
            one._rounds += 1
            for rank in one._masked:
                native.mask_rank(rank, True)
        for one, native in zip(runtimes, before, strict=True):
            native.close(one.timeout)

    def note(self, way: object) -> None:
        """The native buffer has made this way of a handle."""
        self._ways[way] = self._rounds

    def refuse_old(self, operation: str, way: object) -> None:
        """Raises RuntimeError for a handle from before the members changed. To be called before
        anything is sent. A dispatch with a handle cannot be the first one with other members."""
        made = self._ways.get(way)
        is_boundary = operation == "dispatch" and (self._beside or self)._is_due
        if made is not None and (made != self._rounds or is_boundary):
            raise RuntimeError(
                f"rank {self.rank}, {operation}: the members of this Buffer have changed since the "
                "handle's dispatch: dispatch again, without it (obsolete generation)"
            )

    def mask_rank(self, rank: int, is_masked: bool) -> None:
        """Masks stay when members change."""
        self.native.mask_rank(rank, is_masked)
        (self._masked.add if is_masked else self._masked.discard)(rank)

    def unmask_all(self) -> None:
        self.native.unmask_all()
        self._masked.clear()

    def close(self) -> None:
        """Waits for operations in the background. Every later call raises."""
        buffer, self._native = self._native, None
        if buffer is not None:
            buffer.close(self.timeout)
        if self._last_combine is not None:
            self._last_combine.let_go()

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_tokens: int,
        num_experts: int,
        *,
        use_fp8: bool,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        active_ranks: Tensor | None = None,
        timeout_us: int | None = -1,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        cumulative_recv_stats: Tensor | None = None,
        wait_stats: Tensor | None = None,
    ) -> tuple[Received, Tensor, Handle, EventOverlap, Hook | None]:
        _check_one_way_to_wait(async_finish, return_recv_hook)
        self.begin_dispatch()
        if not (isinstance(x, Tensor) and isinstance(topk_idx, Tensor)):
            raise self._no_tensor("dispatch", x=x, topk_idx=topk_idx)
        check_choices(topk_idx)
        check_room(
            1,
            num_max_dispatch_tokens_per_rank=num_max_tokens,
            hidden=max([1, *x.shape[-1:]]),
            num_experts=num_experts,
        )
        with profiled("dispatch"):
            rows, scales, counts, sources, ranges, native, work = self.native.dispatch(
                x,
                topk_idx,
                num_max_tokens,
                num_experts,
                use_fp8,
                round_scale,
                use_ue8m0,
                active_ranks,
                timeout_us or -1,
                async_finish or return_recv_hook,
                return_recv_hook,
                cumulative_recv_stats,
                wait_stats,
            )
        recv_x: Received = rows if scales is None else (rows, scales)
        parts = (sources, ranges, num_max_tokens, x.size(1), num_experts)
        handle = Handle(parts, native)
        self.note(native)
        operation = Operation("dispatch", work)
        return recv_x, counts, handle, *_waits(operation, async_finish, return_recv_hook)

    def combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Handle,
        *,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        out: Tensor | None = None,
        active_ranks: Tensor | None = None,
        timeout_us: int | None = -1,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        wait_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        _check_one_way_to_wait(async_finish, return_recv_hook)
        native = self._native_of("combine", handle)
        are_tensors = isinstance(x, Tensor) and isinstance(topk_idx, Tensor)
        if not (are_tensors and isinstance(topk_weights, Tensor)):
            raise self._no_tensor("combine", x=x, topk_idx=topk_idx, topk_weights=topk_weights)
        check_choices(topk_idx)
        with profiled("combine"):
            combined_x, missing, work = self.native.combine(
                x,
                topk_idx,
                topk_weights,
                native,
                use_logfmt,
                zero_copy,
                out,
                active_ranks,
                timeout_us or -1,
                async_finish or return_recv_hook,
                return_recv_hook,
                wait_stats,
            )
        operation = Operation("combine", work, missing)
        self._last_combine = operation
        return combined_x, *_waits(operation, async_finish, return_recv_hook)

    def next_combine_buffer(self, handle: Handle) -> Tensor:
        native = self._native_of("get_next_combine_buffer", handle)
        return self.native.next_combine_buffer(native)

    def missing_contributions(self) -> Tensor:
        if self._last_combine is None:
            raise RuntimeError(f"rank {self.rank}: this Buffer has combined nothing yet")
        return self._last_combine.missing_contributions()

    def _no_tensor(self, operation: str, **given: Any) -> TypeError:
        name, value = next(one for one in given.items() if not isinstance(one[1], Tensor))
        return TypeError(
            f"rank {self.rank}, {operation}: {name} must be a tensor, not {type(value).__name__}"
        )

    def _native_of(self, operation: str, handle: Any) -> EpHandle:
        try:
            native = Handle.way_of(handle)
        except TypeError as error:
            raise TypeError(f"rank {self.rank}, {operation}: {error}") from None
        self.refuse_old(operation, native)
        return native


def _check_one_way_to_wait(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise ValueError("async_finish and return_recv_hook are two ways to wait: choose one")


def _waits(
    operation: Operation, async_finish: bool, return_recv_hook: bool
) -> tuple[EventOverlap, Hook | None]:
    event = EventOverlap.of(operation, asynchronous=async_finish)
    return event, operation.finish if return_recv_hook else None
