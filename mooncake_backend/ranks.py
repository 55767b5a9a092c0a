"""Lists of ranks in messages, as csrc/base/rank_list.h writes them. Without torch: the launcher has
them, too."""

from __future__ import annotations

from collections.abc import Collection, Iterable

MOST_LISTED = 200  # characters


def list_ranks(ranks: Iterable[int]) -> str:
    """Ranks 0, 1, 2, 5 become "0-2, 5". A list that would be longer than MOST_LISTED ends with
    ", and 37 more"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[tuple[str, int]] = []
    for run in runs:
        if len(run) > 2:
            parts.append((f"{run[0]}-{run[-1]}", len(run)))
        else:
            parts += [(str(rank), 1) for rank in run]
    left, text = sum(map(len, runs)), ""
    for part, count in parts:
        longer = f"{text}, {part}" if text else part
        if len(longer + _and_more(left - count)) > MOST_LISTED:
            return text + _and_more(left)
        left, text = left - count, longer
    return text


def name_ranks(ranks: Collection[int]) -> str:
    """Returns "rank 3" or "ranks 0-2, 5"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + list_ranks(ranks)


def _and_more(ranks: int) -> str:
    return f", and {ranks} more" if ranks else ""
