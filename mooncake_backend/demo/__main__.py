"""python -m mooncake_backend.demo: train on each backend in turn, and on ours once more with a rank
that is killed; then compare."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError:
    sys.exit("the demo needs its extra packages: pip install 'mooncake-backend[demo]'")

from mooncake_backend.demo.launch import Kill, Run, RunError, launch
from mooncake_backend.demo.model import documents
from mooncake_backend.demo.report import show


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mooncake_backend.demo", description=__doc__)
    parser.add_argument("--backends", default="mooncake,gloo", help="comma-separated, run in turn")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--victim", type=int, default=2, help="the rank to kill at half time; -1 for none"
    )
    parser.add_argument("--deadline", type=float, default=240, help="seconds that one run may take")
    parser.add_argument("--picture", type=Path, default=Path("build/demo.png"))
    parser.add_argument("--text", type=Path, nargs="+", help="files instead of the documents here")
    given = parser.parse_args()

    files = given.text or documents()
    size = sum(file.stat().st_size for file in files)
    if size < 2000:
        parser.error("no text to learn from: start this in a clone, or give --text FILE")

    # Rank 0 reports, so it is not the one to kill here; it could be.
    if given.victim == 0 or given.victim >= given.ranks:
        parser.error(f"--victim must be between 1 and {given.ranks - 1}, or -1")
    backends = given.backends.split(",")
    plan: list[tuple[str, Kill | None]] = [(backend, None) for backend in backends]
    # Other backends do not go on.
    survives = [backend for backend in backends if backend.startswith("mooncake")]
    if survives and given.victim > 0:
        plan.append((survives[0], Kill(given.victim, given.steps // 2)))

    console = Console()
    console.print(f"learning {size} characters from {len(files)} documents")
    runs: list[Run] = []
    columns = (
        TextColumn("{task.description:>23}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console) as progress:
            for backend, victim in plan:
                name = Run(backend, victim).name
                task = progress.add_task(name, total=given.steps, loss="-")

                def on_step(loss: float, task=task) -> None:  # type: ignore[no-untyped-def]
                    progress.update(task, advance=1, loss=f"{loss:.3f}")

                runs.append(
                    launch(
                        backend, given.ranks, given.steps, files, given.deadline, on_step, victim
                    )
                )
    except RunError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    show(runs, given.ranks, given.picture, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
