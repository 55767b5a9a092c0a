"""Starts the mixture of experts and reads the files of all its processes: the sentences, and how
the death of a rank and its replacement affected them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text as Line

from mooncake_backend.demo.launch import start_ranks
from mooncake_backend.demo.mixture import EXPERTS_OF_A_RANK, LENGTH
from mooncake_backend.demo.model import report_of


@dataclass
class Author:
    """Results of one process. Lists have an element for each character of all its sentences at
    once, one turn of sentences after the other."""

    rank: int
    is_replacement: bool
    prompts: list[list[str]]  # per turn
    characters: list[str]  # one character of each sentence
    seconds: list[float]
    asked: list[list[list[int]]]  # per sentence, the ranks of the experts that it was sent to
    missing: list[list[int]]  # the sentences whose experts did not all answer
    active: list[list[int]]  # 1 for each rank that this one took for alive
    let_in: float | None  # seconds that letting in the replacement took
    away: float | None  # seconds from the loss of a rank until its replacement was in
    loss: dict[str, float]  # per held-out character; empty for a killed rank

    @property
    def name(self) -> str:
        """As in the launcher's table."""
        return f"{self.rank}.1" if self.is_replacement else str(self.rank)

    @property
    def finished(self) -> bool:
        return bool(self.loss)

    @property
    def hits(self) -> list[tuple[int, int]]:
        """The sentences that missed an expert: turn, and number in the turn."""
        return self.hits_from(0)

    def hits_from(self, first: int) -> list[tuple[int, int]]:
        """The same, without the characters before `first`."""
        later = [(at // LENGTH, number) for at, number in self.misses if at >= first]
        return sorted(set(later))

    @property
    def misses(self) -> list[tuple[int, int]]:
        """The places at which sentences missed an expert, and the numbers of the sentences."""
        return [(place, number) for place, rows in enumerate(self.missing) for number in rows]

    @property
    def sentences(self) -> int:
        return sum(map(len, self.prompts))

    def sentence(self, turn: int, number: int) -> list[tuple[str, bool]]:
        """Its characters, each with whether an expert's answer was missing for it."""
        places = range(len(self.characters))[turn * LENGTH : (turn + 1) * LENGTH]
        return [(self.characters[at][number], number in self.missing[at]) for at in places]


@dataclass
class Mixture:
    """The job: the sentences of all its processes."""

    victim: int | None
    authors: list[Author]
    endings: str  # the launcher's table

    @property
    def survivors(self) -> list[Author]:
        return [one for one in self.authors if one.finished and not one.is_replacement]

    @property
    def replacement(self) -> Author | None:
        return next((one for one in self.authors if one.is_replacement and one.finished), None)

    @cached_property
    def killed_at(self) -> int | None:
        """The character during which the survivors lost the victim."""
        lost = (place for place, active in enumerate(self.survivors[0].active) if 0 in active)
        return next(lost, None)

    @property
    def back_at(self) -> int | None:
        """The replacement's first character. Its sentences begin with a turn of the other ranks."""
        if (new := self.replacement) is None:
            return None
        return len(self.survivors[0].characters) - len(new.characters)

    def first_of(self, author: Author) -> int:
        """The survivors' number of an author's first character."""
        return (self.back_at or 0) if author.is_replacement else 0

    @property
    def agreed(self) -> bool:
        """Whether all ranks that finished saw the same active ranks at each character, and the same
        loss to the last bit."""
        first, *others = self.survivors
        new = self.replacement
        return all((one.active, one.loss) == (first.active, first.loss) for one in others) and (
            new is None
            or (
                new.active == first.active[self.back_at :]
                and new.loss["again"] == first.loss["again"]
            )
        )


def generate(
    ranks: int,
    steps: int,
    files: list[Path],
    deadline: float,
    victim: int | None,
    patience: float,
    on_report: Callable[[dict[str, Any]], None],
) -> Mixture:
    """victim: the rank that is killed and replaced. patience: most seconds that its replacement is
    waited for."""
    with tempfile.TemporaryDirectory(prefix="mooncake-demo-") as folder:
        arguments = ["--steps", str(steps), "--reports", folder, *map(str, files)]
        if victim is not None:
            arguments = ["--victim", str(victim), "--patience", str(patience), *arguments]
        has_death = victim is not None
        endings = start_ranks(
            "generate", arguments, ranks, deadline, "experts", on_report, has_death
        )
        found = [
            _read(Path(folder), rank, is_replacement)
            for rank in range(ranks)
            for is_replacement in (False, True)
        ]
    return Mixture(victim, [author for author in found if author is not None], endings)


def _read(folder: Path, rank: int, is_replacement: bool) -> Author | None:
    """Returns None for a process that has generated nothing."""
    path = report_of(folder, rank, is_replacement)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    # A killed rank may leave an incomplete line.
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    written = [line for line in lines if "characters" in line]
    if not written:
        return None
    values: dict[str, Any] = {"let_in": None, "away": None, "loss": {}}
    for line in lines:
        values |= {key: line[key] for key in values.keys() & line.keys()}
    values |= {key: [line[key] for line in written] for key in written[0]}
    values["prompts"] = [line["prompts"] for line in lines if "prompts" in line]
    return Author(rank, is_replacement, **values)


def table(job: Mixture) -> Table:
    size, at, back = len({one.rank for one in job.authors}), job.killed_at, job.back_at
    share = f"{EXPERTS_OF_A_RANK} of the {EXPERTS_OF_A_RANK * size} experts of a layer"
    shown = Table(title=f"{size} ranks generate text, each has {share}")
    shown.add_column("rank")
    shown.add_column("ms/character", justify="right")
    shown.add_column("at the kill", justify="right")
    shown.add_column("at the return", justify="right")
    shown.add_column("missed an expert", justify="right")
    for one in job.authors:
        kill = None if at is None or one not in job.survivors else one.seconds[at]
        shown.add_row(
            one.name,
            f"{1e3 * median(one.seconds):.1f}",
            "-" if kill is None else f"{1e3 * kill:.1f}",
            "-" if back is None or one.let_in is None else f"{1e3 * at_return(job, one):.1f}",
            f"{len(one.hits)} of {one.sentences} sentences" if one.finished else "killed",
        )
    return shown


def at_return(job: Mixture, survivor: Author) -> float:
    """Seconds that it took to let the replacement in, with the first character after that."""
    assert job.back_at is not None
    assert survivor.let_in is not None
    return survivor.let_in + survivor.seconds[job.back_at]


def examples(job: Mixture) -> Iterator[Line]:
    """A sentence of each process: its prompt, and in red the characters for which an expert's
    answer was missing. Sentences of the turn of the kill, and of the replacement's last turn."""
    for one in job.authors:
        turn, number = (one.hits or [(len(one.prompts) - 1, 0)])[0]
        line = Line(f"rank {one.name}: ")
        line.append(one.prompts[turn][number].replace("\n", " "), style="dim")
        for character, is_hit in one.sentence(turn, number):
            line.append(character.replace("\n", " "), style="reverse red" if is_hit else "")
        if not one.finished:
            line.append(" (killed)", style="bold red")
        yield line


def aftermath(job: Mixture) -> str:
    """Describes how a rank's death, and its replacement, affected the sentences."""
    loss = job.survivors[0].loss
    if job.killed_at is None:
        return f"loss per character of held-out text: {loss['whole']:.3f}"
    losses = (
        f"loss per character of held-out text: {loss['whole']:.3f} with all experts, "
        f"{loss['missing']:.3f} without those of rank {job.victim}, {loss['avoided']:.3f} when the "
        "routers avoid them"
    )
    if "again" in loss:
        alike = "the same" if loss["again"] == loss["whole"] else "NOT the same"
        losses += f", {loss['again']:.3f} with its replacement: {alike} to the last bit"
    count = len([one for one in job.authors if one.finished])
    agreed = "agree to the last bit" if job.agreed else "do NOT agree"
    return "\n".join(
        [
            _of_the_kill(job, job.killed_at),
            _of_the_return(job),
            f"{losses}. The {count} ranks {agreed}",
        ]
    )


def _of_the_kill(job: Mixture, at: int) -> str:
    survivors, (turn, place) = job.survivors, divmod(at, LENGTH)
    hit = [f"rank {one.rank}: {_listed(one.missing[at])}" for one in survivors]
    count = sum(len(one.missing[at]) for one in survivors)
    total = sum(len(one.prompts[turn]) for one in survivors)
    later = sum(len(one.hits_from(at + 1)) for one in survivors)
    slowest = max(one.seconds[at] for one in survivors)
    usual = median(seconds for one in survivors for seconds in one.seconds)
    return (
        f"turn {turn}, character {place} of {LENGTH}: rank {job.victim} was killed between "
        f"dispatch and combine, and its sentences ended. The gap in the others: "
        f"{1e3 * slowest:.1f} ms for this character, {1e3 * usual:.1f} ms is usual. Of their "
        f"{total} sentences {count} missed an expert in it ({'; '.join(hit)}), and {later} later: "
        "the routers avoid the lost experts"
    )


def _of_the_return(job: Mixture) -> str:
    new, back, first = job.replacement, job.back_at, job.survivors[0]
    if new is None or back is None:
        return (
            f"NOT REPLACED: no new process was ready in time to be rank {job.victim}; its experts "
            "were missing until the end (--patience gives it longer)"
        )
    total = sum(
        len(turn) for one in (*job.survivors, new) for turn in one.prompts[-len(new.prompts) :]
    )
    hit = len(new.hits) + sum(len(one.hits_from(back)) for one in job.survivors)
    slowest = max(at_return(job, one) for one in job.survivors)
    usual = median(
        seconds
        for one in job.survivors
        for place, seconds in enumerate(one.seconds)
        if place % LENGTH == 0 and place != back
    )
    return (
        f"turn {back // LENGTH}, {first.away:.1f} s later: a new process is rank {job.victim}. It "
        "has loaded its experts from the checkpoint that rank 0 wrote after the learning. The gap "
        f"in the others: {1e3 * slowest:.1f} ms to let it in and for the first character of their "
        f"sentences, {1e3 * usual:.1f} ms is usual for that one. Of the {total} sentences from "
        f"there on {hit} missed an expert"
    )


def _listed(rows: list[int]) -> str:
    return ", ".join(map(str, rows)) or "none"
