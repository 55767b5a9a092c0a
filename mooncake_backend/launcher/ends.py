"""Waits for the ends of processes."""

from __future__ import annotations

import os
import select

BLIND = 0.01  # seconds between two looks at processes that cannot be watched


class Ends:
    """Watches processes by their pidfds, which the kernel makes readable when a process ends. A
    process without one (a kernel before 5.3, a sandbox, no free descriptor) is looked at every
    10 ms."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._files: dict[int, int | None] = {}  # by name; None: cannot be watched

    def watch(self, name: int, pid: int) -> None:
        """`pid`: a child that has not been reaped. `name`: chosen by the caller."""
        try:
            file = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._files[name] = None
            return
        self._files[name] = file
        self._poll.register(file, select.POLLIN)

    def forget(self, name: int) -> None:
        """Does nothing for a name that is not watched."""
        file = self._files.pop(name, None)
        if file is not None:
            self._poll.unregister(file)
            os.close(file)

    def wait(self, seconds: float) -> None:
        """Returns when a watched process has ended, after `seconds`, or earlier."""
        if None in self._files.values():
            seconds = min(seconds, BLIND)
        self._poll.poll(max(0.0, seconds) * 1000)

    def close(self) -> None:
        for name in list(self._files):
            self.forget(name)
