"""A rendezvous that is held once."""

from __future__ import annotations

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

from mooncake_backend.launcher import torch_parts


class FixedRendezvous(RendezvousHandler):
    """Another one's, after which nothing of it can end the job: neither a node that comes later,
    for which torchrun would restart all ranks, nor the end of the process that holds its state.

    The ranks' store lives in the launcher of node 0, whatever the rendezvous does: in rank 0 it
    would die with that rank.
    """

    def __init__(self, inner: RendezvousHandler) -> None:
        self.inner = inner
        self.is_cut_off = False  # its store is gone: nobody can be told that it is over
        self._store: TCPStore | None = None

    def keep_alive(self) -> tuple[float, int]:
        """How often a node gives a sign of life, and how many of them may be missing; what torch
        takes by default where the rendezvous has no such settings."""
        settings = getattr(self.inner, "settings", None)
        if settings is None:
            return 5.0, 3
        return settings.keep_alive_interval.total_seconds(), settings.keep_alive_max_attempt

    def cut_off(self) -> None:
        """Its store is gone."""
        self.is_cut_off = True
        torch_parts.stop_heartbeats(self.inner)

    def get_backend(self) -> str:
        return self.inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        info = self.inner.next_rendezvous()
        place = info.bootstrap_store_info
        if not self.inner.use_agent_store and info.rank == 0 and place is not None:
            self._store = TCPStore(
                place.master_addr,
                place.master_port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
            )
        return info

    def is_closed(self) -> bool:
        return self.inner.is_closed()

    def set_closed(self) -> None:
        self.inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.inner.get_run_id()

    def shutdown(self) -> bool:
        return not self.is_cut_off and self.inner.shutdown()
