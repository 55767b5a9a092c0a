"""Who is in a group: the functions of `mooncake.pg`. Each takes a process group or the backend that
`group._get_backend(device)` returns."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

import torch

from mooncake_backend.errors import EvictedError, MinorityError
from mooncake_backend.group import backend_of
from mooncake_backend.options import (
    MooncakeBackendOptions,
    microseconds,
    set_collective_timeout_us,
    set_device_filter,
    set_host_ip,
    set_p2p_timeout_us,
    set_transfer_engine,
)

__all__ = [
    "Evidence",
    "MooncakeBackendOptions",
    "SyncAfterFailureResponse",
    "SyncAfterFailureStatus",
    "acknowledge_loss",
    "activate_ranks",
    "deactivate_ranks",
    "extend_group_size_to",
    "get_active_ranks",
    "get_current_epoch",
    "get_evidence",
    "get_failed_ranks_hint",
    "get_local_success",
    "get_num_synced_ranks",
    "get_peer_state",
    "get_preferred_hca",
    "join_group",
    "recover_ranks",
    "set_collective_timeout_us",
    "set_device_filter",
    "set_fault_reconciliation_window_us",
    "set_host_ip",
    "set_p2p_timeout_us",
    "set_transfer_engine",
    "sync_after_failure",
]


def get_active_ranks(group: Any) -> torch.Tensor:
    """The group's own int32 tensor (the caller's, if one was given in the options): 1 = active. It
    is always up to date: written when a rank is lost, before the operation that went on without
    that rank has ended. Elements beyond the group's size are not touched."""
    return backend_of(group).active_ranks


def get_current_epoch(group: Any) -> int:
    """Counts the changes of who is in the job, from 1 on; the same number means the same ranks."""
    return backend_of(group).epoch


def get_failed_ranks_hint(work: Any) -> torch.Tensor:
    """int32, as many elements as the group may have ranks: 1 for those that this operation lost,
    which took part in the one before it; of a message the other side, if that is lost. Empty for a
    work of another backend; zeros until it has ended."""
    lost = getattr(work, "lost_ranks", None)
    if lost is None:
        return torch.empty(0, dtype=torch.int32)
    hint = torch.zeros(work.max_group_size, dtype=torch.int32)
    hint[lost] = 1
    return hint


def get_local_success(work: Any) -> bool:
    """Whether the work has lost no rank and not ended with an error; False for a work of another
    backend."""
    lost = getattr(work, "lost_ranks", None)
    return lost == [] and (work.is_success() or not work.is_completed())


@dataclass(frozen=True)
class Evidence:
    """How the end of a rank is known here. An observation, not yet membership.

    rank: in the group that was asked
    kind: "goodbye", it destroyed the job on its side; "ended": its program came to its end without
    that; "failed": it said that it ends by an error that nobody caught; "exited": the kernel of its
    host says that the process has ended or cannot go on. All these are certain. The others are
    suspicions: "unreachable": the connection broke; "refused": and nobody listens there any more;
    "silent": nothing was heard of it for the failure timeout; "excludes": it goes on without ranks
    that are in
    detail: how that is known, in one line
    monotonic: when, in seconds as time.monotonic() counts them
    """

    rank: int
    kind: Literal[
        "goodbye", "ended", "failed", "exited", "unreachable", "refused", "silent", "excludes"
    ]
    detail: str
    monotonic: float


def get_evidence(group: Any) -> list[Evidence]:
    """Of the ranks of the group that this rank knows to be gone, in rank order."""
    return [Evidence(*cast("Any", seen)) for seen in backend_of(group).evidence()]


def acknowledge_loss(group: Any) -> bool:
    """In mode "raise": operations of the group that are called from now on run, and are the first
    ones after the loss. To be called on all ranks of the group, where they go on together. Needed
    only where the thread that calls operations does not get the error itself, or where the ranks
    have called different numbers of operations since the loss.

    Waits until what was called before has ended. Returns whether the group has lost a rank since
    the last time."""
    return backend_of(group).acknowledge_loss()


