"""Starts the mixture of experts and reads the files of all ranks: the sentences, and how the death
of a rank affected them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text as Line

from mooncake_backend.demo.launch import start_ranks
from mooncake_backend.demo.mixture import EXPERTS_OF_A_RANK


@dataclass
class Author:
    """Results of one rank. Lists have an element for each character of all its sentences at
    once."""

    rank: int
    prompts: list[str]
    characters: list[str]  # one character of each sentence
    seconds: list[float]
    asked: list[list[list[int]]]  # per sentence, the ranks of the experts that it was sent to
    missing: list[list[int]]  # the sentences whose experts did not all answer
    active: list[list[int]]  # 1 for each rank that this one took for alive
    loss: dict[str, float]  # per held-out character; empty for a killed rank

    @property
    def finished(self) -> bool:
        return bool(self.loss)

    @property
    def hits(self) -> list[int]:
        return sorted({sentence for rows in self.missing for sentence in rows})

    def sentence(self, number: int) -> str:
        return "".join(characters[number] for characters in self.characters)


@dataclass
class Mixture:
    """The job: all ranks' sentences."""

    victim: int | None
    authors: list[Author]
    endings: str  # the launcher's table

    @property
    def survivors(self) -> list[Author]:
        return [author for author in self.authors if author.finished]

    @property
    def killed_at(self) -> int | None:
        """The character during which the survivors lost the victim."""
        lost = (place for place, active in enumerate(self.survivors[0].active) if 0 in active)
        return next(lost, None)

    @property
    def agreed(self) -> bool:
        """Whether all survivors saw the same active ranks at each character, and the same loss to
        the last bit."""
        first, *others = self.survivors
        return all((one.active, one.loss) == (first.active, first.loss) for one in others)


def generate(
    ranks: int,
    steps: int,
    files: list[Path],
    deadline: float,
    victim: int | None,
    on_report: Callable[[dict[str, Any]], None],
) -> Mixture:
    with tempfile.TemporaryDirectory(prefix="mooncake-demo-") as folder:
        arguments = ["--steps", str(steps), "--reports", folder, *map(str, files)]
        if victim is not None:
            arguments = ["--victim", str(victim), *arguments]
        endings = start_ranks("generate", arguments, ranks, deadline, "experts", on_report)
        authors = [_read(rank, Path(folder, f"rank-{rank}.jsonl")) for rank in range(ranks)]
    return Mixture(victim, authors, endings)


def _read(rank: int, path: Path) -> Author:
    text = path.read_text(encoding="utf-8")
    # A killed rank may leave an incomplete line.
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    written = [line for line in lines if "characters" in line]
    return Author(
        rank,
        prompts=lines[0]["prompts"],
        loss=lines[-1].get("loss", {}),
        **{key: [line[key] for line in written] for key in written[0]},
    )


def table(job: Mixture) -> Table:
    size, at = len(job.authors), job.killed_at
    share = f"{EXPERTS_OF_A_RANK} of the {EXPERTS_OF_A_RANK * size} experts of a layer"
    shown = Table(title=f"{size} ranks generate text, each has {share}")
    shown.add_column("rank", justify="right")
    shown.add_column("ms/character, median", justify="right")
    shown.add_column("ms at the kill", justify="right")
    shown.add_column("sentences that missed an expert", justify="right")
    for one in job.authors:
        shown.add_row(
            str(one.rank),
            f"{1e3 * median(one.seconds):.1f}",
            "-" if at is None or not one.finished else f"{1e3 * one.seconds[at]:.1f}",
            f"{len(one.hits)} of {len(one.prompts)}" if one.finished else "all ended",
        )
    return shown


def examples(job: Mixture) -> Iterator[Line]:
    """A sentence of each rank: its prompt, and in red the characters for which an expert's answer
    was missing."""
    for one in job.authors:
        number = (one.hits or [0])[0]
        line = Line(f"rank {one.rank}: ")
        line.append(one.prompts[number].replace("\n", " "), style="dim")
        for place, character in enumerate(one.sentence(number)):
            is_hit = number in one.missing[place]
            line.append(character.replace("\n", " "), style="reverse red" if is_hit else "")
        if not one.finished:
            line.append(" (killed)", style="bold red")
        yield line


def aftermath(job: Mixture) -> str:
    """Describes how a rank's death affected the sentences."""
    loss = job.survivors[0].loss
    if (at := job.killed_at) is None:
        return f"loss per character of held-out text: {loss['whole']:.3f}"
    survivors, length = job.survivors, len(job.survivors[0].characters)
    hit = [f"rank {one.rank}: {_listed(one.missing[at])}" for one in survivors]
    later = sum(len(rows) for one in survivors for rows in one.missing[at + 1 :])
    count = sum(len(one.missing[at]) for one in survivors)
    total = sum(len(one.prompts) for one in survivors)
    slowest = max(one.seconds[at] for one in survivors)
    usual = median(seconds for one in survivors for seconds in one.seconds)
    agreed = "agree to the last bit" if job.agreed else "do NOT agree"
    return (
        f"character {at} of {length}: rank {job.victim} was killed between dispatch and combine, "
        f"and its sentences ended. The gap in the others: {1e3 * slowest:.1f} ms for this "
        f"character, {1e3 * usual:.1f} ms is usual. Of their {total} sentences {count} missed an "
        f"expert in it ({'; '.join(hit)}), and {later} later: the routers avoid the lost "
        f"experts\nloss per character of held-out text: {loss['whole']:.3f} with all experts, "
        f"{loss['missing']:.3f} without those of rank {job.victim}, {loss['avoided']:.3f} when the "
        f"routers avoid them. The {len(survivors)} ranks {agreed}"
    )


def _listed(rows: list[int]) -> str:
    return ", ".join(map(str, rows)) or "none"
