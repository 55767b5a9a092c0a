"""The steps of tests/gpu/first.sh: a first look at a GPU within ten minutes.

    python3 tests/gpu/first.py --list             the steps, their limits and commands
    python3 tests/gpu/first.py                    all of them
    python3 tests/gpu/first.py probe kernels      the steps `probe` and `kernels`
    python3 tests/gpu/first.py --device fake --most 30    a rehearsal on a machine without a GPU

Each step has a limit of its own, so that a step that hangs costs no other step. A step that cannot
begin in time says so. $OUT/first.tgz has all logs and the table; the logs stay in build/gpu/first.
Exit status 0: every step ended with status 0. 1: not every one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import parts

SECONDS = 565.0  # for all steps
PATIENCE_S = 4.0  # for a step that is told to end, and again for one that does not
LEAST_S = 5.0  # a step with less time than this does not begin
LAST_LINE = 96  # characters of it in the table
SHOWN = 4500  # characters of the output of a step that belongs to the result

LOGS = parts.ROOT / "build/gpu/first"
VENV = parts.ROOT / ".venv"


@dataclass(frozen=True)
class Step:
    name: str
    seconds: float
    command: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    shows: bool = False  # its output belongs to the result
    # It runs beside the steps after it. The step `after` of a later one names it.
    is_beside: bool = False
    after: str | None = None


@dataclass(frozen=True)
class Row:
    step: str
    status: str
    seconds: float
    last: str


def pytest(name: str, seconds: float, *arguments: str, **env: str) -> Step:
    options = ["-v", "-m", "", "--tb=short", "--durations=5", "-p", "no:cacheprovider"]
    command = ["python", "-m", "pytest", *options, f"--maxfail={parts.MOST_FAILURES}", *arguments]
    return Step(name, seconds, command, env, after="install")


def driver_tests(name: str, pattern: str) -> Step:
    command = [".gpu/mooncake_tests", f"--gtest_filter={pattern}", "--gtest_brief=1"]
    return Step(name, 20, command)


def steps_on(device: str) -> list[Step]:
    """Those that show the most come first."""
    probe = [".gpu/probe", ".gpu/probe.fatbin", "--seconds"]
    table = ["-b", "1K", "-e", "64M", "-f", "16", "--ranks", "1,2", "--rounds", "5"]
    losses = "words and (ends_between or killed_rank or active_ranks)"
    one_queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    in_venv = ["tests/gpu/venv.sh", ".venv"]
    if (VENV / "torch.stamp").exists():
        install = Step("install", 20, [*in_venv], is_beside=True)  # tests/setup_env.sh made it
    else:
        # The probe beside it has two cores.
        jobs = {"CMAKE_BUILD_PARALLEL_LEVEL": str(max(1, (os.cpu_count() or 1) - 2))}
        install = Step("install", 300, [*in_venv, "install"], jobs, is_beside=True)
    return [
        Step("facts", 45, ["tests/gpu/facts.sh"]),
        install,
        Step("probe", 120, [*probe, "110"], shows=True),
        Step("mps", 45, ["tests/gpu/mps.sh", *probe, "35", "barrier", "killed"], shows=True),
        driver_tests("driver", "*Cuda*:-Cuda/PeerMemorySuite/*"),
        *(
            driver_tests(f"driver-{number}", f"Cuda/PeerMemorySuite/*.{name}")
            for number, name in enumerate(parts.PEER_MEMORY, 1)
        ),
        Step("doctor", 30, ["python", "-m", "mooncake_backend", "doctor"], after="install"),
        pytest("kernels", 75, *parts.files("peer_kernels")),
        pytest("verbs", 45, *parts.files("peer_verbs", "peer_all_to_all")),
        pytest("graphs", 50, *parts.files("graphs")),
        pytest("staged-graphs", 45, *parts.files("staged_graphs")),
        pytest("staged", 60, "-n", "4", *parts.files("device")),
        pytest("experts", 60, *parts.files("ep_kernels", "ep_token_kernels")),
        pytest("loss-one-queue", 45, "-n", "4", *parts.files("device"), "-k", losses, **one_queue),
        pytest(
            "kernels-one-queue", 40, *parts.files("peer_kernels"), "-k", "killed or stopped",
            **one_queue,
        ),
        Step(
            "memcheck", 60,
            ["python", "tests/gpu/sanitizer.py", "memcheck", *parts.SANITIZED["collectives"]],
            after="install",
        ),
        Step(
            "speed", 50, ["python", "benchmarks/bench_device.py", "--device", device, *table],
            shows=True, after="install",
        ),
    ]  # fmt: skip


def environment(device: str) -> dict[str, str]:
    """The variables of all steps. Those of a step come on top."""
    return {
        "PATH": os.pathsep.join([f"{VENV}/bin", *os.get_exec_path()]),
        "PYTHONUNBUFFERED": "1",
        "TEST_DEVICE": device,
        "RANKS_DEADLINE": "20",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:LAST_LINE] if lines else ""


def table(rows: Sequence[Row]) -> str:
    width = max(len(row.step) for row in rows)
    lines = [f"{'step':{width}}  status   seconds  last line"]
    lines += [
        f"{row.step:{width}}  {row.status:8} {row.seconds:7.1f}  {row.last}".rstrip()
        for row in rows
    ]
    return "\n".join(lines) + "\n"


class Run:
    """The steps of one run, their logs and their results. Steps may end on several threads."""

    def __init__(
        self,
        logs: Path,
        out: Path,
        env: dict[str, str],
        seconds: float,
        most: float = float("inf"),
        patience: float = PATIENCE_S,
    ) -> None:
        self.logs, self.out, self.env = logs, out, env
        self.begin = time.monotonic()
        self.end = self.begin + seconds - 2 * patience
        self.most, self.patience = most, patience
        self.lock = threading.Lock()  # guards the rows and the archive
        self.rows: list[Row] = []
        self.beside: dict[str, threading.Thread] = {}
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        out.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        return self.end - time.monotonic()

    def run(self, step: Step) -> None:
        """Runs the step, or starts it if it runs beside others."""
        if step.is_beside:
            self.beside[step.name] = threading.Thread(target=self._run, args=[step])
            self.beside[step.name].start()
            return
        if step.after in self.beside:
            self.beside[step.after].join()
        self._run(step)

    def finish(self) -> bool:
        """Waits for the steps that run beside others. Returns whether all steps ended well."""
        for thread in self.beside.values():
            thread.join()
        return all(row.status == "0" for row in self.rows)

    def _run(self, step: Step) -> None:
        log = self.logs / f"{step.name}.log"
        log.write_text(f"$ {shlex.join(step.command)}\n")
        begin = time.monotonic()
        limit = min(step.seconds, self.most, self.left())
        if limit < min(LEAST_S, step.seconds, self.most):
            self._add(step, Row(step.name, "not run", 0.0, "no time left"), log)
            return
        print(f"== [{begin - self.begin:.0f} s] {step.name}", flush=True)
        env = {**self.env, **step.env}
        status = parts.execute(step.command, env, log, limit, self.patience)
        took = time.monotonic() - begin
        said = last_line(log)
        if status is None:
            said = f"over its {limit:.0f} s: {said}"[:LAST_LINE]
        self._add(
            step, Row(step.name, "stopped" if status is None else str(status), took, said), log
        )

    def _add(self, step: Step, row: Row, log: Path) -> None:
        with self.lock:
            self.rows.append(row)
            if step.shows:
                print(log.read_text(errors="replace")[-SHOWN:], flush=True)
            print(f"== {row.step}: {row.status}, {row.seconds:.1f} s, {row.last}", flush=True)
            (self.logs / "summary.txt").write_text(table(self.rows))
            self._archive()

    def _archive(self) -> None:
        draft = self.logs / "draft"
        with tarfile.open(draft, "w:gz") as archive:
            for path in sorted(self.logs.iterdir()):
                if path.suffix in (".log", ".txt"):
                    archive.add(path, arcname=f"first/{path.name}")
        shutil.copy(draft, self.out / ".first.tgz")
        draft.unlink()
        os.replace(self.out / ".first.tgz", self.out / "first.tgz")


def run_all(run: Run, steps: Sequence[Step], show: Callable[[str], object] = print) -> bool:
    try:
        for step in steps:
            run.run(step)
    finally:
        is_well = run.finish()
        if run.rows:
            show(f"\n{table(run.rows)}")
            show(f"{time.monotonic() - run.begin:.0f} s in all; {run.out}/first.tgz has the logs")
    return is_well


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--list", action="store_true", help="print the steps, run nothing")
    parser.add_argument("--device", default="cuda", help="cuda, or fake (tests/fake_device)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all steps")
    parser.add_argument("--most", type=float, default=float("inf"), help="seconds for each step")
    options = parser.parse_args()
    steps = steps_on(options.device)
    if unknown := set(options.steps) - {step.name for step in steps}:
        parser.error(f"unknown steps: {', '.join(sorted(unknown))}")
    chosen = [step for step in steps if not options.steps or step.name in options.steps]
    if options.list:
        for step in chosen:
            set_here = "".join(f"{name}={value} " for name, value in step.env.items())
            print(f"{step.name} ({step.seconds:.0f} s): {set_here}{shlex.join(step.command)}")
        return 0
    # A shell that starts this in the background ignores SIGINT, and so would each step.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    out = Path(os.environ.get("OUT", parts.ROOT / "build/gpu/out"))
    run = Run(LOGS, out, environment(options.device), options.seconds, options.most)
    return int(not run_all(run, chosen))


if __name__ == "__main__":
    sys.exit(main())
