"""The agent of --on-death replace: starts a new process for a rank that has died."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from mooncake_backend.launcher import job_key, torch_parts
from mooncake_backend.launcher.agent import ContinuingAgent
from mooncake_backend.launcher.budget import WINDOW, Budget
from mooncake_backend.launcher.endings import Ending, Journal
from mooncake_backend.launcher.ends import Ends
from mooncake_backend.launcher.spares import Spares
from mooncake_backend.ranks import name_ranks

log = logging.getLogger(__name__)

ADDED = {"MOONCAKE_REJOIN": "1"}  # to the environment of a replacement
# Seconds before a rank is replaced if a rank of this host has finished: a job that has come to its
# end is over by then.
ENDING = 2.0
SHORT = 0.02  # seconds between two looks while other launchers are asked


@dataclass
class Death:
    """A rank that is to be replaced. due: when, on the monotonic clock."""

    ending: Ending
    due: float
    is_told: bool = False


class ReplacingAgent(ContinuingAgent):
    """Starts a new process for a rank of this host that has died, as long as a rank of the job is
    left that it can join.

    A process is a *member* from its start on; a replacement is one when its backend has said that
    it has joined the job. Without a member the job is over: the replacements that were started
    meanwhile have come too late, and are killed.
    """

    def __init__(
        self,
        journal: Journal,
        spec: WorkerSpec,
        *positional: Any,
        budget: Budget,
        spares: int = 0,
        preload: str = "",
        **named: Any,
    ) -> None:
        super().__init__(journal, spec, *positional, **named)
        self.budget = budget
        self.interval = spec.monitor_interval
        spec.monitor_interval = 0.0  # _monitor_workers() waits
        self.ends = Ends()
        self.spares = Spares(spares, preload, self.ends)
        self.members: set[int] = set()  # local ranks
        self.deaths: dict[int, Death] = {}  # by local rank
        self.tails: dict[int, list[Any]] = {}  # of the running replacements, by local rank
        # A signal to the launcher raises an exception between any two lines of the main thread. It
        # cannot interrupt a start on this thread, so no process is started and then forgotten.
        self.starter = ThreadPoolExecutor(1, "mooncake-run-start")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        assert worker_group.store is not None
        job_key.agree(worker_group.store, worker_group.group_rank, worker_group.group_world_size)
        pids = super()._start_workers(worker_group)
        self.members = set(self.running)
        for local_rank, pid in pids.items():
            self.ends.watch(local_rank, pid)
        if self.spares.wanted:
            self.spares.begin(*torch_parts.program(self), time.monotonic())
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.ends.wait(self._patience())
        self._promote()
        for ending in self.look():
            self._ended(worker_group, ending)
        assert self.nodes is not None
        self.nodes.tell(bool(self.members))
        if self.deaths or self._newcomers():
            self._replace(worker_group)
        if self.spares.wanted:
            self.starter.submit(self.spares.keep, time.monotonic()).result()
        return self.meet()

    def meet(self) -> RunResult:
        if self.deaths:
            return RunResult(state=WorkerState.HEALTHY)
        return super().meet()

    def code(self, local_rank: int) -> int | None:
        return torch_parts.code_if_ended(self, local_rank)

    def _shutdown(self, *positional: Any, **named: Any) -> None:
        self.starter.shutdown()
        self.spares.close()
        self.deaths.clear()
        super()._shutdown(*positional, **named)
        self.ends.close()
        for tails in self.tails.values():
            for tail in tails:
                tail.stop()
        self.tails.clear()

    def _patience(self) -> float:
        """Seconds until there is something to do, unless a process ends."""
        now = time.monotonic()
        if (self.deaths or self._newcomers()) and not self.members:
            return SHORT
        dues = [self.spares.next_start(), *(death.due for death in self.deaths.values())]
        return min(self.interval, min(dues) - now)

    def _newcomers(self) -> list[int]:
        """Local ranks of the replacements that run and are no members yet."""
        return [local_rank for local_rank in self.running if local_rank not in self.members]

    def _ended(self, worker_group: WorkerGroup, ending: Ending) -> None:
        local_rank = next(
            worker.local_rank
            for worker in worker_group.workers
            if worker.global_rank == ending.rank
        )
        self.ends.forget(local_rank)
        self.members.discard(local_rank)
        for tail in self.tails.pop(local_rank, []):
            # It reads to the end of the file first.
            threading.Thread(target=tail.stop, name="mooncake-run-tail").start()
        if ending.finished or ending.stopped:
            return
        now = time.monotonic()
        pause = self.budget.take(ending.rank, now)
        if pause is None:
            used = f"{self.budget.limit} replacements in {WINDOW / 60:.0f} minutes"
            self._stays_dead(ending, f"{self._alive()}; it stays dead, as {used} are used up")
            return
        if any(other.finished for other in self.journal.endings):
            pause = max(pause, ENDING)
        self.deaths[local_rank] = Death(ending, now + pause)

    def _replace(self, worker_group: WorkerGroup) -> None:
        """Starts the replacements that are due, or gives all up if the job has no member."""
        assert self.nodes is not None
        if not self.members:
            others_run = self.nodes.others_run()
            if others_run is None:
                return
            self._promote()  # it may have joined just before the last member ended
            if not others_run and not self.members:
                self._give_up()
                return
        for local_rank, death in sorted(self.deaths.items()):
            left = death.due - time.monotonic()
            if left <= 0:
                self._start(worker_group, local_rank, death)
            elif not death.is_told:
                death.is_told = True
                self._tell(death.ending, f"{self._alive()}, a replacement follows in {left:.1f} s")

    def _promote(self) -> None:
        """Makes members of the replacements that have joined the job."""
        moment = self.now()
        for local_rank, process in self.running.items():
            process.waits.read(moment)
            if process.waits.joined is not None:
                self.members.add(local_rank)

    def _start(self, worker_group: WorkerGroup, local_rank: int, death: Death) -> None:
        future = self.starter.submit(self._start_process, local_rank, death.ending)
        # Of the system, or of a version of torch that is not known here: the other ranks go on.
        error = future.exception()
        if error is not None:
            pause = self.budget.take(death.ending.rank, time.monotonic())
            why = f"no replacement can be started: {error!r}"
            if pause is None:
                del self.deaths[local_rank]
                self._stays_dead(death.ending, f"{why}; it stays dead")
            else:
                death.due = time.monotonic() + max(pause, SHORT)
                self._tell(death.ending, why)
            return
        pid = future.result()
        worker_group.workers[local_rank].id = pid
        if death.is_told:
            log.warning(
                "mooncake-run: rank %d: a replacement is started (pid %d)", death.ending.rank, pid
            )
        else:
            alive = self._alive(newest=local_rank)
            self._tell(death.ending, f"{alive}, a replacement is started (pid {pid})")

    def _start_process(self, local_rank: int, ending: Ending) -> int:
        """Returns its process id. Runs on the starter's thread, while the main thread waits."""
        number = ending.incarnation + 1
        become = self.spares.become if self.spares.wanted else None
        started = torch_parts.start_again(self, local_rank, number, ADDED, become)
        self.add(local_rank, ending.rank, number, started.error_file, started.was_spare)
        self.tails[local_rank] = started.tails
        self.ends.watch(local_rank, started.pid)
        del self.deaths[local_rank]
        return started.pid

    def _give_up(self) -> None:
        for death in self.deaths.values():
            self._stays_dead(death.ending, "no rank is left that a replacement could join")
        self.deaths.clear()
        newcomers = [name for name in self._newcomers() if not self.running[name].stopped]
        if newcomers:
            ranks = name_ranks([self.running[local_rank].rank for local_rank in newcomers])
            log.warning(
                "mooncake-run: no rank is left that the new processes of %s could join: they are "
                "killed",
                ranks,
            )
        for local_rank in newcomers:
            self.running[local_rank].stopped = True
            torch_parts.kill(self, local_rank)

    def _stays_dead(self, ending: Ending, why: str) -> None:
        self._tell(ending, why)
        self.tell_ranks(ending)

    def _tell(self, ending: Ending, rest: str) -> None:
        log.warning("mooncake-run: rank %s: %s; %s", ending.name, ending.how(), rest)

    def _alive(self, newest: int | None = None) -> str:
        """How many ranks go on, without the replacement that has just been started."""
        assert self.nodes is not None
        alive = len(self.running.keys() - {newest})
        where = " of this host" if self.nodes.size > 1 else ""
        return f"{alive} of {len(self.nodes.own['ranks'])} ranks{where} go on"
