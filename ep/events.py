"""The objects that wait for a dispatch or a combine, in DeepEP's two classes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mooncake_backend._C import EpWork


_LAST_STEPS = threading.Lock()  # two threads may wait for one operation


class Operation:
    """One dispatch or combine.

    last_steps: functions to call once the results are there
    missing: for a combine, see Buffer.missing_contributions
    """

    __slots__ = ("_last_steps", "_missing", "_name", "_work")

    def __init__(
        self,
        name: str,
        work: EpWork,
        last_steps: tuple[Callable[[], None], ...],
        missing: torch.Tensor | None = None,
    ) -> None:
        self._name = name
        self._work = work
        self._last_steps = last_steps
        self._missing = missing

    @property
    def has_last_steps(self) -> bool:
        return bool(self._last_steps)

    def finish(self) -> None:
        """Waits. Raises the operation's error at each call."""
        with profiled(self._name):
            self.conclude()

    def conclude(self) -> None:
        """Like finish(), but hidden from the profiler: used when the operation has already
        ended."""
        try:
            self._work.wait()
        finally:
            # Also after an error: the masks then show the lost ranks.
            if self._last_steps:
                self._take_last_steps()

    def _take_last_steps(self) -> None:
        """Runs the last steps once. A second thread waits until they are done."""
        with _LAST_STEPS:
            for step in self._last_steps:
                step()
            self._last_steps = ()

    def missing_contributions(self) -> torch.Tensor:
        """Waits for the operation, and returns its missing contributions."""
        if self._missing is None:
            raise AttributeError("a dispatch has no missing_contributions; a combine has")
        self.finish()
        return self._missing


class EventHandle:
    """Waits for an operation. An event of Buffer.capture() has none and waits for nothing, because
    a CPU thread's calls are done when they return."""

    def __init__(self, operation: Operation | None = None) -> None:
        self._operation = operation

    def current_stream_wait(self) -> None:
        """Blocks the calling thread, because CPU tensors have no stream."""
        if self._operation is not None:
            self._operation.finish()

    synchronize = current_stream_wait


class EventOverlap:
    """The end of an operation that was called with async_finish=True. For other operations `event`
    is None and a wait here does nothing: they have ended, or a hook waits for them.

        with event:
            work_beside_it()
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hooks: tuple[Callable[[], Any], ...] = ()
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

    def current_stream_wait(self, release_handle: bool = False) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
        hooks, self._hooks = self._hooks, ()
        for hook in hooks:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Calls the hook once, at the end of the next wait."""
        self._hooks += (hook,)

    def __call__(self, release_handle: bool = False) -> None:
        self.current_stream_wait(release_handle)

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.current_stream_wait()


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
