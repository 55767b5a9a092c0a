"""How long ranks were held up by the loss of others.

Beside the error file of each rank lies one to which its backend writes a line for every call that
a loss held up (csrc/membership/loss_waits.h).
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

NAME = "waits.txt"
MOST_BYTES = 1 << 20
LINE = re.compile(r"^(\d{1,9}) (\d{1,15})\n", re.MULTILINE)


def ask(error_file: str) -> None:
    """Without the file nothing is written."""
    with contextlib.suppress(OSError):  # the table does without
        _beside(error_file).touch(mode=0o600)


def read(error_file: str) -> dict[int, float]:
    """By lost rank: the longest, in seconds. What is no whole line of ours is passed over."""
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
