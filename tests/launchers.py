"""mooncake-run as a process, and the ranks of a test under it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import hosts
import pytest

from mooncake_backend import run

needs_hosts = pytest.mark.skipif(bool(hosts.why_not()), reason=str(hosts.why_not()))

# Every rank says who it is, then does what the test has written.
RANK = """
import json, os, signal, sys, time

FOLDER, RANK = sys.argv[1], int(os.environ["RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def say(name, value):
    with open(f"{FOLDER}/.{name}-{RANK}", "w") as file:
        json.dump(value, file)
    os.rename(f"{FOLDER}/.{name}-{RANK}", f"{FOLDER}/{name}-{RANK}")

def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)

def heard(name, rank):
    path = f"{FOLDER}/{name}-{rank}"
    until(lambda: os.path.exists(path))
    with open(path) as file:
        return json.load(file)

def until_seen_dead(rank):
    # Its launcher has asked for its exit code, and so knows of its end.
    pid = heard("pid", rank)
    until(lambda: not os.path.exists(f"/proc/{pid}"))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

say("pid", os.getpid())
"""


@dataclass
class Launcher:
    """mooncake-run as a process, forked from one that has imported torch."""

    folder: Path
    process: Any
    log: Path = field(init=False)

    def wait(self) -> tuple[int, str]:
        """Its exit code and all that it and its ranks wrote."""
        self.process.join(harness.DEADLINE)
        assert self.process.exitcode is not None, self.output()
        return self.process.exitcode, self.output()

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@dataclass
class Site:
    """Where a test starts launchers. Nothing of what it started outlives it."""

    folder: Path
    launchers: list[Launcher] = field(default_factory=list)

    def start(
        self,
        script: str,
        *flags: str,
        ranks: int = 2,
        env: dict[str, str] | None = None,
        namespace: str | None = None,
        main: Callable[[Sequence[str]], int] = run.main,
    ) -> Launcher:
        path = self.folder / "rank.py"
        path.write_text(RANK + script)
        # On one host with a port that the kernel chooses; other jobs run here, too.
        where = [] if "--nnodes" in flags else ["--standalone"]
        arguments = [*where, "--nproc-per-node", str(ranks), *flags, str(path), str(self.folder)]
        launcher = Launcher(self.folder, None)
        launcher.log = self.folder / f"launcher-{len(self.launchers)}.log"
        harness._start_server()
        launcher.process = harness._processes.Process(
            target=_launch,
            args=(main, arguments, dict(env or {}), namespace, launcher.log),
        )
        launcher.process.start()
        self.launchers.append(launcher)
        return launcher

    def run(self, script: str, *flags: str, **named: Any) -> tuple[int, str]:
        return self.start(script, *flags, **named).wait()

    def heard(self, name: str, rank: int) -> Any:
        path = self.folder / f"{name}-{rank}"
        harness.until(path.exists, f"{path}")
        return json.loads(path.read_text())

    def say(self, name: str, value: Any) -> None:
        """To all ranks: heard(name, "all") returns the value. A rank never reads half of it."""
        beside = self.folder / f".{name}-all"
        beside.write_text(json.dumps(value))
        beside.rename(self.folder / f"{name}-all")

    def pids(self) -> list[int]:
        return [json.loads(path.read_text()) for path in self.folder.glob("pid-*")]

    def close(self) -> list[int]:
        """Ends what is left; returns the ranks' processes among that."""
        for launcher in self.launchers:
            launcher.process.kill()
            launcher.process.join(harness.DEADLINE)
        left = [pid for pid in self.pids() if runs(pid)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            harness.until(lambda pid=pid: not runs(pid), f"the end of {pid}")
        return left


def runs(pid: int) -> bool:
    """Not one that has ended, whose parent died before it and which nobody has reaped yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _launch(
    main: Callable[[Sequence[str]], Any],
    arguments: Sequence[str],
    env: dict[str, str],
    namespace: str | None,
    log: Path,
) -> None:
    harness._libc.prctl(harness._PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if namespace is not None:
        harness.enter_namespace(namespace)
    for name in [name for name in os.environ if name.startswith(("MOONCAKE_", "PET_", "TORCH"))]:
        del os.environ[name]
    os.environ.update({"OMP_NUM_THREADS": "1", **env})
    sys.exit(main(list(arguments)))


def start_on(
    site: Site,
    two: hosts.Hosts,
    node: int,
    script: str,
    ranks: int,
    how: str = "c10d",
    more: Sequence[str] = (),
):
    first = two[0].v4[0]
    flags = ["--nnodes", "2", "--local-addr", two[node].v4[0]]
    if how == "c10d":
        flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29400"]
        flags += [
            "--rdzv-conf",
            f"is_host={1 - node},keep_alive_interval=1,keep_alive_max_attempt=5",
        ]
    else:
        flags += ["--node-rank", str(node), "--master-addr", first, "--master-port", "29400"]
    return site.start(script, *flags, *more, ranks=ranks, namespace=two[node].namespace)
