"""How long the loss of ranks held up calls of other ranks.

For each call that a loss held up, a rank's backend writes a line to a file beside the rank's error
file (csrc/membership/loss_waits.h).
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

NAME = "waits.txt"
MOST_BYTES = 1 << 20
LINE = re.compile(r"^(\d{1,9}) (\d{1,15})\n", re.MULTILINE)


def ask(error_file: str) -> None:
    """Makes the file. The backend writes nothing if there is none."""
    with contextlib.suppress(OSError):  # the table can do without it
        _beside(error_file).touch(mode=0o600)


def read(error_file: str) -> dict[int, float]:
    """The longest wait in seconds, by lost rank. Ignores text that is not a whole line of ours."""
    try:
        with _beside(error_file).open(encoding="ascii", errors="replace") as file:
            text = file.read(MOST_BYTES)
    except OSError:
        return {}
    longest: dict[int, float] = {}
    for rank, micros in LINE.findall(text):
        longest[int(rank)] = max(longest.get(int(rank), 0.0), int(micros) / 1e6)
    return longest


def _beside(error_file: str) -> Path:
    return Path(error_file).with_name(NAME)
