"""The agents: torchrun's own, which restarts ranks, and one that lets survivors go on."""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import ProcessFailure

from mooncake_backend.launcher import torch_parts, waits
from mooncake_backend.launcher.endings import Ending, Journal, failures
from mooncake_backend.launcher.nodes import Nodes
from mooncake_backend.launcher.notices import Notices
from mooncake_backend.launcher.rendezvous import FixedRendezvous

log = logging.getLogger(__name__)

MESSAGE = 100  # most characters of an error message in the table


class RestartingAgent(LocalElasticAgent):
    """torchrun's agent, which also records how each process ended."""

    def __init__(self, journal: Journal, spec: WorkerSpec, *positional: Any, **named: Any) -> None:
        super().__init__(spec, *positional, **named)
        self.journal = journal
        self.host = socket.gethostname()
        self.node = 0
        self.attempt = -1
        self.started = 0.0  # wall clock
        self.began = 0.0  # the same moment on the monotonic clock
        self.failed: dict[int, ProcessFailure] = {}  # in this attempt, by rank
        self.running: dict[int, int] = {}  # in this attempt, local rank -> rank

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.running = {}
        self.failed = {}
        self.attempt += 1
        self.node = worker_group.group_rank or 0
        self.started, self.began = time.time(), time.monotonic()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        # This runs long before a rank can be held up by the loss of another one.
        for path in torch_parts.error_files(self).values():
            waits.ask(str(path))
        self.running = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.look()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            # By now torchrun has stopped all other ranks. A rank that failed between the looks
            # comes first.
            first = next(iter(result.failures.values()))
            self.look(stopped=True, except_for=None if self.failed else first.local_rank)
        return result

    def _shutdown(self, *positional: Any, **named: Any) -> None:
        self.look()
        super()._shutdown(*positional, **named)
        self.look(stopped=True)

    def look(self, stopped: bool = False, except_for: int | None = None) -> list[Ending]:
        """Records the processes that have ended since the last look. `stopped`: the launcher ended
        them, except for the local rank `except_for`."""
        moment = self.started + time.monotonic() - self.began
        found = []
        for local_rank, process in torch_parts.processes(self).items():
            code = process.poll()
            if code is None or local_rank not in self.running:
                continue
            rank = self.running.pop(local_rank)
            message = ""
            if code != 0:
                self.failed[rank] = self._failure(local_rank, process.pid, code)
                message = first_line(self.failed[rank])
            ending = Ending(
                rank,
                self.host,
                self.attempt,
                code,
                self.started,
                moment,
                message,
                stopped=stopped and local_rank != except_for and code != 0,
                waits=sorted(waits.read(self._error_file(local_rank)).items()),
                node=self.node,
            )
            self.journal.endings.append(ending)
            found.append(ending)
        return found

    def _failure(self, local_rank: int, pid: int, code: int) -> ProcessFailure:
        path = self._error_file(local_rank)
        try:
            return ProcessFailure(local_rank, pid, code, path)
        except Exception as error:  # the process died while it wrote the file
            log.warning("mooncake-run: the error file %s cannot be read: %r", path, error)
            return ProcessFailure(local_rank, pid, code, "")

    def _error_file(self, local_rank: int) -> str:
        return str(torch_parts.error_files(self).get(local_rank, ""))


class ContinuingAgent(RestartingAgent):
    """An agent that ends no other rank when a rank dies, on its own node or on another."""

    def __init__(self, journal: Journal, spec: WorkerSpec, *positional: Any, **named: Any) -> None:
        self.rendezvous = FixedRendezvous(spec.rdzv_handler)
        spec.rdzv_handler = self.rendezvous
        super().__init__(journal, spec, *positional, **named)
        self.nodes: Nodes | None = None
        self.notices: Notices | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ranks = [worker.global_rank for worker in worker_group.workers]
        assert worker_group.store is not None
        self.nodes = Nodes(
            worker_group.store,
            worker_group.group_rank,
            worker_group.group_world_size,
            self.host,
            ranks,
            *self.rendezvous.keep_alive(),
            self.rendezvous.cut_off,
        )
        pids = super()._start_workers(worker_group)
        host, port = worker_group.master_addr, worker_group.master_port
        if host is not None and port is not None:
            # The files are there long before a rank has imported torch, and so before its init.
            self.notices = Notices(
                worker_group.store,
                worker_group.group_rank,
                worker_group.group_world_size,
                host,
                port,
                [str(path) for path in torch_parts.error_files(self).values()],
            )
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self.nodes is not None
        for ending in self.look():
            if not ending.finished:
                alive = f"{len(self.running)} ranks of this host go on"
                log.warning("mooncake-run: rank %d: %s; %s", ending.rank, ending.how(), alive)
                if self.notices is not None:
                    self.notices.died(ending.rank, ending.how())
        if self.running:
            return RunResult(state=WorkerState.HEALTHY)
        # Other nodes may need our store, and must learn how our ranks ended.
        if not self.nodes.meet(self.journal.endings):
            return RunResult(state=WorkerState.HEALTHY)
        self.journal.others = self.nodes.endings()
        self.journal.unknown = self.nodes.unknown()
        self.journal.is_spokesman = self.nodes.is_first()
        self.rendezvous.is_cut_off |= self.nodes.is_cut_off
        return self._result()

    def _result(self) -> RunResult:
        """The result of this node's ranks. A death is a failure only if all ranks of the job
        died."""
        everybody = [*self.journal.endings, *self.journal.others]
        ours = {ending.rank for ending in self.journal.endings}
        failed = {ending.rank for ending in failures(everybody)} & ours
        if failed:
            return RunResult(
                state=WorkerState.FAILED, failures={rank: self.failed[rank] for rank in failed}
            )
        return RunResult(
            state=WorkerState.SUCCEEDED,
            return_values=dict.fromkeys(ours - self.failed.keys()),
            failures=self.failed,
        )

    def _exit_barrier(self) -> None:
        """Does nothing: the nodes have met already in Nodes.meet()."""

    def _shutdown(self, *positional: Any, **named: Any) -> None:
        super()._shutdown(*positional, **named)
        if self.nodes is not None:
            self.nodes.close()
        if self.notices is not None:
            self.notices.close()


def first_line(failure: ProcessFailure) -> str:
    """First line of the message that the process itself wrote, or "". ProcessFailure invents a
    message for a process that wrote none."""
    said: Any = failure.error_file_data.get("message", "")
    if isinstance(said, dict):
        said = said.get("message", "")
    lines = str(said).strip().splitlines()
    return "" if not lines or failure.error_file == "<N/A>" else lines[0][:MESSAGE]
