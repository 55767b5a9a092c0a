"""How the ranks of a job ended: the records, the job's result, and the table."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from mooncake_backend.ranks import list_ranks

TITLE = "mooncake-run"


@dataclass(frozen=True)
class Ending:
    """How one process ended.

    attempt: number of the job's start that it belonged to, from 0 on
    code: its exit code; minus the number of the signal that ended it
    started, ended: seconds since the epoch, on the clock of its host: comparable only with times of
    the same node
    message: the first line of its error file
    stopped: the launcher ended it
    waits: a rank that it lost, the longest time in seconds that this loss held up a call, and the
    time at which the launcher learned of it, as Waits.all() returns them
    joined: when the launcher learned that this replacement is in the job; None: never
    node: number of the launcher that saw the end
    incarnation: 0 for the rank's first process, 1 for its first replacement
    was_spare: the process had been started before its predecessor ended
    """

    rank: int
    host: str
    attempt: int
    code: int
    started: float
    ended: float
    message: str = ""
    stopped: bool = False
    waits: Sequence[Sequence[float]] = ()
    joined: float | None = None
    node: int = 0
    incarnation: int = 0
    was_spare: bool = False

    @property
    def finished(self) -> bool:
        return self.code == 0

    @property
    def name(self) -> str:
        """The rank; "2.1" for the first replacement of rank 2."""
        return f"{self.rank}.{self.incarnation}" if self.incarnation else str(self.rank)

    def how(self) -> str:
        if self.finished:
            return "finished"
        if self.stopped:
            text = _signal_name(-self.code) if self.code < 0 else cause(self.code)
            return f"stopped by the launcher ({text})"
        return f"{cause(self.code)}: {self.message}" if self.message else cause(self.code)


def cause(code: int) -> str:
    """Of the end of a process with this exit code."""
    return f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"


def failures(endings: Iterable[Ending]) -> list[Ending]:
    """The endings that make the job fail: none if some rank finished, else the last one of each
    rank. If some rank finished, each death beside it is a loss, which the job was started to
    survive. An incarnation that was replaced is a loss in any case. If the launcher ended the
    replacement, which came too late, its predecessor's end counts. Times of ends decide nothing:
    launchers see ends late, and the clocks of hosts differ."""
    endings = list(endings)
    if any(ending.finished for ending in endings):
        return []
    return last_incarnations(
        ending for ending in endings if not (ending.stopped and ending.incarnation)
    )


def last_incarnations(endings: Iterable[Ending]) -> list[Ending]:
    """The ending of each rank's last incarnation."""
    last: dict[int, Ending] = {}
    for ending in sorted(endings, key=lambda ending: ending.incarnation):
        last[ending.rank] = ending
    return list(last.values())


def table(endings: Sequence[Ending], unknown: Sequence[str] = ()) -> str:
    """A table of the processes that died, when and how, how soon they were replaced, how long the
    other ranks waited, and which ranks finished. `unknown`: lines about ranks whose launcher has
    gone."""
    last = max((ending.attempt for ending in endings), default=0)
    headline = _headline([ending for ending in endings if ending.attempt == last])
    if last:
        headline += f", attempt {last + 1}"
    rows: list[tuple[str, ...]] = [("rank", "host", "ended", "ran for", "how", "the others")]
    died = [ending for ending in endings if not ending.finished and not ending.stopped]
    for ending in sorted(died, key=lambda ending: (ending.attempt, ending.node, ending.ended)):
        rows.append(_row(ending, endings, last))
    rows += _groups([ending for ending in endings if ending not in died], last)
    lines = [f"{TITLE}: {headline}"]
    if len(rows) > 1:
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  " + "  ".join(cells).rstrip())
    lines += [f"  {text}" for text in unknown]
    return "\n".join(lines)


