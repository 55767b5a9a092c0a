"""Membership of a group: the functions of `mooncake.pg`. Each takes a process group, or the backend
that `group._get_backend(device)` returns."""

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
from mooncake_backend.ranks import name_ranks
from mooncake_backend.replacing import (
    ProposalStatus,
    ProposeViewUpdateResponse,
    ViewUpdateStatus,
    activate_ranks,
    deactivate_ranks,
    join_group,
    note_growth,
    recover_ranks,
)

__all__ = [
    "Evidence",
    "MooncakeBackendOptions",
    "ProposalStatus",
    "ProposeViewUpdateResponse",
    "SyncAfterFailureResponse",
    "SyncAfterFailureStatus",
    "ViewUpdateStatus",
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


def get_active_ranks(group: Any, *, on_host: bool = False) -> torch.Tensor:
    """The group's int32 tensor, or the caller's if the options had one: 1 = active. A lost rank
    becomes 0 before the operation that went on without it has ended. Elements beyond the group's
    size are not touched.

    A tensor of a device is brought up to date by operations on tensors of the device, and by this
    call. on_host: its twin in pinned host memory, int32 [the group's size], which is always up to
    date and is read without waiting for the device; a tensor of the CPU is returned as it is."""
    backend = backend_of(group)
    backend.note_losses_read()
    note_growth()
    return backend.active_ranks_on_host if on_host else backend.active_ranks


def get_current_epoch(group: Any) -> int:
    """Counts the changes of the job's membership, from 1 on. The same number means the same ranks
    of the job. The job takes a new process in before the group does: get_active_ranks() tells about
    the group."""
    backend = backend_of(group)
    backend.note_losses_read()
    return backend.epoch


def get_failed_ranks_hint(work: Any) -> torch.Tensor:
    """int32, with one element for each rank that the group may have. For a collective, 1 marks the
    ranks that this operation lost, which took part in the one before it. For a message, 1 marks the
    other side if that is lost. Zeros until the work has ended; empty for a work of another
    backend."""
    lost = getattr(work, "lost_ranks", None)
    if lost is None:
        return torch.empty(0, dtype=torch.int32)
    hint = torch.zeros(work.max_group_size, dtype=torch.int32)
    hint[lost] = 1
    return hint


def get_local_success(work: Any) -> bool:
    """Whether the work has lost no rank and has not ended with an error. False for a work of
    another backend."""
    lost = getattr(work, "lost_ranks", None)
    # In this order: the work may end meanwhile.
    return lost == [] and (not work.is_completed() or work.is_success())


@dataclass(frozen=True)
class Evidence:
    """How this rank knows the end of another one. An observation, not yet membership.

    rank: in the group that was asked
    kind: four kinds are certain. "goodbye": it destroyed the job on its side. "ended": its program
    ended without that. "failed": it announced that an uncaught error ends it. "exited": the kernel
    of its host says that the process has ended or cannot go on. The other kinds are suspicions.
    "unreachable": the connection broke. "refused": nothing listens there any more. "silent":
    nothing was heard of it for the failure timeout. "excludes": it goes on without ranks that are
    in the view
    detail: the source of that knowledge, in one line
    monotonic: time of the observation, in seconds of time.monotonic()
    """

    rank: int
    kind: Literal[
        "goodbye", "ended", "failed", "exited", "unreachable", "refused", "silent", "excludes"
    ]
    detail: str
    monotonic: float


def get_evidence(group: Any) -> list[Evidence]:
    """Evidence about ranks of the group that have ended or are accused, in rank order."""
    backend = backend_of(group)
    backend.note_losses_read()
    return [Evidence(*cast("Any", seen)) for seen in backend.evidence()]


def acknowledge_loss(group: Any) -> bool:
    """In mode "raise": lets the group's operations run again after a loss. The next operation is
    the first one after the loss. Call it on all ranks of the group, at the point where they go on
    together. It is needed only if the thread that calls operations does not get the error itself,
    or if the ranks have called different numbers of operations since the loss.

    Waits until earlier calls have ended. Returns whether the group has lost a rank since the last
    time."""
    return backend_of(group).acknowledge_loss()


def get_peer_state(group: Any, ranks: Sequence[int]) -> list[bool]:
    """Tells for each of these ranks whether it is in the group's view and not accused here, or a
    new process waits in join_group() to be let in for it. Also for numbers from the group's size
    on, up to its max_group_size. Local: no rank is asked."""
    backend = backend_of(group)
    note_growth()
    size = backend.size()
    for rank in ranks:
        if not (0 <= rank < max(backend.room, backend.active_ranks.numel())):
            raise RuntimeError(f"invalid argument: rank {rank} is not in a group of {size}")
    healthy = set(backend.survivors) - {seen.rank for seen in get_evidence(group)}
    return [rank in healthy or backend.ready_key(rank) != 0 for rank in ranks]


def get_num_synced_ranks(group: Any) -> int:
    """Number of ranks for which get_peer_state() is True, this one included. In a new process 1,
    until it has joined."""
    return sum(get_peer_state(group, range(backend_of(group).size())))


class SyncAfterFailureStatus(enum.Enum):
    """Reconciled: the survivors have agreed on a loss that was not known at the last call.
    NoPending: no further rank is lost or suspected. Rejected: see the reason."""

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
    """Longest wait of sync_after_failure() in microseconds; 30 seconds if never set. The survivors
    agree as soon as they have heard of each other: nothing else waits for this time."""
    global _reconciliation_window
    _reconciliation_window = microseconds("set_fault_reconciliation_window_us", us)


def sync_after_failure(group: Any) -> SyncAfterFailureResponse:
    """Waits until every rank of the group that is accused here is out of the view, or is cleared.
    The next operation does not need it: each operation waits by itself if it must. After a message
    to a dead rank, it tells when get_active_ranks() shows the loss."""
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
            causes: dict[str, list[int]] = {}
            for seen in accused:
                causes.setdefault(f"{seen.kind}: {seen.detail}", []).append(seen.rank)
            who = "; ".join(f"{name_ranks(ranks)}, {cause}" for cause, ranks in causes.items())
            reason = (
                f"after {_reconciliation_window} s the survivors have not agreed on the lost "
                f"ranks, but there is evidence against {who}"
            )
            return SyncAfterFailureResponse(SyncAfterFailureStatus.Rejected, reason)
        time.sleep(_LOOK_AGAIN)
    backend.show_losses()
    lost = {seen.rank for seen in get_evidence(group) if seen.kind != "goodbye"} - survivors
    is_news = backend.note_losses(sorted(lost))
    return SyncAfterFailureResponse(
        SyncAfterFailureStatus.Reconciled if is_news else SyncAfterFailureStatus.NoPending
    )


def get_preferred_hca(group: Any, location: str) -> str:
    """The NIC near `location` ("cuda:0"). Always "": no transport chooses NICs by location yet."""
    return ""


def extend_group_size_to(group: Any, size: int) -> None:
    """Nothing has to be done before recover_ranks() lets in ranks behind the last one. ValueError:
    the group has no room for as many; max_group_size is the most."""
    room = backend_of(group).room
    if not 0 < size <= room:
        raise ValueError(
            f"the group has room for {room} ranks, not for {size}: make it with a larger "
            "max_group_size"
        )


def not_yet(name: str, missing: str) -> Callable[..., NoReturn]:
    """Makes a function that other programs import, and that raises NotImplementedError."""

    def function(*arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not available in this version: {missing} is missing")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Not available yet: {missing} is missing."
    return function
