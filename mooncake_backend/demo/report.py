"""The table and the picture of finished runs."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from mooncake_backend.demo.launch import Run

WARM_UP = 10  # steps that also set up buckets, connections and caches


def table(runs: list[Run], ranks: int) -> Table:
    shown = Table(title=f"{ranks} ranks on this host, {len(runs[0].losses)} steps")
    shown.add_column("backend", no_wrap=True)
    shown.add_column("first loss", justify="right")
    shown.add_column("last loss", justify="right")
    shown.add_column("ms/step, median", justify="right")
    shown.add_column("ms/step, 95%", justify="right")
    for run in runs:
        steady = sorted(run.seconds[WARM_UP:] or run.seconds)
        last = run.losses[-20:]
        shown.add_row(
            run.name,
            f"{run.losses[0]:.4f}",
            f"{sum(last) / len(last):.4f}",
            f"{1e3 * median(steady):.1f}",
            f"{1e3 * steady[int(0.95 * (len(steady) - 1))]:.1f}",
        )
    return shown


def aftermath(run: Run) -> str:
    """What the death of a rank did to a run."""
    assert run.kill
    after = next((i for i, n in enumerate(run.ranks) if n < run.ranks[0]), len(run.ranks) - 1)
    # The kill may fall into the step before the first one without the victim.
    hit = max(run.seconds[run.kill.step + 1 : after + 1] or run.seconds[after:])
    return (
        f"step {run.kill.step}: rank {run.kill.rank} was killed. The other {run.ranks[-1]} ranks "
        f"went on: the step that lost it took {1e3 * hit:.1f} ms, "
        f"{len(run.ranks) - after} steps followed without it"
    )


def picture(runs: list[Run], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (loss, speed) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for index, run in enumerate(runs):
        style = {"label": run.name, "color": f"C{index}", "linestyle": ("-", "--")[index % 2]}
        loss.plot(run.losses, **style)
        if run.kill:
            loss.axvline(run.kill.step, color=f"C{index}", linestyle=":")
        steady = sorted(1e3 * seconds for seconds in run.seconds[WARM_UP:] or run.seconds)
        share = [100 * (place + 1) / len(steady) for place in range(len(steady))]
        speed.plot(steady, share, **style)
    loss.set(title="loss", xlabel="step", ylabel="nats per character")
    speed.set(title="time per step", xlabel="ms", ylabel="% of steps at most this long")
    speed.set_xscale("log")
    for axis in (loss, speed):
        axis.grid(alpha=0.3)
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def show(runs: list[Run], ranks: int, path: Path, console: Console) -> None:
    console.print(table(runs, ranks))
    for run in runs:
        if run.kill:
            console.print(aftermath(run))
            console.print(run.endings, markup=False, highlight=False, soft_wrap=True)
    picture(runs, path)
    console.print(f"picture: {path}")
