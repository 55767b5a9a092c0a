"""The agents: torchrun's own, which restarts ranks, and one that lets survivors go on."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
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
from mooncake_backend.launcher.endings import Ending, Journal, failures, last_incarnations
from mooncake_backend.launcher.nodes import Nodes
from mooncake_backend.launcher.notices import Notices
from mooncake_backend.launcher.rendezvous import FixedRendezvous
from mooncake_backend.launcher.waits import Waits

log = logging.getLogger(__name__)

MESSAGE = 100  # most characters of an error message in the table


@dataclass
class Process:
    """A process of a rank, until its end is seen.

    incarnation: 0 for the rank's first process, 1 for its first replacement
    started: on the clock of RestartingAgent.now()
    waits: the lines that this rank has written
    was_spare: it waited as a spare before `started`
    stopped: the launcher has ended it
    """

    rank: int
    incarnation: int
    started: float
    error_file: str
    waits: Waits
    was_spare: bool = False
    stopped: bool = False


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
        # In this attempt, by rank and incarnation.
        self.failed: dict[tuple[int, int], ProcessFailure] = {}
        self.running: dict[int, Process] = {}  # in this attempt, by local rank

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.running = {}
        self.failed = {}
        self.attempt += 1
        self.node = worker_group.group_rank or 0
        self.started, self.began = time.time(), time.monotonic()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        files = torch_parts.error_files(self)
        for worker in worker_group.workers:
            file = files.get(worker.local_rank, "")
            self.add(worker.local_rank, worker.global_rank, 0, file)
        return pids

    def add(
        self,
        local_rank: int,
        rank: int,
        incarnation: int,
        error_file: str,
        was_spare: bool = False,
    ) -> None:
        """Notes a process that has just become a rank."""
        # This runs long before the rank can be held up by the loss of another one.
        waits.ask(error_file)
        self.running[local_rank] = Process(
            rank, incarnation, self.now(), error_file, Waits(error_file), was_spare
        )

    def now(self) -> float:
        """Seconds since the epoch, by a clock that is never set."""
        return self.started + time.monotonic() - self.began

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
        found = []
        for local_rank, process in list(self.running.items()):
            code = self.code(local_rank)
            if code is None:
                continue
            del self.running[local_rank]
            moment = self.now()
            message = ""
            if code != 0:
                failure = self._failure(local_rank, process, code)
                self.failed[process.rank, process.incarnation] = failure
                message = first_line(failure)
            process.waits.read(moment)
            ending = Ending(
                process.rank,
                self.host,
                self.attempt,
                code,
                process.started,
                moment,
                message,
                stopped=(stopped or process.stopped) and local_rank != except_for and code != 0,
                waits=process.waits.all(),
                joined=process.waits.joined,
                node=self.node,
                incarnation=process.incarnation,
                was_spare=process.was_spare,
            )
            self.journal.endings.append(ending)
            found.append(ending)
        return found

    def code(self, local_rank: int) -> int | None:
        """The exit code of a process, or None if it runs."""
        return torch_parts.processes(self)[local_rank].poll()

    def _failure(self, local_rank: int, process: Process, code: int) -> ProcessFailure:
        pid = torch_parts.processes(self)[local_rank].pid
        try:
            return ProcessFailure(local_rank, pid, code, process.error_file)
        except Exception as error:  # the process died while it wrote the file
            log.warning(
                "mooncake-run: the error file %s cannot be read: %r", process.error_file, error
            )
            return ProcessFailure(local_rank, pid, code, "")


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
                torch_parts.error_files(self).values(),
            )
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        for ending in self.look():
            if not ending.finished:
                alive = f"{len(self.running)} ranks of this host go on"
                log.warning("mooncake-run: rank %d: %s; %s", ending.rank, ending.how(), alive)
                self.tell_ranks(ending)
        return self.meet()

    def tell_ranks(self, ending: Ending) -> None:
        """Tells ranks that wait for the beginning of the job that this one will not come."""
        if self.notices is not None:
            self.notices.died(ending.rank, ending.how())

    def meet(self) -> RunResult:
        """The result, once all ranks of this node have ended and the other nodes do not need this
        one any more."""
        assert self.nodes is not None
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
        ours = self.journal.endings
        failed = [ending for ending in failures([*ours, *self.journal.others]) if ending in ours]
        if failed:
            return RunResult(state=WorkerState.FAILED, failures=self._failures(failed))
        return RunResult(
            state=WorkerState.SUCCEEDED,
            return_values={ending.rank: None for ending in ours if ending.finished},
            failures=self._failures(
                ending for ending in last_incarnations(ours) if not ending.finished
            ),
        )

    def _failures(self, endings: Iterable[Ending]) -> dict[int, ProcessFailure]:
        return {ending.rank: self.failed[ending.rank, ending.incarnation] for ending in endings}

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
