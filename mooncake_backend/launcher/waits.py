"""What a rank's backend notes for the launcher, in a file beside the rank's error file.

How long the loss of ranks held up its calls, and that a new process has become a rank of the
running job (csrc/membership/loss_waits.h).
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

NAME = "waits.txt"
MOST_BYTES = 1 << 20
LINE = re.compile(r"^(?:(\d{1,9}) (\d{1,15})|(joined))\n", re.MULTILINE)


def ask(error_file: str) -> None:
    """Makes the file. The backend writes nothing if there is none. "" if ranks have no files."""
    if not error_file:
        return
    with contextlib.suppress(OSError):  # the table can do without it
        _beside(error_file).touch(mode=0o600)


class Waits:
    """The waits that one rank has noted. Lines of one loss are told from lines of a later loss of
    the same rank by the time at which the launcher read them."""

    def __init__(self, error_file: str) -> None:
        self._path = _beside(error_file) if error_file else None
        self._longest: dict[tuple[int, float], float] = {}  # by lost rank, and time of reading
        self._read = 0  # bytes
        # When the launcher learned that this process has joined the job. Without a file it cannot.
        self.joined: float | None = None if error_file else 0.0

    def read(self, now: float) -> None:
        """Reads the lines that are new. Ignores text that is not a whole line of ours."""
        if self._path is None:
            return
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read(MOST_BYTES - self._read)
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for rank, micros, joined in LINE.findall(whole.decode("ascii", errors="replace")):
            if joined:
                self.joined = now if self.joined is None else self.joined
                continue
            key = int(rank), now
            self._longest[key] = max(self._longest.get(key, 0.0), int(micros) / 1e6)

    def all(self) -> list[tuple[int, float, float]]:
        """A lost rank, the longest wait for it in seconds, and the time at which it was read."""
        return [(rank, wait, when) for (rank, when), wait in sorted(self._longest.items())]


def _beside(error_file: str) -> Path:
    return Path(error_file).with_name(NAME)
