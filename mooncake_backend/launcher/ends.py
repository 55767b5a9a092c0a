"""Waits for the ends of processes, and finds out how they ended."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Hashable
from contextlib import suppress
from subprocess import Popen

BLIND = 0.01  # seconds between two looks at processes that cannot be watched


class Ends:
    """Watches processes by their pidfds, which the kernel makes readable when a process ends. A
    process without one (a kernel before 5.3, a sandbox, no free descriptor) is looked at every
    10 ms."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._files: dict[Hashable, int | None] = {}  # by name; None: cannot be watched

    def watch(self, name: Hashable, pid: int) -> None:
        """`pid`: a child that has not been reaped. `name`: chosen by the caller."""
        try:
            file = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._files[name] = None
            return
        self._files[name] = file
        self._poll.register(file, select.POLLIN)

    def forget(self, name: Hashable) -> None:
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


def code_if_ended(process: Popen[bytes]) -> int | None:
    """The exit code as of Popen.poll(); None while the process runs. If it died, all that is left
    of its process group is killed first: a new process must find no helper of the dead one, and a
    rank that a dead wrapper started must not live on beside its replacement. Its number names the
    group for certain only until the process is reaped."""
    if process.returncode is not None:
        return process.returncode
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # reaped elsewhere: SIGCHLD is ignored in this process
        return process.poll()
    if ended is None:
        return None
    if (ended.si_code, ended.si_status) != (os.CLD_EXITED, 0):
        kill_group(process.pid)
    return process.poll()


def kill_group(pid: int) -> None:
    """Kills the process group of a process that leads it and has not been reaped."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
