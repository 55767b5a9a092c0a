"""The table and the picture of finished runs."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from mooncake_backend.demo import sentences
from mooncake_backend.demo.launch import Run
from mooncake_backend.demo.mixture import LENGTH
from mooncake_backend.demo.sentences import Mixture

GAP = 6  # characters, between two sentences in the picture
WARM_UP = 10  # steps that also set up buckets, connections and caches


def table(runs: list[Run], ranks: int) -> Table:
    steps = len(runs[0].losses)
    shown = Table(title=f"{ranks} ranks on this host, {steps} steps")
    shown.add_column("backend", no_wrap=True)
    shown.add_column(f"loss at {steps}", justify="right")
    shown.add_column("ms/step", justify="right")
    shown.add_column("95%", justify="right")
    shown.add_column("ranks (from step)", no_wrap=True)
    for run in runs:
        steady = sorted(run.seconds[WARM_UP:] or run.seconds)
        last = run.losses[:steps][-20:]
        shown.add_row(
            run.name,
            f"{sum(last) / len(last):.4f}",
            f"{1e3 * median(steady):.1f}",
            f"{1e3 * steady[int(0.95 * (len(steady) - 1))]:.1f}",
            ", ".join(f"{n} ({step})" if step else str(n) for step, n in run.phases),
        )
    return shown


def aftermath(run: Run) -> str:
    """Describes how a rank's death, and its replacement, affected a run."""
    assert run.kill
    rank, at = run.kill.rank, run.kill.step
    lost, back = run.lost_at, run.back_at
    said = f"step {at}: rank {rank} was killed. "
    if lost is None:
        return f"{said}The run ended before a step without it"
    # The loss may hold up the pause before a step, or the step.
    hit = max(run.seconds[step] + run.pauses[step] for step in range(at + 1, lost + 1))
    end = len(run.ranks) if back is None else back
    said += f"The other {run.ranks[lost]} ranks went on: the step that lost it took "
    said += f"{1e3 * hit:.1f} ms, {end - lost} steps followed without it\n"
    if back is None:
        return said + (
            f"NOT REPLACED: no new process was ready in time to be rank {rank}; {run.ranks[-1]} "
            "ranks trained until the end (--patience gives it longer)"
        )
    away = sum(run.seconds[at + 1 : back]) + sum(run.pauses[at + 1 : back + 1])
    return said + (
        f"step {back}, {away:.1f} s later: a new process is rank {rank}, with the model of the "
        f"other ranks. They paused for {1e3 * run.pauses[back]:.1f} ms to let it in, "
        f"{len(run.ranks) - back} steps followed with all {run.ranks[back]} ranks"
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
            _mark(loss, run.kill.rank, run.lost_at, run.back_at)
            ends = [step for step, _ in run.phases[1:]] + [len(run.ranks)]
            for (begin, ranks), end in zip(run.phases, ends, strict=True):
                loss.text(
                    (begin + end) / 2,
                    0.03,
                    f"{ranks} ranks",
                    transform=loss.get_xaxis_transform(),
                    horizontalalignment="center",
                )
        steady = sorted(1e3 * seconds for seconds in run.seconds[WARM_UP:] or run.seconds)
        share = [100 * (place + 1) / len(steady) for place in range(len(steady))]
        speed.plot(steady, share, **style)
    loss.margins(y=0.12)  # room for the numbers of ranks
    loss.set(title="loss", xlabel="step", ylabel="nats per character")
    speed.set(title="time per step", xlabel="ms", ylabel="% of steps at most this long")
    speed.set_xscale("log")
    for axis in (loss, speed):
        axis.grid(alpha=0.3)
        axis.legend()


def _mark(axis: Any, rank: int, lost: int | None, back: int | None) -> None:
    """Marks the loss of a rank and its return, and shades the time between."""
    if lost is not None:
        axis.axvline(lost, color="0.2", linestyle=":", label=f"rank {rank} killed")
    if lost is not None and back is not None:
        axis.axvspan(lost, back, color="0.5", alpha=0.15, linewidth=0)
        axis.axvline(back, color="0.2", linestyle="--", label="a new process in its place")


def _draw_gap(job: Mixture, axis: Any) -> None:
    for one in job.survivors:
        # The first character of a sentence also includes reading the prompt.
        places = [place for place in range(len(one.seconds)) if place % LENGTH]
        times = [1e3 * one.seconds[place] for place in places]
        axis.plot(places, times, color=f"C{one.rank}", label=f"rank {one.rank}", linewidth=0.7)
    title = "mixture of experts: time per character"
    if (at := job.killed_at) is not None:
        gap = 1e3 * max(one.seconds[at] for one in job.survivors)
        title += f"\n{gap:.1f} ms at the kill"
        if (back := job.back_at) is not None:
            gap = 1e3 * max(sentences.at_return(job, one) for one in job.survivors)
            title += f", {gap:.1f} ms at the return"
            axis.plot([back], [gap], "k.")
        _mark(axis, job.victim or 0, at, back)
    axis.set_title(title, fontsize="medium")
    axis.set(xlabel="character, of one sentence after the other", ylabel="ms")
    axis.set_yscale("log")
    axis.set_ylim(top=4 * axis.get_ylim()[1])  # room for the legend
    axis.grid(alpha=0.3)
    axis.legend(ncols=2, fontsize="small", loc="upper left")


def _draw_sentences(job: Mixture, axis: Any) -> None:
    """Draws a line for each sentence of a turn, one turn after the other. A replacement goes on in
    the lines of its predecessor."""
    ticks, hits = {}, []
    rows = len(job.authors[0].prompts[0])
    for index, rank in enumerate(sorted({one.rank for one in job.authors})):
        first = index * rows
        ticks[first + (rows - 1) / 2] = f"rank {rank}"
        for one in (one for one in job.authors if one.rank == rank):
            left = job.first_of(one)
            spans = [
                (left + begin, min(LENGTH - GAP, len(one.characters) - begin))
                for begin in range(0, len(one.characters), LENGTH)
            ]
            for line in range(first, first + rows):
                axis.broken_barh(spans, (line - 0.35, 0.7), color=f"C{rank}", alpha=0.5)
            hits += [(left + place, first + row) for place, row in one.misses]
    axis.set_yticks(list(ticks), list(ticks.values()))
    title = "its sentences"
    if job.killed_at is not None:
        loss = job.survivors[0].loss
        title += f"; nats per character of other text: {loss['whole']:.2f}, without\n"
        title += f"rank {job.victim}'s experts {loss['missing']:.2f}, avoided {loss['avoided']:.2f}"
        if "again" in loss:
            title += f", replaced {loss['again']:.2f} again"
        _mark(axis, job.victim or 0, job.killed_at, job.back_at)
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