def _headline(endings: Sequence[Ending]) -> str:
    ranks = last_incarnations(endings)
    finished = sum(ending.finished for ending in ranks)
    text = f"{finished} of {len(ranks)} ranks finished"
    if finished and finished < len(ranks):
        text += f", {len(ranks) - finished} died and the others went on"
    if replacements := len(endings) - len(ranks):
        text += f", {replacements} replacement" + ("s were" if replacements > 1 else " was")
        text += " started"
    return text


def _row(ending: Ending, endings: Sequence[Ending], last: int) -> tuple[str, ...]:
    alike = [other for other in endings if other.attempt == ending.attempt]
    others = [other for other in alike if other.rank != ending.rank]
    next_ = next((other for other in alike if _replaces(other, ending)), None)
    outlived = [
        other.ended - ending.ended
        for other in others
        if other.finished and other.node == ending.node and other.ended >= ending.ended
    ]
    waits = [
        wait
        for other in others
        for rank, wait, when in other.waits
        if rank == ending.rank and _was_lost(ending, next_, when)
    ]
    said = []
    if next_ is not None:
        spare = " (spare)" if next_.was_spare else ""
        said.append(f"replaced after {_duration(max(0.0, next_.started - ending.ended))}{spare}")
    if outlived or waits:
        said.append("went on" + (f" after {_duration(max(waits))}" if waits else ""))
    if outlived:
        said.append(f"the last finished {max(outlived):.1f} s later")
    elif any(other.finished and other.node != ending.node for other in others):
        said.append("finished on other hosts")
    elif any(other.stopped for other in others):
        said.append("were stopped")
    return (
        ending.name + _attempt(ending, last),
        *_when(ending),
        ending.how(),
        ", ".join(said),
    )


def _replaces(ending: Ending, earlier: Ending) -> bool:
    return ending.rank == earlier.rank and ending.incarnation == earlier.incarnation + 1


def _was_lost(ending: Ending, replacement: Ending | None, when: float) -> bool:
    """Whether a wait for its rank that a launcher learned of at `when` was for this incarnation. A
    process that is not in the job yet cannot be lost. Clocks of other hosts may be wrong here."""
    is_after = not ending.incarnation or _has_joined(ending, when)
    return is_after and not (replacement is not None and _has_joined(replacement, when))


def _has_joined(ending: Ending, when: float) -> bool:
    return ending.joined is not None and ending.joined <= when


def _duration(seconds: float) -> str:
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _groups(endings: Sequence[Ending], last: int) -> list[tuple[str, ...]]:
    """Rows of ranks that ended in the same way on one host. A replacement has a row of its own."""
    alike: dict[tuple[int, bool, str, str, str], list[Ending]] = {}
    for ending in sorted(endings, key=lambda ending: ending.rank):
        own = ending.name if ending.incarnation else ""
        key = (ending.attempt, ending.finished, ending.host, ending.how(), own)
        alike.setdefault(key, []).append(ending)
    rows: list[tuple[str, ...]] = []
    for key in sorted(alike, key=lambda key: (key[0], key[1], alike[key][0].rank)):
        members = alike[key]
        longest = max(members, key=lambda ending: ending.ended - ending.started)
        ranks = key[-1] or list_ranks([ending.rank for ending in members])
        rows.append((ranks + _attempt(longest, last), *_when(longest), longest.how(), ""))
    return rows


def _when(ending: Ending) -> tuple[str, str, str]:
    moment = datetime.fromtimestamp(ending.ended, timezone.utc)
    return ending.host, f"{moment:%H:%M:%S}Z", f"{ending.ended - ending.started:.1f} s"


def _attempt(ending: Ending, last: int) -> str:
    return f" (attempt {ending.attempt + 1})" if last else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Journal:
    """The ends of ranks that a launcher has seen, or heard of."""

    def __init__(self) -> None:
        self.endings: list[Ending] = []
        self.others: list[Ending] = []  # on the hosts of other launchers
        self.unknown: list[str] = []
        self.is_spokesman = True  # this launcher prints the table

    def text(self) -> str:
        return table([*self.endings, *self.others], self.unknown)
