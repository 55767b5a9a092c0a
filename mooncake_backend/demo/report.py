"""The table and the picture of finished runs."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from mooncake_backend.demo import sentences
from mooncake_backend.demo.launch import Run
from mooncake_backend.demo.sentences import Mixture

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
    """Describes how a rank's death affected a run."""
    assert run.kill
    after = next((i for i, n in enumerate(run.ranks) if n < run.ranks[0]), len(run.ranks) - 1)
    # The kill may hit the step before the first one without the victim.
    hit = max(run.seconds[run.kill.step + 1 : after + 1] or run.seconds[after:])
    return (
        f"step {run.kill.step}: rank {run.kill.rank} was killed. The other {run.ranks[-1]} ranks "
        f"went on: the step that lost it took {1e3 * hit:.1f} ms, "
        f"{len(run.ranks) - after} steps followed without it"
    )


def picture(runs: list[Run], job: Mixture | None, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = 1 if job is None else 2
    figure, axes = pyplot.subplots(
        rows, 2, figsize=(11, 4 * rows), layout="constrained", squeeze=False
    )
    _draw_training(runs, *axes[0])
    if job is not None:
        _draw_gap(job, axes[1][0])
        _draw_sentences(job, axes[1][1])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_training(runs: list[Run], loss: Any, speed: Any) -> None:
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


def _draw_gap(job: Mixture, axis: Any) -> None:
    for one in job.authors:
        # The first character also includes reading the prompt.
        places = range(1, len(one.seconds))
        label = f"rank {one.rank}" + ("" if one.finished else ", killed")
        axis.plot(places, [1e3 * one.seconds[place] for place in places], label=label)
    title = "mixture of experts: time per character"
    if (at := job.killed_at) is not None:
        gap = 1e3 * max(one.seconds[at] for one in job.survivors)
        axis.axvline(at, color="C3", linestyle=":")
        title += f", {gap:.1f} ms at the kill"
    axis.set(title=title, xlabel="character", ylabel="ms")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()


def _draw_sentences(job: Mixture, axis: Any) -> None:
    """Draws a line for each sentence, from its first character to its last."""
    line, ticks, hits = 0, {}, []
    for one in job.authors:
        first = line
        for sentence in range(len(one.prompts)):
            axis.barh(line, len(one.characters), height=0.7, color=f"C{one.rank}", alpha=0.5)
            hits += [(place, line) for place, rows in enumerate(one.missing) if sentence in rows]
            line += 1
        ticks[(first + line - 1) / 2] = f"rank {one.rank}"
    axis.set_yticks(list(ticks), list(ticks.values()))
    title = "its sentences"
    if job.killed_at is not None:
        loss = job.survivors[0].loss
        title += f"; nats per character of other text: {loss['whole']:.2f},\n"
        title += f"without rank {job.victim}'s experts {loss['missing']:.2f}, "
        title += f"if routers avoid them {loss['avoided']:.2f}"
    axis.set_title(title, fontsize="medium")
    axis.plot([place for place, _ in hits], [line for _, line in hits], "k.")
    axis.set_xlabel("character (dot: an expert's answer was missing)")
    axis.invert_yaxis()


def show(runs: list[Run], job: Mixture | None, ranks: int, path: Path, console: Console) -> None:
    console.print(table(runs, ranks))
    for run in runs:
        if run.kill:
            console.print(aftermath(run))
            console.print(run.endings, markup=False, highlight=False, soft_wrap=True)
    if job is not None:
        console.print(sentences.table(job))
        for example in sentences.examples(job):
            console.print(example)
        console.print(sentences.aftermath(job))
    picture(runs, job, path)
    console.print(f"picture: {path}")
