"""Real processes for benchmarks: starts N ranks, lets them meet, ends them all.

A job is N copies of this file, started by mpirun (then MPI works inside the ranks) or by us. Every
rank calls one function of a benchmark script, named ``module:function``, with a ``Rank``. run_job
returns the rows that rank 0 emits. Every wait here has a deadline, and no process outlives its job:
children are ended by process id, and the kernel ends a rank whose parent has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MEETING_TIMEOUT_S = 120.0  # longest wait of a rank for the others between two turns
COLLECTIVE_TIMEOUT_S = 60.0  # timeout of every process group
PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000


class JobError(RuntimeError):
    """A rank failed, or the job passed its deadline. The text is the traceback of the rank that
    failed first."""


class Meeting:
    """Lets all ranks wait for each other without spinning, over unix sockets: rank 0 hears all,
    then
    answers all.

    It belongs to none of the measured libraries, so each of them has the same cost between turns.
    """

    def __init__(self, rank: int, size: int, path: str, timeout_s: float = MEETING_TIMEOUT_S):
        self.rank, self.size = rank, size
        self._peers: list[socket.socket] = []
        if rank == 0:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path + ".new")
                listener.listen(size)
                listener.settimeout(timeout_s)
                os.rename(path + ".new", path)  # once the name exists, connecting works
                by_rank = {}
                for _ in range(size - 1):
                    peer, _ = listener.accept()
                    peer.settimeout(timeout_s)
                    by_rank[self._receive(peer)] = peer
            self._peers = [by_rank[r] for r in range(1, size)]
        else:
            hub = socket.socket(socket.AF_UNIX)
            hub.settimeout(timeout_s)
            give_up = time.monotonic() + timeout_s
            while True:
                try:
                    hub.connect(path)
                    break
                except (FileNotFoundError, ConnectionRefusedError):
                    if time.monotonic() > give_up:
                        raise TimeoutError(
                            f"rank 0 did not open {path} within {timeout_s} s"
                        ) from None
                    time.sleep(0.01)
            self._send(hub, rank)
            self._peers = [hub]

    def barrier(self) -> None:
        """Returns when every rank has called this."""
        if self.rank == 0:
            for peer in self._peers:
                self._read(peer, 1)
            for peer in self._peers:
                peer.sendall(b"g")
        else:
            self._peers[0].sendall(b"r")
            self._read(self._peers[0], 1)

    def exchange(self, value: Any) -> list[Any]:
        """Sends one JSON value, and returns those of all ranks in rank order."""
        if self.rank != 0:
            self._send(self._peers[0], value)
            return self._receive(self._peers[0])
        values = [value] + [self._receive(peer) for peer in self._peers]
        for peer in self._peers:
            self._send(peer, values)
        return values

    @staticmethod
    def _send(peer: socket.socket, value: Any) -> None:
        body = json.dumps(value).encode()
        peer.sendall(struct.pack("<I", len(body)) + body)

    @classmethod
    def _receive(cls, peer: socket.socket) -> Any:
        (length,) = struct.unpack("<I", cls._read(peer, 4))
        return json.loads(cls._read(peer, length))

    @staticmethod
    def _read(peer: socket.socket, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = peer.recv(length - len(data))
            if not part:
                raise ConnectionError("another rank left the meeting")
            data += part
        return data


@dataclass
class Rank:
    """Argument of a rank's function: its rank, its task, the other ranks, and the place of
    results."""

    rank: int
    size: int
    spec: dict[str, Any]
    meeting: Meeting
    mpi: Any  # the mpi4py.MPI module, or None
    rows_path: Path
    host: socket.socket | None = None  # rank 0 in run_jobs_in_turns: tells when its turn begins

    @contextlib.contextmanager
    def turn(self):
        """Keeps the other jobs of run_jobs_in_turns asleep. No effect in a job of run_job."""
        if not self.spec.get("turns"):
            yield
            return
        if self.host:
            Meeting._read(self.host, 1)
        self.meeting.barrier()
        yield
        self.meeting.barrier()
        if self.host:
            self.host.sendall(b"d")

    def emit(self, row: dict[str, Any]) -> None:
        """Sends one result to the caller of run_job. Only rank 0 writes."""
        if self.rank == 0:
            with self.rows_path.open("a") as rows:
                rows.write(json.dumps(row) + "\n")

    def say(self, text: str) -> None:
        """Prints progress. Only rank 0 writes."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def open_store(self):
        """Opens the job's TCPStore. Rank 0 holds its server, as under torchrun."""
        import torch.distributed as dist

        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        store = None
        if self.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, self.size, True, timeout, wait_for_workers=False)
        port = self.meeting.exchange(store.port if store else None)[0]
        return store or dist.TCPStore(
            "127.0.0.1", port, self.size, False, timeout, wait_for_workers=False
        )


