"""Spares of a host: processes that have imported everything and wait to become a rank."""

from __future__ import annotations

import errno
import json
import logging
import math
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from mooncake_backend.launcher import spare as program
from mooncake_backend.launcher.budget import WINDOW, Budget
from mooncake_backend.launcher.endings import cause
from mooncake_backend.launcher.ends import Ends, code_if_ended, kill_group

log = logging.getLogger(__name__)

# Seconds after the start of the ranks, and after the use of a spare, before a spare is started: its
# imports must not slow the ranks' own, nor the return to full strength.
AFTER_START = 10.0
AFTER_USE = 2.0
MOST_LOST = 3  # spares that die unused and are followed by another one, in ten minutes
END = 5.0  # seconds for the end of a killed spare


class Spare:
    """A process that waits to become a rank. Its output is discarded until then."""

    def __init__(
        self, command: Sequence[str], preload: str, environment: Mapping[str, str]
    ) -> None:
        """Starts it. `command`: of a rank. OSError if the system starts no process."""
        self.is_ready = False
        self.error = ""  # why it cannot become ready
        # Of whole messages: none is ever half there, and no call here waits.
        self._link, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        interpreter, *arguments = command
        try:
            with link:
                self.process = subprocess.Popen(
                    [interpreter, "-u", program.__file__, str(link.fileno()), preload, *arguments],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[link.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            self._link.close()
            raise

    def read(self) -> None:
        """Reads the words of the process."""
        with suppress(OSError):
            if said := self._link.recv(program.MOST_BYTES):
                self.error = json.loads(said)["error"]
                self.is_ready = not self.error

    def become(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[Any] | None,
        stderr: IO[Any] | None,
    ) -> subprocess.Popen[bytes]:
        """Makes it the process that Popen() would start with these arguments. OSError if it has
        died, or if the order is too long."""
        order = json.dumps({"command": command, "environment": dict(environment)}).encode()
        files = [1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()]
        if len(order) > program.MOST_BYTES:
            raise OSError(errno.E2BIG, "the command and the environment are too long for a spare")
        socket.send_fds(self._link, [order], files)
        self._link.close()
        return self.process

    def end(self) -> None:
        """Kills it and the processes that it has started."""
        self._link.close()
        if self.process.returncode is None:
            kill_group(self.process.pid)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END)


class Spares:
    """Keeps `wanted` spares. They are started one after the other, each once the one before it is
    ready. If a module cannot be imported, no more are started."""

    def __init__(self, wanted: int, preload: str, ends: Ends) -> None:
        self.wanted = wanted
        self.preload = preload
        self.ends = ends  # watches each spare, named by itself
        self.kept: list[Spare] = []
        self.due = math.inf  # when the next one may be started, on the monotonic clock
        self.budget = Budget(MOST_LOST)
        self.command: Sequence[str] = ()
        self.environment: Mapping[str, str] = {}

    def begin(self, command: Sequence[str], environment: Mapping[str, str], now: float) -> None:
        """The ranks have been started. `command`, `environment`: of one of them, as far as spares
        need them."""
        self.command, self.environment = command, environment
        self.due = now + AFTER_START

    def next_start(self) -> float:
        """When keep() has one to start; infinite if none is missing, or one is not ready yet."""
        if len(self.kept) >= self.wanted or not all(spare.is_ready for spare in self.kept):
            return math.inf
        return self.due

    def keep(self, now: float) -> None:
        """Sees which spares are ready or have died, and starts one if it is due. The kernel ends
        a spare that still imports together with the thread that started it."""
        for spare in list(self.kept):
            code = code_if_ended(spare.process)
            spare.read()
            if code is None:
                continue
            self._remove(spare)
            if spare.error:
                self._stop(f"spare (pid {spare.process.pid}): {spare.error}")
            else:
                self._lost(f"spare (pid {spare.process.pid}): {cause(code)}", now)
        if self.next_start() <= now:
            try:
                spare = Spare(self.command, self.preload, self.environment)
            except OSError as error:
                self._lost(f"no spare can be started: {error!r}", now)
                return
            self.kept.append(spare)
            self.ends.watch(spare, spare.process.pid)

    def become(
        self, command: Sequence[str], environment: Mapping[str, str], *files: IO[Any] | None
    ) -> subprocess.Popen[bytes] | None:
        """Spare.become() of one that is ready, which is not kept any more. None: there is none."""
        for spare in list(self.kept):
            spare.read()
            if not spare.is_ready:
                continue
            self._remove(spare)
            self.due = max(self.due, time.monotonic() + AFTER_USE)
            try:
                return spare.become(command, environment, *files)
            except OSError as error:
                spare.end()
                log.warning(
                    "mooncake-run: spare (pid %d): %r; it is ended", spare.process.pid, error
                )
        return None

    def close(self) -> None:
        self.wanted = 0
        for spare in list(self.kept):
            self._remove(spare)
            spare.end()

    def _remove(self, spare: Spare) -> None:
        self.kept.remove(spare)
        self.ends.forget(spare)

    def _lost(self, what: str, now: float) -> None:
        pause = self.budget.take(0, now)
        if pause is None:
            self._stop(what, f", as {MOST_LOST} in {WINDOW / 60:.0f} minutes are used up")
            return
        self.due = max(self.due, now + pause)
        log.warning("mooncake-run: %s; another one is started", what)

    def _stop(self, what: str, why: str = "") -> None:
        self.due = math.inf
        log.warning("mooncake-run: %s; no more spares are started%s", what, why)
