"""Ranks as real processes, driven by a test.

A Crew is a set of ranks. They run one function after the other, each on all ranks, for as long as
the test wants; run_ranks() is a crew for one function. Ranks are forked from a server that has
imported torch, so they start in tens of milliseconds. In no case does a rank outlive its crew.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

import devices
import torch
import torch.distributed as dist

from mooncake_backend import registration

MOST_SLOWNESS = 4.0


def slowness(load: float, cores: int) -> float:
    """Times as long as on idle cores that a process takes for a step, at most MOST_SLOWNESS."""
    return min(MOST_SLOWNESS, max(1.0, load / cores))


# Of this machine when the tests began. Ranks inherit it, so all processes have the same deadlines.
if "RANKS_SLOWNESS" not in os.environ:
    now = slowness(os.getloadavg()[0], len(os.sched_getaffinity(0)))
    os.environ["RANKS_SLOWNESS"] = f"{now:.2f}"
SLOWNESS = float(os.environ["RANKS_SLOWNESS"])


def scaled(seconds: float) -> float:
    """A deadline that is no part of what a test shows, longer where the machine is busy."""
    return seconds * SLOWNESS


# Seconds that one function may take on all ranks.
DEADLINE = float(os.environ.get("RANKS_DEADLINE", scaled(120)))
GRACE = scaled(10)  # seconds that the others get once one rank has failed
PRELOAD = [
    "forget_cwd",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "numpy",
    "pytest",
    "hypothesis",
]

_processes = multiprocessing.get_context("forkserver")
_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000

live_crews: set[Crew] = set()


def until(condition: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
    """Waits for the condition and returns its value."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {deadline:.0f} s for {what}")
        time.sleep(0.001)
    return value


class Board:
    """Facts that ranks and the test tell each other, by name. Stored in files, so it needs no
    network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def set(self, name: str, value: Any = True) -> None:
        draft = self.folder / f".{name}.{os.getpid()}"
        draft.write_bytes(pickle.dumps(value))
        draft.rename(self.folder / name)

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def wait(self, name: str, deadline: float = DEADLINE) -> Any:
        until(lambda: self.has(name), f"{name!r} on the board", deadline)
        return pickle.loads((self.folder / name).read_bytes())

    def wait_all(self, name: str, ranks: Sequence[int], deadline: float = DEADLINE) -> list[Any]:
        return [self.wait(f"{name}-{rank}", deadline) for rank in ranks]


@dataclass
class Rank:
    """First argument of a rank's function."""

    rank: int
    size: int
    folder: Path  # the same for all ranks of the crew
    board: Board = field(init=False)

    def __post_init__(self) -> None:
        self.board = Board(self.folder / "board")

    def store(self, name: str = "store") -> dist.FileStore:
        return dist.FileStore(str(self.folder / name), self.size)

    def tcp_store(self) -> dist.TCPStore:
        """A store that rank 0's process serves, at a free port."""
        if self.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, self.size, is_master=True, wait_for_workers=False)
            self.board.set("port", store.port)
            return store
        return dist.TCPStore("127.0.0.1", self.board.wait("port"), self.size, is_master=False)

    def init(
        self,
        backend: str = "mooncake",
        timeout: float = DEADLINE,
        name: str = "store",
        options: Any = None,
        device_id: Any = None,
    ) -> None:
        dist.init_process_group(
            devices.served_by(backend),
            store=self.store(name),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout),
            pg_options=options,
            device_id=device_id,
        )


@dataclass
class Outcome:
    """How a rank's function ended."""

    value: Any = None
    error: str | None = None  # the exception's type
    message: str = ""
    text: str = ""  # the traceback