def mpi_missing() -> str | None:
    """Why MPI cannot take part on this machine, or None if it can."""
    if shutil.which("mpirun") is None:
        return "mpirun is not on the PATH"
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed for {Path(sys.executable).name}"
    return None


def nccl_missing(ranks: int) -> str | None:
    """Why NCCL cannot connect so many ranks on this machine, or None if it can."""
    import torch

    gpus = torch.cuda.device_count()
    if ranks > gpus:
        return f"it needs a GPU for each rank; {ranks} ranks, {gpus} GPUs"
    return None


def is_registered(backend: str) -> bool:
    """Whether torch.distributed knows this backend. Imports the package first, so that it can
    register itself."""
    import torch.distributed as dist

    if backend == "fake":
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers on import
    if backend.startswith("mooncake") and backend not in dist.Backend.backend_list:
        with contextlib.suppress(ImportError):
            importlib.import_module("mooncake_backend")
    return backend in dist.Backend.backend_list


def mpirun_command(ranks: int, tcp_only: bool) -> list[str]:
    """mpirun as a user would start it on one host. With more ranks than cores, ranks yield the CPU,
    as OpenMPI's own rule says."""
    cores = len(os.sched_getaffinity(0))
    command = ["mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    command += [
        "--mca",
        "mpi_yield_when_idle",
        str(int(ranks > cores)),
        "--mca",
        "btl_base_warn_component_unused",
        "0",
    ]
    if tcp_only:
        command += [
            "--mca",
            "pml",
            "ob1",
            "--mca",
            "btl",
            "self,tcp",
            "--mca",
            "btl_tcp_if_include",
            "lo",
        ]
    return command


@contextlib.contextmanager
def _started(
    function: str,
    ranks: int,
    spec: dict[str, Any],
    *,
    mpi: bool = False,
    tcp_only: bool = False,
    env: dict[str, str] | None = None,
):
    """Starts a job; yields its folder and processes. Ends them with the context."""
    with tempfile.TemporaryDirectory(prefix="mcbench-") as folder:
        Path(folder, "job.json").write_text(
            json.dumps({"function": function, "ranks": ranks, "mpi": mpi, "spec": spec})
        )
        worker = [sys.executable, str(HERE / "ranks.py"), folder]
        base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **(env or {})}
        base.setdefault("GLOO_SOCKET_IFNAME", "lo")
        base.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if tcp_only:
            base["MOONCAKE_TRANSPORTS"] = "tcp"
        if mpi:
            starts = [(mpirun_command(ranks, tcp_only) + worker, base)]
        else:
            starts = [(worker, {**base, "BENCH_RANK": str(r)}) for r in range(ranks)]
        children: list[subprocess.Popen] = []
        try:
            for command, child_env in starts:
                children.append(
                    subprocess.Popen(command, env=child_env, preexec_fn=die_with_parent)
                )
            yield folder, children
        finally:
            _end(children)


def _rows(folder: str) -> list[dict[str, Any]]:
    rows = Path(folder, "rows.jsonl")
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def run_job(
    function: str,
    ranks: int,
    spec: dict[str, Any],
    *,
    mpi: bool = False,
    tcp_only: bool = False,
    env: dict[str, str] | None = None,
    deadline_s: float = 600.0,
) -> list[dict[str, Any]]:
    """Runs ``module:function`` on all ranks and returns the rows that rank 0 emitted. Raises
    JobError."""
    how = {"mpi": mpi, "tcp_only": tcp_only, "env": env}
    with _started(function, ranks, spec, **how) as (folder, children):
        _wait(children, time.monotonic() + deadline_s, deadline_s, folder)
        return _rows(folder)


