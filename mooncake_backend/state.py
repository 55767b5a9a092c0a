"""What a group is doing: where to look first when a job hangs (docs/hangs.md)."""

from __future__ import annotations

import signal
from typing import Any

from mooncake_backend import extension
from mooncake_backend.group import backend_of


def dump_state(group: Any) -> str:
    """What this rank knows of the group, in words: the operation that it is in, whom it waits for,
    and how far every rank has come. Reads only; any thread may call it at any time, also while the
    group is stuck."""
    return backend_of(group).state()


def dump_state_on_signal(signum: int = signal.SIGUSR2) -> None:
    """From now on the signal has this process write the states of all its groups to stderr. A
    thread of its own does it, so it works whatever the other threads are stuck in. A signal that
    has a handler already, or is ignored, raises ValueError and stays as it is."""
    extension.load().dump_state_on_signal(int(signum))