class RanksFailedError(AssertionError):
    def __init__(self, crew: Crew, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        parts = [
            f"---- rank {rank} of {crew.size} ----\n"
            f"{outcome.text or outcome.message}\n{crew.log(rank)}"
            for rank, outcome in enumerate(outcomes)
            if outcome.error
        ]
        super().__init__("\n" + "\n".join(parts))


def stop_process(pid: int) -> None:
    """Stops a process. Waits until the last of its threads has stopped, which takes a moment."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _thread_states(pid) == {"T"}, f"process {pid} to stop")


def _thread_states(pid: int) -> set[str]:
    stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats}


class Crew:
    """Ranks that run the functions of call(), until close().

    env, rank_env: variables of all ranks, and of single ones by rank; other MOONCAKE_ variables
    are unset
    namespaces: the network namespace of each rank
    backend: None makes ranks without a process group
    """

    def __init__(
        self,
        size: int,
        *,
        env: dict[str, str] | None = None,
        rank_env: dict[int, dict[str, str]] | None = None,
        namespaces: Sequence[str | None] | None = None,
        backend: str | None = "mooncake",
        timeout: float = DEADLINE,
    ) -> None:
        self.size = size
        self.device = (env or {}).get(devices.VARIABLE, devices.kind())
        self.namespaces = namespaces
        self.broken = False
        self.folder = Path(tempfile.mkdtemp(prefix="mooncake-test-"))
        self.board = Board(self.folder / "board")
        self.links: list[connection.Connection] = []
        self.processes: list[Any] = []
        self._settings = [{**(env or {}), **(rank_env or {}).get(rank, {})} for rank in range(size)]
        live_crews.add(self)
        _start_server()
        try:
            for rank in range(size):
                link, process = self._start_rank(rank, {})
                self.links.append(link)
                self.processes.append(process)
            if backend is not None:
                self.call(_init, backend, timeout)
        except BaseException:
            self.end()
            raise

    def _start_rank(self, rank: int, more: dict[str, str]) -> tuple[connection.Connection, Any]:
        here, there = _processes.Pipe()
        process = _processes.Process(
            target=_serve,
            args=(
                there,
                Rank(rank, self.size, self.folder),
                {**self._settings[rank], **more},
                self.namespaces[rank] if self.namespaces else None,
                self._log(rank),
            ),
            daemon=True,
        )
        process.start()
        there.close()
        return here, process

    def replace(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        """Starts a new process for a rank that has died, with MOONCAKE_REJOIN=1. It runs this
        function in place of the one that the dead process ran."""
        assert not self.processes[rank].is_alive()
        self.links[rank].close()
        self.links[rank], self.processes[rank] = self._start_rank(rank, {"MOONCAKE_REJOIN": "1"})
        self.links[rank].send((function, args))

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is None and not self.broken:
            self.close()
        else:
            self.end()

    # ---- functions on all ranks

    def call(
        self, function: Callable[..., Any], *args: Any, deadline: float = DEADLINE
    ) -> list[Any]:
        """Runs function(Rank, *args) on every rank. Returns the results in rank order, or raises
        RanksFailedError."""
        self.start(function, *args)
        return self.results(deadline)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Skips the test if the ranks' device cannot run the function."""
        if reason := devices.why_not(self.device, function, *args):
            raise unittest.SkipTest(reason)
        for rank, link in enumerate(self.links):
            try:
                link.send((function, args))
            except OSError:
                if self.processes[rank].is_alive():
                    raise

    def results(self, deadline: float = DEADLINE, dead: Sequence[int] = ()) -> list[Any]:
        """Results of the function that start() started. `dead`: ranks that the test ends. Their
        result is None, and it is not waited for."""
        outcomes = self.outcomes(deadline, dead)
        if any(outcome.error for outcome in outcomes):
            self.broken = True
            raise RanksFailedError(self, outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, deadline: float = DEADLINE, dead: Sequence[int] = ()) -> list[Outcome]:
        end = time.monotonic() + deadline
        found: dict[int, Outcome] = {}
        expected = set(range(self.size)) - set(dead)
        while not found.keys() >= expected:
            waiting = {self.links[r]: r for r in range(self.size) if r not in found}
            ready = connection.wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                self._give_up(found, expected - found.keys())
                break
            for link in ready:
                rank = waiting[link]
                try:
                    found[rank] = link.recv()
                except (EOFError, OSError):
                    found[rank] = Outcome() if rank in dead else self._ended(rank)
                if found[rank].error:
                    end = min(end, time.monotonic() + GRACE)
        for rank in dead:
            if rank not in found or not found[rank].error:
                found[rank] = Outcome()
        return [found[rank] for rank in range(self.size)]

    def _ended(self, rank: int) -> Outcome:
        self.processes[rank].join(GRACE)
        code = self.processes[rank].exitcode
        return Outcome(error="Exit", message=f"ended with exit code {code}")

    def _give_up(self, found: dict[int, Outcome], late: set[int]) -> None:
        self.broken = True
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                self.signal(rank, signal.SIGCONT)
                self.signal(rank, signal.SIGUSR1)  # writes the stacks into the log
        with contextlib.suppress(TimeoutError):
            for rank in late:
                until(lambda rank=rank: "most recent call first" in self.log(rank), "stacks", 2)
        for rank in late:
            found[rank] = Outcome(error="Deadline", message="did not end in time")

    # ---- single ranks

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def signal(self, rank: int, number: signal.Signals) -> None:
        if self.processes[rank].is_alive():
            os.kill(self.pid(rank), number)

    def kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)
        self.processes[rank].join(DEADLINE)
        assert not self.processes[rank].is_alive()

    def stop(self, rank: int) -> None:
        stop_process(self.pid(rank))

    def cont(self, rank: int) -> None:
        self.signal(rank, signal.SIGCONT)

    def log(self, rank: int) -> str:
        """Output of the rank: stdout and stderr."""
        path = self._log(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def _log(self, rank: int) -> Path:
        return self.folder / f"log-{rank}"

    # ---- the end

    def close(self) -> None:
        """Lets every rank destroy its groups and end with exit code 0."""
        try:
            self.call(_leave)
            for rank, link in enumerate(self.links):
                link.close()
                self.processes[rank].join(GRACE)
            codes = [process.exitcode for process in self.processes]
            assert codes == [0] * self.size, f"ranks ended with {codes}"
        finally:
            self.end()

    def end(self) -> None:
        """Kills the ranks that are left."""
        for link in self.links:
            link.close()
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(DEADLINE)
        shutil.rmtree(self.folder, ignore_errors=True)
        live_crews.discard(self)


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, deadline: float = DEADLINE, **crew: Any
) -> list[Any]:
    """Runs function(Rank, *args) on a crew of its own."""
    with Crew(size, **crew) as ranks:
        return ranks.call(function, *args, deadline=deadline)


