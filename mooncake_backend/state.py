"""The state of a group: where to look first when a job hangs (docs/hangs.md)."""

from __future__ import annotations

import signal
from typing import Any

from mooncake_backend import extension
from mooncake_backend.group import backend_of


def dump_state(group: Any) -> str:
    """Describes the group as this rank knows it: the operation that it is in, the ranks that it
    waits for, and the progress of every rank. Only reads. Any thread may call it at any time, also
    while the group is stuck."""
    return backend_of(group).state()


def dump_state_on_signal(signum: int = signal.SIGUSR2) -> None:
    """Makes the signal write the states of all groups of this process to stderr. A separate thread
    writes them, so this works even if all other threads are stuck. ValueError, and no change, if
    the signal has a handler already or is ignored."""
    extension.load().dump_state_on_signal(int(signum))
