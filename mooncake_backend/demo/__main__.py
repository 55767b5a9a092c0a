"""python -m mooncake_backend.demo: trains on each backend in turn, and once more on ours while a
rank is killed and replaced. Then generates text with a mixture of experts, and kills and replaces
one of its ranks, too."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

try:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
    )
except ImportError:
    sys.exit("the demo needs its extra packages: pip install rich matplotlib numpy")

from mooncake_backend.demo.launch import Kill, Run, RunError, launch
from mooncake_backend.demo.mixture import LENGTH, TURNS_AFTER, TURNS_BEFORE
from mooncake_backend.demo.model import PATIENCE, documents
from mooncake_backend.demo.report import show
from mooncake_backend.demo.sentences import Mixture, generate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mooncake_backend.demo", description=__doc__)
    parser.add_argument("--backends", default="mooncake,gloo", help="comma-separated, run in turn")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--expert-steps", type=int, default=120, help="of the mixture of experts; 0 leaves it out"
    )
    parser.add_argument(
        "--victim", type=int, default=2, help="the rank to kill at a third; -1: none"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        help="seconds that a run may last longer for the rank's replacement",
    )
    parser.add_argument("--deadline", type=float, default=240, help="seconds that one run may take")
    parser.add_argument("--picture", type=Path, default=Path("build/demo.png"))
    parser.add_argument("--text", type=Path, nargs="+", help="files instead of the documents here")
    given = parser.parse_args()

    files = given.text or documents()
    size = sum(file.stat().st_size for file in files)
    if size < 10_000:
        parser.error(f"{size} characters are too few to learn from: give more files by --text")

    # Rank 0 reports, so this demo does not kill it. The backend would survive that, too.
    if given.victim == 0 or given.victim >= given.ranks:
        parser.error(f"--victim must be between 1 and {given.ranks - 1}, or -1")
    backends = given.backends.split(",")
    plan: list[tuple[str, Kill | None]] = [(backend, None) for backend in backends]
    # Jobs on other backends do not survive a death.
    survives = [backend for backend in backends if backend.startswith("mooncake")]
    if survives and given.victim > 0:
        plan.append((survives[0], Kill(given.victim, given.steps // 3, given.patience)))

    console = Console()
    console.print(f"learning {size} characters from {len(files)} documents")
    runs: list[Run] = []
    job: Mixture | None = None
    victim = given.victim if given.victim > 0 else None
    columns = (
        TextColumn("{task.description:>23}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console) as progress:
            for backend, kill in plan:
                name = Run(backend, kill).name
                task = progress.add_task(name, total=given.steps, loss="")

                def on_step(loss: float, task: TaskID = task) -> None:
                    advance(progress, task, f"loss {loss:.3f}")

                runs.append(
                    launch(backend, given.ranks, given.steps, files, given.deadline, on_step, kill)
                )
            if survives and given.expert_steps > 0:
                turns = TURNS_BEFORE + (0 if victim is None else TURNS_AFTER)
                steps = {"learn": given.expert_steps, "generate": turns * LENGTH}
                tasks = {
                    phase: progress.add_task(f"experts {phase}", total=total, loss="", start=False)
                    for phase, total in steps.items()
                }

                def on_report(report: dict[str, Any]) -> None:
                    task, loss = tasks[report["phase"]], report["loss"]
                    progress.start_task(task)
                    advance(progress, task, "" if loss is None else f"loss {loss:.3f}")

                job = generate(
                    given.ranks,
                    given.expert_steps,
                    files,
                    given.deadline,
                    victim,
                    given.patience,
                    on_report,
                )
    except RunError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    show(runs, job, given.ranks, given.picture, console)
    return 0


def advance(progress: Progress, task: TaskID, loss: str) -> None:
    """A job that goes on for a replacement has more steps than are known before."""
    total = progress.tasks[task].total or 0
    done = progress.tasks[task].completed + 1
    progress.update(task, completed=done, total=max(total, done), loss=loss)


if __name__ == "__main__":
    sys.exit(main())
