"""Starts the ranks of one run as processes and reads what rank 0 reports."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Kill:
    """A rank that gets SIGKILL when step `step` is done."""

    rank: int
    step: int


@dataclass
class Run:
    """What one backend did."""

    backend: str
    kill: Kill | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # that took part, per step

    @property
    def name(self) -> str:
        return f"{self.backend}, rank {self.kill.rank} killed" if self.kill else self.backend


class RunError(RuntimeError):
    """A rank failed or the run took too long; the text has the rank's last words."""


def launch(
    backend: str,
    ranks: int,
    steps: int,
    files: list[Path],
    deadline: float,
    on_step: Callable[[float], None],
    kill: Kill | None = None,
) -> Run:
    """Trains with `ranks` processes within `deadline` seconds; leaves no process behind."""
    run = Run(backend, kill)
    with tempfile.TemporaryDirectory(prefix="mooncake-demo-") as folder:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                command = [sys.executable, "-m", "mooncake_backend.demo.train"]
                command += ["--backend", backend, "--store", str(Path(folder, "store"))]
                command += ["--rank", str(rank), "--ranks", str(ranks), "--steps", str(steps)]
                with logs[rank].open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            command + [str(file) for file in files],
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE if rank == 0 else log,
                            stderr=log,
                            # Ctrl-C reaches this process only, which then stops the ranks.
                            start_new_session=True,
                        )
                    )
            _follow(run, processes, logs, time.monotonic() + deadline, on_step)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                process.wait()
                if process.stdout:
                    process.stdout.close()
    return run


def _follow(
    run: Run,
    processes: list[subprocess.Popen[bytes]],
    logs: list[Path],
    end: float,
    on_step: Callable[[float], None],
) -> None:
    output = processes[0].stdout
    assert output is not None
    selector = selectors.DefaultSelector()
    selector.register(output, selectors.EVENT_READ)
    pending = b""
    while selector.get_map() or any(process.poll() is None for process in processes):
        if time.monotonic() > end:
            raise RunError(f"{run.backend}: not done in time\n{_last_words(logs)}")
        for rank, process in enumerate(processes):
            if process.poll() and not _was_killed(run, rank, process):
                ended = f"rank {rank} ended with {process.returncode}"
                raise RunError(f"{run.backend}: {ended}\n{_last_words(logs)}")
        if not selector.get_map():
            time.sleep(0.05)
        elif selector.select(timeout=0.2):
            data = os.read(output.fileno(), 1 << 16)
            if not data:
                selector.unregister(output)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                report = json.loads(line)
                run.losses.append(report["loss"])
                run.seconds.append(report["seconds"])
                run.ranks.append(report["ranks"])
                if run.kill and report["step"] == run.kill.step:
                    processes[run.kill.rank].send_signal(signal.SIGKILL)
                on_step(report["loss"])
    failed = [
        rank
        for rank, process in enumerate(processes)
        if process.returncode and not _was_killed(run, rank, process)
    ]
    if failed:
        raise RunError(f"{run.backend}: ranks {failed} failed\n{_last_words(logs)}")


def _was_killed(run: Run, rank: int, process: subprocess.Popen[bytes]) -> bool:
    """By us: the victim of this run."""
    is_victim = run.kill is not None and run.kill.rank == rank
    return is_victim and process.returncode == -signal.SIGKILL


def _last_words(logs: list[Path]) -> str:
    said = []
    for rank, log in enumerate(logs):
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        if text:
            said.append(f"--- rank {rank}\n" + "\n".join(text.splitlines()[-20:]))
    return "\n".join(said)
