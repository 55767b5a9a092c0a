"""The objects that wait for a dispatch or a combine, in DeepEP's two classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch


def current_device() -> torch.device | None:
    """The current device of the accelerator that the program uses; None: it uses none."""
    find = getattr(getattr(torch, "accelerator", None), "current_accelerator", lambda: None)
    kind = find()
    if kind is None:
        return None
    module = torch.get_device_module(kind)
    if not module.is_available() or not module.is_initialized():
        return None
    return torch.device(kind.type, module.current_device())


def current_stream() -> torch.Stream | None:
    """The stream of the current device; None: the program uses none."""
    device = current_device()
    return None if device is None else torch.accelerator.current_stream(device)


class Work(Protocol):
    """The waits for a native call, as EpWork has them."""

    def wait(self) -> None: ...
    def synchronize(self) -> None: ...


class Enqueued:
    """Work of the current stream of a device, enqueued so far; its native calls are `works`. On the
    CPU it has ended."""

    def __init__(self, works: Sequence[Work], device: torch.device) -> None:
        self._works = works
        self._end = None if device.type == "cpu" else torch.Event(device)
        if self._end is not None:
            self._end.record(torch.accelerator.current_stream(device))

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._end is not None:
            torch.accelerator.current_stream(self._end.device).wait_event(self._end)

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()
        if self._end is not None:
            self._end.synchronize()


class Operation:
    """One dispatch or combine.

    missing: for a combine, see Buffer.missing_contributions
    """

    __slots__ = ("_missing", "_name", "_work")

    def __init__(self, name: str, work: Work, missing: torch.Tensor | None = None) -> None:
        self._name = name
        self._work = work
        self._missing = missing

    def finish(self) -> None:
        """Waits, see EpWork.wait(). Raises the operation's error at each call."""
        with profiled(self._name):
            self._work.wait()

    def synchronize(self) -> None:
        """Waits on the host until the results are there."""
        self._work.synchronize()

    def missing_contributions(self) -> torch.Tensor:
        """Waits for the operation, and returns its missing contributions."""
        if self._missing is None:
            raise AttributeError("a dispatch has no missing_contributions; a combine has")
        self.finish()
        return self._missing

    def let_go(self) -> None:
        """Waits, and keeps the end without the work, which holds the memory of its Buffer."""
        self._work = _End(self._work)


class _End:
    """The end of a work: ok, or its error."""

    def __init__(self, work: Work) -> None:
        self._error: Exception | None = None
        try:
            work.synchronize()
        except Exception as error:
            self._error = error.with_traceback(None)

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    synchronize = wait


class EventHandle:
    """The end of an operation. Without one, as Buffer.capture() makes it: the place at which the
    current stream was then. The calls of a CPU thread are done when they return."""

    def __init__(self, operation: Operation | None = None) -> None:
        self._operation = operation
        self._place: torch.Event | None = None
        device = current_device() if operation is None else None
        if device is not None:
            self._place = torch.Event(device)
            self._place.record(torch.accelerator.current_stream(device))

    def current_stream_wait(self) -> None:
        """Makes the current stream wait. Blocks the calling thread until an operation with CPU
        tensors has ended; one with tensors of a device, unless its streams know words."""
        if self._operation is not None:
            self._operation.finish()
        if self._place is not None:
            torch.accelerator.current_stream(self._place.device).wait_event(self._place)

    def synchronize(self) -> None:
        """Blocks the calling thread until the results of the operation are there."""
        if self._operation is not None:
            self._operation.synchronize()
        if self._place is not None:
            self._place.synchronize()


class EventOverlap:
    """The end of an operation that was called with async_finish=True. For other operations `event`
    is None and a wait here does nothing: they have ended, or a hook waits for them.

        with event(release_handle=True):
            work_beside_it()

    hook_after_wait: is called once, at the end of the next wait, which returns its result
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._releases_at_exit = False
        self._operation: Operation | None = None

    @classmethod
    def of(cls, operation: Operation, asynchronous: bool) -> EventOverlap:
        overlap = cls(EventHandle(operation) if asynchronous else None)
        overlap._operation = operation
        return overlap

    @property
    def missing_contributions(self) -> torch.Tensor:
        """bool [n] of a combine, see Buffer.missing_contributions. Waits for the combine to end."""
        if self._operation is None:
            raise AttributeError("this event does not belong to a combine")
        return self._operation.missing_contributions()

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Waits, see EventHandle. Returns the result of the hook, or None without one."""
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        result = None if hook is None else hook()
        if release_handle:
            self.event = None
        return result

    def wait(self) -> Any:
        """current_stream_wait() that keeps the event."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        if self.hook_after_wait is not None:
            raise RuntimeError("this event has a hook already, and calls one after a wait")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Prepares the next `with`. Does not wait."""
        self._releases_at_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        releases, self._releases_at_exit = self._releases_at_exit, False
        self.current_stream_wait(releases)


def profiled(name: str) -> torch.profiler.record_function | _Unprofiled:
    """A range of torch's profiler if that is running, else a context that does nothing."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(f"mooncake_ep::{name}")
    return _UNPROFILED


class _Unprofiled:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


_UNPROFILED = _Unprofiled()
