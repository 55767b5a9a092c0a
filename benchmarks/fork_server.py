"""Starts ranks in milliseconds, for benchmarks that need hundreds of jobs.

A server process imports torch once and forks all ranks. It has one thread, because a child forked
from a process with threads may find a lock taken for good. The TCPStore's server has threads, so
it is another child, beside the ranks. No process outlives its crew: the server ends its children
by process id, and the kernel ends a child whose parent has ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ranks import HERE, JobError, die_with_parent

WARM_UP = 3  # operations of every rank before it reports that it is ready
SETTLE_S = 0.05  # shortest time from there to the loss: threads that watch begin late
MOMENT_S = 0.1  # up to so much is added at random
START_TIMEOUT_S = 300.0  # for the server's import of torch, and for a job's ranks to connect


@dataclass
class Member:
    """Argument of a rank's function. The rank's output goes to a file that Job.log() reads, and its
    working folder is the job's."""

    rank: int
    size: int
    spec: dict[str, Any]
    link: Connection  # to the Job
    store_port: int
    store_name: str

    def open_store(self, timeout_s: float) -> Any:
        """The job's part of the crew's TCPStore. No rank holds that store's server."""
        import torch.distributed as dist

        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore("127.0.0.1", self.store_port, None, False, timeout)
        return dist.PrefixStore(self.store_name, store)


class Job:
    """Ranks that run one function, with their links and process ids, by rank."""

    def __init__(self, folder: Path, pids: list[int], listener: socket.socket) -> None:
        self.folder, self.pids = folder, pids
        by_rank: dict[int, Connection] = {}
        try:
            while len(by_rank) < len(pids):
                peer, _ = listener.accept()
                link = Connection(peer.detach())
                by_rank[link.recv()] = link
        except (TimeoutError, EOFError) as error:
            missing = sorted(set(range(len(pids))) - set(by_rank))
            raise JobError(f"ranks {missing} did not start: {error!r}") from None
        self.links = [by_rank[rank] for rank in range(len(pids))]

    def hear(self, ranks: list[int], deadline_s: float) -> dict[int, Any]:
        """Returns one message of each rank. Ranks that end, or send nothing in time, are
        missing."""
        end, heard = time.monotonic() + deadline_s, {}
        waiting = {self.links[rank]: rank for rank in ranks}
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for link in ready:
                rank = waiting.pop(link)
                with contextlib.suppress(EOFError, OSError):
                    heard[rank] = link.recv()
        return heard

    def await_ready(self, deadline_s: float) -> str | None:
        """Waits until every rank has sent "ready". Returns an error text otherwise."""
        everybody = list(range(len(self.pids)))
        heard = self.hear(everybody, deadline_s)
        ready = [heard.get(rank) for rank in everybody] == ["ready"] * len(everybody)
        return None if ready else self.words(everybody, heard, "not ready")

    def words(self, ranks: list[int], heard: dict[int, Any], what: str) -> str:
        """An error text about the first rank that failed, or about those that sent nothing."""
        for rank in ranks:
            said = heard.get(rank)
            if isinstance(said, dict) and "error" in said:
                return f"rank {rank}: {said['error'].strip().splitlines()[-1]}"
        silent = [rank for rank in ranks if rank not in heard]
        last = self.log(silent[0]).strip().splitlines()[-1:] if silent else []
        return f"{what}: ranks {silent} {' '.join(last)}".strip()

    def log(self, rank: int) -> str:
        """Output of the rank: stdout and stderr."""
        path = self.folder / f"log-{rank}"
        return path.read_text(errors="replace") if path.exists() else ""


def random_moment_s(rng: random.Random) -> float:
    """A random time in seconds, from the moment at which all ranks are ready."""
    return SETTLE_S + rng.uniform(0, MOMENT_S)


