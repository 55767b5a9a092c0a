"""The compiled part. Everything that the Python files use of it is declared here."""

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, Store, Work

class SplitOptions(Backend.Options):
    """A group's options as torch knows them: what split_group() starts from. A copy, which can be
    copied deeply."""

class MooncakeBackend(Backend):
    """A group's backend, as torch.distributed sees it."""

    @property
    def options(self) -> SplitOptions: ...
    @property
    def active_ranks(self) -> torch.Tensor:
        """options["active_ranks"] as given to create_backend: the same tensor."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """What ProcessGroup.set_timeout() does, which torch 2.8 does not have."""

    def leave_group(self, failure: str | None) -> None:
        """The process ends: waits, within the failure timeout, until what was called has
        ended, here and on those that need us for it. Every later call is refused. `failure`: the
        program ends by this error, and waits for nobody."""

    def leave_job(self, failure: str | None) -> None:
        """Then: leaves all groups that share this one's engine, and says goodbye to the peers, and
        whether the program ends by an error."""

    def evidence(self) -> list[tuple[int, str, str, float]]:
        """(rank, kind, detail, seconds on CLOCK_MONOTONIC) of each rank that is known to be gone or
        accused of it, in rank order. See mooncake_backend.Evidence."""

    def state(self) -> str:
        """See mooncake_backend.dump_state()."""

    @property
    def epoch(self) -> int:
        """Of the job's view, from 1 on."""

    @property
    def survivors(self) -> list[int]:
        """Ranks of the group that are in the job's view, in ascending order."""

    def note_losses(self, ranks: list[int]) -> bool:
        """Whether one of them was in no earlier call."""

    @property
    def supports_coalescing(self) -> bool:
        """See mooncake_backend.batches.are_one_work()."""

    def check_standing(self) -> None:
        """Raises what every call raises once this rank is out of the job."""

    def check_message(self, is_send: bool, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Raises what a send or a receive with these arguments raises."""

    @property
    def on_failure(self) -> str:
        """The mode: "continue" or "raise"."""

    def transport_to(self, rank: int) -> str:
        """The wire to a rank of the group: "shm", "tcp", "inproc" or "self"."""

class CollectiveWork(Work):
    """What a collective returns. Ranks are ranks of the group, in ascending order; until the
    operation has ended all lists are empty, and the epoch is 0."""

    @property
    def contributors(self) -> list[int]:
        """Those whose data is in the result."""

    @property
    def failed_ranks(self) -> list[int]:
        """All others."""

    @property
    def lost_ranks(self) -> list[int]:
        """Of the others, those that contributed to the operation before this one."""

    @property
    def epoch(self) -> int:
        """Of the job's view in which the operation ended."""

    @property
    def sequence_number(self) -> int:
        """From 0 on; in mode "raise" it starts again with the first operation after a loss."""

    @property
    def max_group_size(self) -> int: ...

class MessageWork(Work):
    """What a send or a receive returns."""

    @property
    def failed_ranks(self) -> list[int]:
        """The other side, if the message ended because that is lost."""

    @property
    def lost_ranks(self) -> list[int]:
        """The same."""

    @property
    def max_group_size(self) -> int: ...

class BatchWork(Work):
    """What a block of _coalescing_manager() with a device ends with: one work for all its calls."""

    @property
    def works(self) -> list[Work]:
        """One for each call, in their order."""

    @property
    def lost_ranks(self) -> list[int]:
        """Of any of them."""

    @property
    def max_group_size(self) -> int: ...

def create_backend(
    store: Store,
    rank: int,
    size: int,
    global_ranks: list[int],
    group_id: str,
    timeout: timedelta,
    backend_name: str,
    options: dict[str, Any],
    world: MooncakeBackend | None,
) -> MooncakeBackend:
    """`world` is the default group's backend if that is ours and this is another group: its engine
    is shared. `global_ranks` is empty for the default group."""

def group_of(
    store: Store, backend: MooncakeBackend, devices: list[str]
) -> torch.distributed.ProcessGroup:
    """A group of this backend alone, with its name."""

def dump_state_on_signal(signal: int) -> None:
    """See mooncake_backend.dump_state_on_signal()."""

def build_info() -> dict[str, Any]:
    """What was built ("version"), for which torch ("torch"), and with which wires ("transports",
    names in the order in which they are tried)."""