def get_peer_state(group: Any, ranks: Sequence[int]) -> list[bool]:
    """Of each of these ranks: whether it is in the group's view, and nothing is known here that
    speaks against it. Local: nobody is asked."""
    backend = backend_of(group)
    for rank in ranks:
        if not 0 <= rank < backend.size():
            raise RuntimeError(
                f"invalid argument: rank {rank} is not in a group of {backend.size()}"
            )
    healthy = set(backend.survivors) - {seen.rank for seen in get_evidence(group)}
    return [rank in healthy for rank in ranks]


def get_num_synced_ranks(group: Any) -> int:
    """How many ranks of the group get_peer_state() answers True for, this one included."""
    return sum(get_peer_state(group, range(backend_of(group).size())))


class SyncAfterFailureStatus(enum.Enum):
    """Reconciled: the survivors have agreed on a loss that was not known at the last call.
    NoPending: nobody is lost or suspected beyond those. Rejected: see the reason."""

    Reconciled = 0
    NoPending = 1
    Rejected = 2


@dataclass(frozen=True)
class SyncAfterFailureResponse:
    status: SyncAfterFailureStatus
    reject_reason: str = ""


_reconciliation_window = 30.0
_LOOK_AGAIN = 0.002


def set_fault_reconciliation_window_us(us: int) -> None:
    """Microseconds that sync_after_failure() waits at most, 30 seconds if never called. The
    survivors agree as soon as they have heard of each other: nothing else waits for this time."""
    global _reconciliation_window
    _reconciliation_window = microseconds("set_fault_reconciliation_window_us", us)


def sync_after_failure(group: Any) -> SyncAfterFailureResponse:
    """Waits until every rank of the group that is accused here is out of the view, or is cleared.
    Not needed before the next operation: each waits for that by itself where it has to. After a
    message to a rank that died it tells when get_active_ranks() says so."""
    backend = backend_of(group)
    deadline = time.monotonic() + _reconciliation_window
    while True:
        try:
            backend.check_standing()
        except (EvictedError, MinorityError) as error:
            return SyncAfterFailureResponse(SyncAfterFailureStatus.Rejected, str(error))
        survivors = set(backend.survivors)
        accused = [
            seen
            for seen in get_evidence(group)
            if seen.rank in survivors and seen.kind != "goodbye"
        ]
        if not accused:
            break
        if time.monotonic() > deadline:
            who = "; ".join(f"rank {seen.rank}, {seen.kind}: {seen.detail}" for seen in accused)
            reason = (
                f"after {_reconciliation_window} s the survivors have not agreed on who is lost, "
                f"but there is evidence against {who}"
            )
            return SyncAfterFailureResponse(SyncAfterFailureStatus.Rejected, reason)
        time.sleep(_LOOK_AGAIN)
    lost = {seen.rank for seen in get_evidence(group) if seen.kind != "goodbye"} - survivors
    is_news = backend.note_losses(sorted(lost))
    return SyncAfterFailureResponse(
        SyncAfterFailureStatus.Reconciled if is_news else SyncAfterFailureStatus.NoPending
    )


def get_preferred_hca(group: Any, location: str) -> str:
    """The NIC near `location` ("cuda:0"); "" when none is known, and no transport uses one yet."""
    return ""


def not_yet(name: str, missing: str) -> Callable[..., NoReturn]:
    """A function that other people's code imports, before what it needs is built."""

    def function(*arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not available in this version: {missing} is missing")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Not available yet: {missing} is missing."
    return function


_CHANGE = "changing a group's ranks (replace, grow, shrink)"

activate_ranks = not_yet("activate_ranks", _CHANGE)
deactivate_ranks = not_yet("deactivate_ranks", _CHANGE)
extend_group_size_to = not_yet("extend_group_size_to", _CHANGE)
join_group = not_yet("join_group", _CHANGE)
recover_ranks = not_yet("recover_ranks", _CHANGE)
