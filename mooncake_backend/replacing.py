"""New processes in the places of lost ranks or behind the last one, and ranks that are taken out:
calls of the members of a group, and of the process that comes. Each function takes a process group,
or the backend that `group._get_backend(device)` returns. docs/replacing.md and docs/changing.md
tell how they fit together."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from mooncake_backend.group import backend_of, find_backend
from mooncake_backend.token import text_of

# How long recover_ranks() waits for a process that has not called join_group() yet, in seconds.
READY_WITHIN = 20.0
# How long admit() waits on a member to hear of a process of which another one has heard. Then that
# process is dead.
KNOWN_WITHIN = 5.0


class ProposalStatus(enum.Enum):
    """Applied: the ranks are in. AppliedWithDroppedRanks: all but those that were lost again
    meanwhile. Rejected: nothing has changed, see the reason."""

    Rejected = 0
    Applied = 1
    AppliedWithDroppedRanks = 2


ViewUpdateStatus = ProposalStatus


@dataclass(frozen=True)
class ProposeViewUpdateResponse:
    """new_epoch: get_current_epoch() after the call. dropped_ranks: in the group that was asked."""

    status: ProposalStatus
    new_epoch: int
    dropped_ranks: list[int] = field(default_factory=list)
    reject_reason: str = ""


def recover_ranks(group: Any, ranks: Sequence[int]) -> ProposeViewUpdateResponse:
    """Lets new processes in for these ranks of the group, which are lost. One member has to call
    it; every member may, at any time, and gets the same answer. Waits until the caller's earlier
    calls have ended, until the processes have called join_group(), 20 seconds at most, and until
    the group goes on with them. Later calls have their part; if other members are in the next call
    already, that one does without, and the answer comes before it. Ranks that are in already are
    skipped.

    ValueError: a rank that is not in the group, that stands twice, or no rank. RuntimeError: no
    process came for a rank, or a member did not get to it before the group's timeout; nothing has
    changed then."""
    backend = backend_of(group)
    _refuse_in_capture("recover_ranks")
    dropped = backend.recover_ranks(list(ranks), READY_WITHIN)
    note_growth()
    status = ProposalStatus.AppliedWithDroppedRanks if dropped else ProposalStatus.Applied
    return ProposeViewUpdateResponse(status, backend.epoch, dropped)


def activate_ranks(group: Any, ranks: Sequence[int]) -> ProposeViewUpdateResponse:
    """recover_ranks() which answers Rejected, with the reason, where that raises RuntimeError."""
    try:
        return recover_ranks(group, ranks)
    except RuntimeError as error:
        epoch = backend_of(group).epoch
        return ProposeViewUpdateResponse(ProposalStatus.Rejected, epoch, [], str(error))


def deactivate_ranks(group: Any, ranks: Sequence[int]) -> ProposeViewUpdateResponse:
    """Takes these ranks out of the group, this one, too, if it is among them. One member has to
    call it; every member may, and the rank itself. Waits until the caller's earlier calls have
    ended, and until the group goes on without the ranks. It is no loss: no call ends with an error,
    and get_active_ranks() shows it. Ranks that are out are skipped. A rank that takes itself out
    while the other members are in a call has no part in that call.

    A rank that is out stays in the job. Its calls of the group raise RuntimeError, "invalid state:
    this rank is not active ...", before anything is sent; get_active_ranks() is all zeros there. It
    may destroy its groups and exit. Or it comes back: it calls join_group(), the members call
    activate_ranks().

    Rejected, with the reason: a member did not get to it before the group's timeout, or this rank
    is not in the group; nothing has changed. ValueError: a rank that is not in the group or stands
    twice, no rank, or all active ranks."""
    backend = backend_of(group)
    _refuse_in_capture("deactivate_ranks")
    try:
        backend.deactivate_ranks(list(ranks))
    except RuntimeError as error:
        return ProposeViewUpdateResponse(ProposalStatus.Rejected, backend.epoch, [], str(error))
    return ProposeViewUpdateResponse(ProposalStatus.Applied, backend.epoch)


def join_group(group: Any) -> None:
    """Waits until a member has let this rank in with recover_ranks(), at most for the group's
    timeout. Each group is joined by itself, the default group first. For

    - a process that replaces a rank (is_extension=True, or MOONCAKE_REJOIN=1); before, its calls
      act on it alone;
    - a rank that deactivate_ranks() has taken out; its calls raise;
    - a process without which the job went on, whose calls raise EvictedError or MinorityError. It
      finds the job by the addresses of the members that it knew, without the store. Tensors in
      memory of the group stay as they are.

    RuntimeError: nobody let it in, none of these members can be reached, or it is in already."""
    _refuse_in_capture("join_group")
    backend_of(group).join_group()
    note_growth()


def join_token(group: Any) -> str:
    """Text by which a new process finds the job, without its store: addresses of this rank and of
    up to three other active ones, and no secret. So the job must have been given its key:
    MOONCAKE_JOB_KEY. A token is good as long as one of these ranks lives. It fits into a URL.

    RuntimeError: the key came from the store; the rank is out of the job."""
    return text_of(backend_of(group).join_token())


def admit(group: Any) -> list[int]:
    """Lets in whoever waits, at one place of the program: every member calls it there. Returns the
    ranks that have come, the same on all; mostly none. One that is lost again at once is among
    them: no member can know what the others have seen of it. Costs an all_reduce of 8 bytes for
    each rank."""
    backend = backend_of(group)
    waits = torch.zeros(backend.room, dtype=torch.int64)
    survivors = set(backend.survivors)
    for rank in range(backend.room):
        waits[rank] = 0 if rank in survivors else backend.ready_key(rank)
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed.ReduceOp(torch.distributed.ReduceOp.MAX)
    cast("Any", backend).allreduce([waits], options).wait()
    ranks: list[int] = waits.nonzero().flatten().tolist()
    if ranks:
        _refuse_in_capture("admit")
        # A process that comes in place of one of these meanwhile has to wait: its first call would
        # meet some members before this place and others behind it.
        backend.recover_ranks(ranks, KNOWN_WITHIN, waits[ranks].tolist())
    note_growth()
    return ranks


def note_growth() -> None:
    """Tells torch the global ranks by which groups have grown."""
    if not torch.distributed.is_initialized():
        return
    for group, named in list(torch.distributed.distributed_c10d._world.pg_group_ranks.items()):
        if not isinstance(group, torch.distributed.ProcessGroup):
            continue  # stands for groups without this rank
        backend = find_backend(group) if len(named) < group.size() else None
        for rank, of_job in enumerate(backend.job_ranks if backend else []):
            if of_job not in named and of_job >= 0:
                named[of_job] = rank


def _refuse_in_capture(name: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} cannot be recorded into a graph: call it outside of the capture"
        )
