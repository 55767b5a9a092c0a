"""The compiled part. Everything that the Python files use of it is declared here."""

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, Store

class MooncakeBackend(Backend):
    """A group's backend, as torch.distributed sees it."""

    @property
    def active_ranks(self) -> torch.Tensor:
        """options["active_ranks"] as given to create_backend: the same tensor."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """What ProcessGroup.set_timeout() does, which torch 2.8 does not have."""

    def leave_job(self) -> None:
        """The process ends: waits, within the failure timeout, until what was called has ended, and
        says goodbye to the peers of all groups that share this one's engine."""

    def evidence(self) -> list[tuple[int, str, str, float]]:
        """(rank, kind, detail, seconds on CLOCK_MONOTONIC) of each rank that is known to be gone,
        in rank order. See mooncake_backend.Evidence."""

    def transport_to(self, rank: int) -> str:
        """The wire to a rank of the group: "shm", "tcp", "inproc" or "self"."""

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

def build_info() -> dict[str, Any]:
    """What was built ("version"), for which torch ("torch"), and with which wires ("transports",
    names in the order in which they are tried)."""
