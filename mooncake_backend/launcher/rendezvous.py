"""A rendezvous that takes place once."""

from __future__ import annotations

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

from mooncake_backend.launcher import torch_parts


class FixedRendezvous(RendezvousHandler):
    """Wraps a rendezvous, so that nothing in it can end the job after it took place. Neither a node
    that comes later can, for which torchrun would restart all ranks, nor the end of the process
    that holds the rendezvous's state.

    The ranks' store lives in the launcher of node 0 in any case. In rank 0 it would die with that
    rank.
    """

    def __init__(self, inner: RendezvousHandler) -> None:
        self.inner = inner
        self.is_cut_off = False  # its store is gone, so shutdown() cannot tell the other nodes
        self._store: TCPStore | None = None

    def keep_alive(self) -> tuple[float, int]:
        """Seconds between a node's signs of life, and number of them that may be missing. If the
        rendezvous has no such settings, torch's defaults."""
        settings = getattr(self.inner, "settings", None)
        if settings is None:
            return 5.0, 3
        return settings.keep_alive_interval.total_seconds(), settings.keep_alive_max_attempt

    def cut_off(self) -> None:
        """Called when the rendezvous's store is gone."""
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