@contextlib.contextmanager
def starting(size: int, function: Callable[..., Any], *args: Any, **crew: Any) -> Iterator[Crew]:
    """Like run_ranks(), but the test goes on while the ranks run: it kills and stops ranks, tells
    them facts, and then asks for results()."""
    ranks = Crew(size, **crew)
    try:
        ranks.start(function, *args)
        yield ranks
    finally:
        ranks.end()


def ranks_in(text: str) -> set[int]:
    """The ranks that a message names: `rank 3`, `ranks 0, 2-5`."""
    named: set[int] = set()
    for ranks in re.findall(r"ranks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)", text):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranks):
            named |= set(range(int(first), int(last or first) + 1))
    return named


def raised(function: Callable[..., Any], *args: Any, **named: Any) -> tuple[str, str]:
    """The type and text of the exception that the call must raise."""
    try:
        function(*args, **named)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def set_timeout(seconds: float) -> None:
    """Sets the default group's timeout."""
    timeout = timedelta(seconds=seconds)
    world = dist.group.WORLD
    if hasattr(world, "set_timeout"):
        world.set_timeout(timeout)
    else:  # torch 2.8
        world._get_backend(torch.device("cpu"))._set_default_timeout(timeout)


def server_children() -> list[int]:
    """Processes that the server has forked and that have not ended."""
    pid = forkserver._forkserver._forkserver_pid
    if pid is None:
        return []
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def helper_processes() -> set[int]:
    """The server and Python's own helper, which live as long as this process."""
    pids = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)
    return {pid for pid in pids if pid is not None}


def _start_server() -> None:
    if forkserver._forkserver._forkserver_pid is not None:
        return
    _processes.set_forkserver_preload(PRELOAD)
    # Older Pythons do not pass sys.path to the server, and modules that it cannot find are skipped.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


# ---- in the rank's process


def _serve(
    link: connection.Connection,
    me: Rank,
    settings: dict[str, str],
    namespace: str | None,
    log: Path,
) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if namespace is not None:
        enter_namespace(namespace)
    for name in [name for name in os.environ if name.startswith("MOONCAKE_")]:
        del os.environ[name]
    os.environ.update(settings)
    torch.set_num_threads(1)
    registration.register()
    devices.use(me.rank)
    while True:
        try:
            function, args = link.recv()
        except EOFError:
            return
        except Exception as error:
            outcome = Outcome(None, type(error).__name__, str(error), traceback.format_exc())
        else:
            outcome = _run(me, function, args)
        link.send(outcome)


def _run(me: Rank, function: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
    try:
        return Outcome(value=function(me, *args))
    except BaseException as error:
        return Outcome(None, type(error).__name__, str(error), traceback.format_exc())


def _init(me: Rank, backend: str, timeout: float) -> None:
    me.init(backend, timeout)


def _leave(me: Rank) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def enter_namespace(name: str) -> None:
    """Moves this thread, and threads that it starts later, into a network namespace."""
    handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if _libc.setns(handle, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {name}")
    finally:
        os.close(handle)
