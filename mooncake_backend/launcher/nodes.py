"""The launchers of a job's nodes: they tell each other how their ranks ended, and leave together.

Each launcher keeps a line in the job's store and rewrites it regularly. A launcher whose line does
not change any more has gone. A launcher whose ranks have all ended waits for the other launchers,
because its process may hold the store that their ranks use. It does not wait for a launcher that
has gone, nor if the store has gone.

A separate thread talks to the store: a call may last until the store's timeout, and the agent must
see signals and the ends of its ranks meanwhile.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store

from mooncake_backend.launcher.endings import Ending
from mooncake_backend.ranks import name_ranks

log = logging.getLogger(__name__)

PREFIX = "mooncake-run/"
POLL = 0.1


@dataclass
class Line:
    """The last line of another launcher."""

    text: bytes = b""
    host: str = ""
    ranks: list[int] = field(default_factory=list)
    running: bool = True  # a rank of it is in the job
    endings: list[Ending] | None = None  # None: not all of its ranks have ended
    changed: float = 0.0  # on our clock


class Nodes:
    """interval: seconds between two rewrites of a line. attempts: number of intervals without a
    change after which a launcher has gone. on_cut_off: called on the thread when the store has
    gone."""

    def __init__(
        self,
        store: Store,
        me: int,
        size: int,
        host: str,
        ranks: Sequence[int],
        interval: float = 5.0,
        attempts: int = 3,
        on_cut_off: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self.me = me
        self.size = size
        self.interval = interval
        self.patience = interval * attempts
        self.lines = {node: Line() for node in range(size) if node != me}
        self.own: dict[str, Any] = {"host": host, "ranks": list(ranks)}
        self.own |= {"running": True, "endings": None}
        self.have_met = threading.Event()
        self.on_cut_off = on_cut_off
        self.is_cut_off = False  # the store cannot be reached any more
        self._ended = threading.Event()  # all ranks of this node have ended
        self._closed = threading.Event()
        self._wake = threading.Event()  # there is something to write or to read
        self._asked: float | None = None  # when others_run() was asked first
        self._read_at = 0.0  # when the last look at the other lines began
        self._last_answer = time.monotonic()
        if size == 1:
            self.have_met.set()
        else:
            threading.Thread(target=self._run, name="mooncake-run-nodes", daemon=True).start()

    def meet(self, endings: Sequence[Ending]) -> bool:
        """Call it repeatedly once all ranks of this node have ended. Returns whether all other
        nodes' ranks have ended, too, or no node is left to wait for."""
        if not self._ended.is_set():
            self.own["endings"] = [asdict(ending) for ending in endings]
            self._last_answer = time.monotonic()
            self._ended.set()
            self._wake.set()
        if time.monotonic() - self._last_answer > self.patience:
            self._cut_off("no answer")
        return self.have_met.is_set()

    def tell(self, running: bool) -> None:
        """Tells the other launchers whether a rank of this node is in the job."""
        if running != self.own["running"]:
            self.own["running"] = running
            self._wake.set()

    def others_run(self) -> bool | None:
        """Whether a rank of another node is in the job, or may be. None: not known yet; the thread
        reads the lines, so ask again. It first writes our own line: of two launchers that lose
        their last ranks, one at least learns of both."""
        if self.size == 1 or self.is_cut_off:
            return False
        if self._asked is None:
            self._asked = time.monotonic()
            self._wake.set()
        if self._read_at < self._asked:
            return None
        self._asked = None
        return any(line.running for line in self.lines.values())

    def close(self) -> None:
        self._closed.set()
        self._ended.set()
        self._wake.set()

    # ---- results, once the nodes have met

    def endings(self) -> list[Ending]:
        return [ending for line in self.lines.values() for ending in line.endings or []]

    def is_first(self) -> bool:
        """Whether this node is the first one whose ranks' ends are known."""
        return all(node > self.me or line.endings is None for node, line in self.lines.items())

    def unknown(self) -> list[str]:
        return [
            f"{name_ranks(line.ranks)} on {line.host}: not known, their launcher is gone"
            if line.ranks
            else f"ranks of node {node}: not known, their launcher cannot be asked"
            for node, line in self.lines.items()
            if line.endings is None
        ]

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._wake.clear()
                began = time.monotonic()
                self._write()
                if self._asked is not None or not all(line.ranks for line in self.lines.values()):
                    self._read()
                    self._read_at = began
                self._wake.wait(self.interval)
            if not self._closed.is_set():
                self._meet()
        except Exception as error:  # from the store; its type differs between versions of torch
            self._cut_off(str(error).splitlines()[0])
            self.on_cut_off()

    def _meet(self) -> None:
        self._write()
        self._count("ended", 1)
        for line in self.lines.values():
            line.changed = time.monotonic()
        looked = 0.0
        while self._count("ended") < self.size - len(self._gone()):
            if time.monotonic() - looked > self.interval:
                self._write()
                self._read()
                looked = time.monotonic()
            if self._closed.wait(POLL):
                return
        self._read()
        # The launcher that holds the store leaves only when the other launchers do not need it any
        # more.
        self._count("left", 1)
        end = time.monotonic() + self.patience
        while self._count("left") < self.size - len(self._gone()) and time.monotonic() < end:
            if self._closed.wait(POLL):
                return
        self.have_met.set()

    def _write(self) -> None:
        self.own["beat"] = time.monotonic()
        self.store.set(f"{PREFIX}{self.me}", json.dumps(self.own))
        self._last_answer = time.monotonic()

    def _read(self) -> None:
        missing = [node for node, line in self.lines.items() if line.endings is None]
        if missing and not self.store.check([f"{PREFIX}{node}" for node in missing]):
            missing = [node for node in missing if self.store.check([f"{PREFIX}{node}"])]
        if not missing:
            return
        texts = self.store.multi_get([f"{PREFIX}{node}" for node in missing])
        self._last_answer = time.monotonic()
        for node, text in zip(missing, texts, strict=True):
            line = self.lines[node]
            if text == line.text:
                continue
            said = json.loads(text)
            line.text, line.changed = text, time.monotonic()
            line.host, line.ranks = said["host"], said["ranks"]
            line.running = said["running"] and said["endings"] is None
            if said["endings"] is not None:
                line.endings = [Ending(**ending) for ending in said["endings"]]

    def _gone(self) -> list[int]:
        """Nodes whose line has not changed for so long that their launcher must have gone."""
        now = time.monotonic()
        return [
            node
            for node, line in self.lines.items()
            if line.endings is None and now - line.changed > self.patience
        ]

    def _count(self, name: str, more: int = 0) -> int:
        count = self.store.add(f"{PREFIX}{name}", more)
        self._last_answer = time.monotonic()
        return int(count)

    def _cut_off(self, why: str) -> None:
        if not self.is_cut_off and not self._closed.is_set():
            self.is_cut_off = True
            log.warning(
                "mooncake-run: the launchers' store is gone (%s): this node goes on alone", why
            )
        self.have_met.set()
