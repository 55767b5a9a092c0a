"""mooncake-run tells its ranks which of them have died, so that no rank waits in init_process_group
until the timeout for a rank that died before.

A launcher appends a line for each of its ranks that dies to one key of the ranks' own store. A rank
that waits there to make the default group looks at that key (C10dStore::ranksLive in
csrc/backend/c10d_store.cc).

The key holds a number that the launcher of node 0 draws anew for each start of the ranks. A store
may outlive a job, and the lines of an earlier start must not fail this one. Each launcher writes
the key into a file beside the error file of each of its ranks. Ranks of another launcher find no
such file, and look at nothing.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import secrets
import threading
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

log = logging.getLogger(__name__)

NAME = "notices.txt"
KEY = re.compile(r"mooncake-run/[0-9a-f]{16}/died")
TOKEN = "mooncake-run/notices"  # key of the launchers' store
POLL = 0.1  # seconds between two looks at the launchers' store
PATIENCE = timedelta(seconds=10)  # for a connection to the ranks' store
MOST_BYTES = 200  # of a line: the first line of an exception may be long


def key_for(rank: int, size: int) -> str | None:
    """Returns the key at which this rank of a default group looks. None: mooncake-run did not start
    the rank, or the group is not one of all the ranks that it started."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return None
    if os.environ.get("RANK") != str(rank) or os.environ.get("WORLD_SIZE") != str(size):
        return None
    try:
        text = _beside(error_file).read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return text if KEY.fullmatch(text) else None


class Notices:
    """The notices of one launcher, for one start of its ranks. A thread talks to the stores: a call
    may last until the store's timeout, and the agent must see signals and its ranks meanwhile.

    store: the launchers' own, in which nothing is left of an earlier start
    node, size: number of this launcher, and of all of them
    host, port: where the ranks' store is
    error_files: of this launcher's ranks
    """

    def __init__(
        self,
        store: Store,
        node: int,
        size: int,
        host: str,
        port: int,
        error_files: Iterable[str],
    ) -> None:
        self._store = store
        self._node = node
        self._size = size
        self._place = (host, port)
        self._error_files = list(error_files)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: the end
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="mooncake-run-notices", daemon=True).start()

    def died(self, rank: int, how: str) -> None:
        """Tells all ranks. Returns at once."""
        line = " ".join(f"rank {rank}: {how}".split())
        cut = line.encode(errors="replace")[:MOST_BYTES].decode(errors="ignore")
        self._lines.put(cut + "\n")

    def close(self) -> None:
        self._closed.set()
        self._lines.put(None)

    def _run(self) -> None:
        try:
            token = self._agree()
            if token is None:
                return
            key = f"mooncake-run/{token}/died"
            for error_file in self._error_files:
                _write(_beside(error_file), key)
            ranks_store: Any = None
            while (line := self._lines.get()) is not None:
                if ranks_store is None:
                    ranks_store = TCPStore(
                        *self._place, is_master=False, wait_for_workers=False, timeout=PATIENCE
                    )
                ranks_store.append(key, line)
        except Exception as error:  # of the store; which type differs between versions of torch
            log.info("mooncake-run: the ranks cannot be told which of them died: %s", error)

    def _agree(self) -> str | None:
        """Returns the number that all launchers use. None: closed meanwhile."""
        own = secrets.token_hex(8)
        if self._size == 1:
            return own
        if self._node == 0:
            self._store.set(TOKEN, own)
            return own
        while not self._store.check([TOKEN]):
            if self._closed.wait(POLL):
                return None
        return self._store.get(TOKEN).decode()


def _write(path: Path, text: str) -> None:
    """A rank that reads the file meanwhile finds all of the text, or no file."""
    draft = path.with_name(f".{path.name}")
    draft.touch(mode=0o600)
    draft.write_text(text, encoding="ascii")
    draft.rename(path)


def _beside(error_file: str) -> Path:
    return Path(error_file).with_name(NAME)
