"""Starts the ranks of one run by mooncake-run and reads what rank 0 reports."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mooncake_backend.demo.model import PATIENCE


@dataclass(frozen=True)
class Kill:
    """A rank that sends itself SIGKILL after step `step`, and gets a replacement.

    patience: most seconds that the job goes on for the replacement after its last step
    """

    rank: int
    step: int
    patience: float = PATIENCE


@dataclass
class Run:
    """Results of one run on one backend."""

    backend: str
    kill: Kill | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)  # seconds between a step and the one before
    ranks: list[int] = field(default_factory=list)  # number that took part, per step
    endings: str = ""  # the launcher's table

    @property
    def name(self) -> str:
        return f"{self.backend}, rank {self.kill.rank} killed" if self.kill else self.backend

    @property
    def lost_at(self) -> int | None:
        """The first step without the killed rank."""
        return next((step for step, n in enumerate(self.ranks) if n < self.ranks[0]), None)

    @property
    def back_at(self) -> int | None:
        """The first step with its replacement."""
        lost = self.lost_at
        later = range(len(self.ranks))[lost:] if lost is not None else ()
        return next((step for step in later if self.ranks[step] == self.ranks[0]), None)

    @property
    def phases(self) -> list[tuple[int, int]]:
        """Each step from which on another number of ranks took part, and that number."""
        before = [0, *self.ranks]
        return [(step, n) for step, n in enumerate(self.ranks) if n != before[step]]


class RunError(RuntimeError):
    """A rank failed or the run took too long. The text has the end of the ranks' logs."""


def launch(
    backend: str,
    ranks: int,
    steps: int,
    files: list[Path],
    deadline: float,
    on_step: Callable[[float], None],
    kill: Kill | None = None,
) -> Run:
    """Trains with `ranks` processes, at most `deadline` seconds; leaves no process behind."""
    run = Run(backend, kill)
    arguments = ["--backend", backend, "--steps", str(steps)]
    if kill:
        arguments += ["--victim", str(kill.rank), "--kill-at", str(kill.step)]
        arguments += ["--patience", str(kill.patience)]

    def on_report(report: dict[str, Any]) -> None:
        run.losses.append(report["loss"])
        run.seconds.append(report["seconds"])
        run.pauses.append(report["pause"])
        run.ranks.append(report["ranks"])
        on_step(report["loss"])

    arguments += map(str, files)
    has_death = kill is not None
    run.endings = start_ranks("train", arguments, ranks, deadline, run.name, on_report, has_death)
    return run


def start_ranks(
    module: str,
    arguments: list[str],
    ranks: int,
    deadline: float,
    name: str,
    on_report: Callable[[dict[str, Any]], None],
    replaces: bool,
) -> str:
    """Runs a module of the demo. on_report gets each line of rank 0. With `replaces`, the launcher
    starts a new process for a rank that dies, once. Returns the endings table."""
    with tempfile.TemporaryDirectory(prefix="mooncake-demo-") as folder:
        command = [sys.executable, "-m", "mooncake_backend.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "--log-dir", folder]
        if replaces:
            command += ["--on-death", "replace", "--max-replacements", "1"]
        # stdout carries rank 0's reports; the stderr of all ranks is kept for error texts.
        command += ["--local-ranks-filter", "0", "--redirects", "2"]
        command += ["-m", f"mooncake_backend.demo.{module}", *arguments]
        log = Path(folder, "launcher.log")
        with log.open("wb") as launcher_log:
            launcher = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=launcher_log,
                # Ctrl-C reaches this process only. It then ends the launcher, which ends its ranks.
                start_new_session=True,
            )
        try:
            _follow(launcher, time.monotonic() + deadline, name, on_report)
        except RunError as error:
            raise RunError(f"{error}\n{_last_words(Path(folder))}") from None
        finally:
            _end(launcher)
            if launcher.stdout:
                launcher.stdout.close()
        _, _, table = log.read_text(encoding="utf-8", errors="replace").rpartition("mooncake-run: ")
        return f"mooncake-run: {table}".rstrip()


def _follow(
    launcher: subprocess.Popen[bytes],
    end: float,
    name: str,
    on_report: Callable[[dict[str, Any]], None],
) -> None:
    output = launcher.stdout
    assert output is not None
    selector = selectors.DefaultSelector()
    selector.register(output, selectors.EVENT_READ)
    pending = b""
    while True:
        if time.monotonic() > end:
            raise RunError(f"{name}: not done in time")
        if not selector.select(timeout=0.2):
            continue
        data = os.read(output.fileno(), 1 << 16)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            on_report(json.loads(line))
    try:
        code = launcher.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise RunError(f"{name}: not done in time") from None
    if code != 0:
        raise RunError(f"{name}: mooncake-run ended with {code}")


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Ends the launcher, which first ends its ranks and waits for them up to 30 s."""
    launcher.terminate()
    try:
        launcher.wait(40)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def _last_words(folder: Path) -> str:
    said = []
    for log in sorted(folder.rglob("*.log")):
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        if text:
            said.append(f"--- {log.relative_to(folder)}\n" + "\n".join(text.splitlines()[-20:]))
    return "\n".join(said)