def run_jobs_in_turns(
    function: str,
    ranks: int,
    specs: list[dict[str, Any]],
    *,
    mpi: list[bool],
    tcp_only: bool = False,
    deadline_s: float = 600.0,
) -> list[dict[str, Any]]:
    """Runs several jobs with separate processes, one at a time. Each enters ``Rank.turn`` as often
    as the others. Each round starts with another job, and every second round has the reverse order.
    Returns the rows of all jobs."""
    deadline = time.monotonic() + deadline_s
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mcbench-"))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(folder + "/turns")
        listener.listen(len(specs))
        jobs = [
            stack.enter_context(
                _started(
                    function,
                    ranks,
                    {**spec, "turns": folder + "/turns", "job": index},
                    mpi=with_mpi,
                    tcp_only=tcp_only,
                )
            )
            for index, (spec, with_mpi) in enumerate(zip(specs, mpi, strict=True))
        ]

        def patiently(call: Callable[[], Any]) -> Any:
            """Repeats call(), which has a short timeout. In between, checks that all jobs still
            run. Returns None if the other end is gone."""
            while True:
                try:
                    return call()
                except (BrokenPipeError, ConnectionResetError):
                    return None
                except TimeoutError:
                    for job_folder, children in jobs:
                        _check(children, deadline, deadline_s, job_folder)

        listener.settimeout(0.2)
        hosts: dict[int, socket.socket] = {}
        for _ in jobs:
            host = stack.enter_context(patiently(listener.accept)[0])
            host.settimeout(0.2)
            hosts[patiently(lambda host=host: host.recv(1))[0]] = host
        live = [hosts[index] for index in range(len(jobs))]
        number = 0
        while live:
            shift = number % len(live)
            order = live[shift:] + live[:shift]
            for host in reversed(order) if number % 2 else order:
                patiently(lambda host=host: host.sendall(b"g"))
                if not patiently(lambda host=host: host.recv(1)):
                    live.remove(host)  # this job is done or has failed: _wait() tells
            number += 1
        for job_folder, children in jobs:
            _wait(children, deadline, deadline_s, job_folder)
        return [row for job_folder, _ in jobs for row in _rows(job_folder)]


def run_main(main: Callable[[], int]) -> int:
    """Runs a script; returns its exit status. For a failed job it prints the failing rank's
    traceback, not that of this process. SIGTERM cleans up as control-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return main()
    except JobError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def _wait(
    children: list[subprocess.Popen], deadline: float, deadline_s: float, folder: str
) -> None:
    while any(child.poll() is None for child in children):
        _check(children, deadline, deadline_s, folder)
        time.sleep(0.02)
    _check(children, deadline, deadline_s, folder)


def _check(
    children: list[subprocess.Popen], deadline: float, deadline_s: float, folder: str
) -> None:
    failed = [child.returncode for child in children if child.poll()]
    if failed:
        time.sleep(0.3)  # let the first failing rank finish writing
        errors = sorted(Path(folder).glob("error-*.txt"), key=lambda path: path.stat().st_mtime)
        raise JobError(
            errors[0].read_text()
            if errors
            else f"a rank ended with status {failed[0]} and said nothing"
        )
    if time.monotonic() > deadline and any(child.poll() is None for child in children):
        raise JobError(f"the job did not end within {deadline_s} s")


def _end(children: list[subprocess.Popen]) -> None:
    """Sends SIGTERM, waits, then sends SIGKILL: only to processes that this job started, by id.
    mpirun ends its own ranks."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    for child in children:
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def enter_namespace(namespace: str) -> None:
    """Moves this thread, and threads that it starts, into a network namespace. Connections that it
    has made before stay."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({namespace})")


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def work(folder: str) -> None:
    """Body of a rank process."""
    die_with_parent()
    job = json.loads(Path(folder, "job.json").read_text())
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["BENCH_RANK"])
    try:
        mpi = None
        if job["mpi"]:
            import mpi4py

            # Only one thread calls MPI: then MPI takes no locks, and is fastest.
            mpi4py.rc.thread_level = "funneled"
            from mpi4py import MPI

            mpi = MPI
        meeting = Meeting(rank, job["ranks"], str(Path(folder, "meeting")))
        me = Rank(rank, job["ranks"], job["spec"], meeting, mpi, Path(folder, "rows.jsonl"))
        if "turns" in me.spec and rank == 0:
            me.host = socket.socket(socket.AF_UNIX)
            me.host.connect(me.spec["turns"])
            me.host.sendall(bytes([me.spec["job"]]))
        module, name = job["function"].split(":")
        getattr(importlib.import_module(module), name)(me)
        meeting.barrier()
    except BaseException:
        Path(folder, f"error-{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(1)  # no clean-up that could wait for a rank that is gone


if __name__ == "__main__":
    from ranks import work as _work  # not __main__'s copy: the scripts import ranks too

    _work(sys.argv[1])