class Crew:
    """The server, for any number of jobs, one at a time.

    preload: modules of this folder that have the ranks' functions
    """

    def __init__(self, preload: list[str], deadline_s: float = START_TIMEOUT_S) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mcbench-"))
        self.jobs, self.deadline_s = 0, deadline_s
        here, there = socket.socketpair()
        self.link = Connection(here.detach())
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        command = [sys.executable, str(HERE / "fork_server.py"), str(there.fileno()), *preload]
        with there:
            self.server = subprocess.Popen(
                command, env=environment, pass_fds=[there.fileno()], preexec_fn=die_with_parent
            )
        try:
            self.store_port = self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def job(self, function: str, ranks: int, spec: dict[str, Any], env: dict[str, str]):
        """Runs ``module:function`` on the ranks. At the end all ranks that are left are killed.

        env: MOONCAKE_ variables of the ranks; other variables of that name are unset
        """
        self.jobs += 1
        folder = self.folder / f"job-{self.jobs}"
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "meeting"))
            listener.listen(ranks)
            listener.settimeout(self.deadline_s)
            what = {"function": function, "ranks": ranks, "spec": spec, "env": env}
            what |= {"folder": str(folder), "port": self.store_port, "name": f"job-{self.jobs}"}
            job = None
            try:
                self.link.send(what)
                job = Job(folder, self._answer(), listener)
                yield job
            finally:
                for link in job.links if job else ():
                    link.close()
                with contextlib.suppress(OSError):  # if the server has ended, _answer() reports it
                    self.link.send(None)
                self._answer()
                shutil.rmtree(folder, ignore_errors=True)

    def _answer(self) -> Any:
        try:
            if self.link.poll(self.deadline_s):
                return self.link.recv()
            raise JobError(f"the server of the ranks said nothing for {self.deadline_s:.0f} s")
        except (EOFError, OSError):
            raise JobError("the server of the ranks has ended") from None

    def close(self) -> None:
        """Ends the server and its children."""
        self.link.close()
        try:
            self.server.wait(10)
        except subprocess.TimeoutExpired:
            self.server.kill()  # the kernel ends its children
            self.server.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


# ---- in the server's process


def serve(link: Connection, preload: list[str]) -> None:
    """Starts jobs until the crew closes the link."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the crew gets it, too, and ends this server
    import torch.distributed  # noqa: F401

    for module in preload:
        importlib.import_module(module)
    gc.disable()
    gc.freeze()
    store, port = _start_store()
    children: list[int] = []
    try:
        link.send(port)
        while True:
            what = link.recv()
            if what is None:
                _end(children)
                link.send(None)
                continue
            threads = len(os.listdir("/proc/self/task"))
            assert threads == 1, f"the server of the ranks has {threads} threads and cannot fork"
            for rank in range(what["ranks"]):
                children.append(_fork(_rank, link, rank, what))
            link.send(children)
    except (EOFError, OSError):
        pass  # the crew has closed the link
    finally:
        children.append(store)
        _end(children)


def _fork(function: Any, *args: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent()
        function(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _end(children: list[int]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id cannot be reused
    while children:
        os.waitpid(children.pop(), 0)


def _start_store() -> tuple[int, int]:
    here, there = os.pipe()

    def hold() -> None:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(there, str(store.port).encode())
        while True:
            signal.pause()

    pid = _fork(hold)
    os.close(there)
    port = int(os.read(here, 16))
    os.close(here)
    return pid, port


def _rank(server_link: Connection, rank: int, what: dict[str, Any]) -> None:
    server_link.close()
    os.chdir(what["folder"])  # core dumps land here
    log = os.open(f"log-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name in [name for name in os.environ if name.startswith("MOONCAKE_")]:
        del os.environ[name]
    os.environ.update(what["env"])
    hub = socket.socket(socket.AF_UNIX)
    hub.connect("meeting")
    link = Connection(hub.detach())
    link.send(rank)
    me = Member(rank, what["ranks"], what["spec"], link, what["port"], what["name"])
    module, name = what["function"].split(":")
    try:
        getattr(importlib.import_module(module), name)(me)
    except BaseException:
        link.send({"error": traceback.format_exc()})


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2:])
