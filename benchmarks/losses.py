"""Evaluates the kills of bench_failure.py: cells, limits, tables, a plot. Rows in, text out."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from importlib import util
from typing import Any

import gates
from common import format_size, percentile_text, percentiles, print_table, short
from gates import Finding

RESUMED_P50_MS, RESUMED_P99_MS = 30.0, 100.0  # from the kill to the last survivor's result
KNOWN_P99_MS = 20.0  # from the kill to the last survivor's evidence, over shared memory
SILENT_P99_MS = 100.0  # the last survivor's result, beyond failure_timeout

TIMES = ("known_first", "known", "view", "resumed")  # names of fields, without _ms

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Lane:
    """A backend in one mode."""

    backend: str
    mode: str

    @property
    def name(self) -> str:
        return f"{self.backend} {self.mode}" if self.ours else self.backend

    @property
    def ours(self) -> bool:
        return self.backend.startswith("mooncake")

    def runs(self, action: str) -> bool:
        """Gloo does not run `stop`: a silent rank only makes its operations time out."""
        return self.ours or action != "stop"


def summarize(kills: Rows) -> dict[str, Any]:
    """A cell of one lane, from its kills. Kills with outcome minority are counted, not timed."""
    first = kills[0]
    good = [row for row in kills if not row["error"]]
    timed = [row for row in good if row["outcome"] != "minority"]
    wrong = [row["error"] for row in kills if row["error"]]
    fields = ("mode", "ranks", "bytes", "backend", "action", "beyond_ms")
    row = {"kind": "failure", **{field: first[field] for field in fields}, "kills": len(kills)}
    row["outcomes"] = dict(Counter(one["outcome"] for one in good))
    row["evidence"] = dict(Counter(one["evidence"] for one in good if one["evidence"]))
    for name in TIMES:
        values = [one[f"{name}_ms"] for one in timed if one[f"{name}_ms"] is not None]
        row |= percentiles(name, values)
    if "core_mib" in first:
        row["core_mib"] = round(statistics.fmean(one.get("core_mib", 0) for one in good or kills))
    row["error"] = f"{len(wrong)} of {len(kills)} kills: {wrong[0]}" if wrong else None
    return row


def name_of(row: dict[str, Any]) -> str:
    return Lane(row["backend"], row["mode"]).name


def cells_of(rows: Rows) -> Rows:
    return [row for row in rows if row["kind"] == "failure"]


def judge(rows: Rows, ours: str | None) -> list[Finding]:
    """Judges the limits of a loss: the median over all kills, the other limits in each cell.

    Over TCP alone no rank can detect the end of a process that still frees its memory or writes its
    core dump. So big and segv have no limits there.
    """
    cells = [row for row in cells_of(rows) if row["backend"] == ours]
    findings = []
    for action in dict.fromkeys(row["action"] for row in cells):
        chosen = [row for row in cells if row["action"] == action]
        if action in ("big", "segv"):
            chosen = [row for row in chosen if row["mode"] == "shm"]
        if action == "stop":
            name = "stop: resumed, p99, ms beyond failure_timeout"
            findings.append(gates.at_most(name, _of_cells(chosen, "resumed_p99_ms"), SILENT_P99_MS))
            continue
        p50, p99 = _median_of_all(rows, chosen), _of_cells(chosen, "resumed_p99_ms")
        findings.append(gates.at_most(f"{action}: resumed, p50, ms", p50, RESUMED_P50_MS))
        findings.append(gates.at_most(f"{action}: resumed, p99, ms", p99, RESUMED_P99_MS))
        if shared := [row for row in chosen if row["mode"] == "shm"]:
            name = f"{action}: known to all (shm), p99, ms"
            findings.append(gates.at_most(name, _of_cells(shared, "known_p99_ms"), KNOWN_P99_MS))
    return findings


def _median_of_all(rows: Rows, cells: Rows) -> dict[str, float]:
    """The median over all kills of these cells: the work after a loss differs too much by cell."""
    fields = ("mode", "ranks", "bytes", "backend", "action")
    known = {tuple(row[field] for field in fields) for row in cells}
    values = [
        row["resumed_ms"]
        for row in rows
        if row["kind"] == "failure_kill"
        and tuple(row[field] for field in fields) in known
        and not row["error"]
        and row["outcome"] != "minority"
    ]
    return {f"all {len(values)} kills": statistics.median(values)} if values else {}


def _of_cells(cells: Rows, field: str) -> dict[str, float]:
    return {
        f"{row['ranks']} ranks {format_size(row['bytes'])} {row['mode']}": row[field]
        for row in cells
        if row[field] is not None
    }


def show(rows: Rows) -> None:
    """Prints two tables for each action: times, and their parts."""
    cells = cells_of(rows)
    for action in dict.fromkeys(row["action"] for row in cells):
        chosen = [row for row in cells if row["action"] == action]
        since = "failure_timeout" if action == "stop" else "the kill"
        lines = [
            [
                f"{row['ranks']} ranks {format_size(row['bytes'])}",
                name_of(row),
                _counts(row["evidence"]),
                percentile_text(row, "known"),
                percentile_text(row, "resumed"),
                _counts(row["outcomes"]),
            ]
            for row in chosen
        ]
        title = f"{action}: p50/p90/p99/max, ms since {since}, last survivor"
        headers = ["cell", "backend", "evidence", "known", "resumed (gloo: raised)", "kills"]
        print_table(title, headers, lines)
        parts = [
            [f"{row['ranks']} ranks {format_size(row['bytes'])}", name_of(row)]
            + [short(row[f"{name}_p50_ms"]) for name in TIMES]
            for row in chosen
            if row["known_p50_ms"] is not None
        ]
        headers = ["cell", "backend", "first knows", "all know", "view on all", "result on all"]
        if parts:
            print_table(f"{action}: the parts, p50, ms since {since}", headers, parts)
    for row in cells:
        if row["error"]:
            where = f"{row['action']} {row['ranks']} ranks {format_size(row['bytes'])}"
            print(f"FAILED {where} {name_of(row)}: {row['error']}")
        if row.get("core_mib") == 0:
            where = f"{row['ranks']} ranks {name_of(row)}"
            print(f"no core dumps at {where}: not allowed here, or piped")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items()) or "-"


def plot(path: str | None, rows: Rows) -> None:
    """Draws distributions: one panel per action, number of ranks and size."""
    kills = [row for row in rows if row["kind"] == "failure_kill" and not row["error"]]
    if not path or not kills:
        return
    if not util.find_spec("matplotlib"):
        print("no plot: matplotlib is not installed")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    panels: dict[tuple[str, int, int], Rows] = {}  # rows: actions and sizes; columns: ranks
    for row in kills:
        panels.setdefault((row["action"], row["bytes"], row["ranks"]), []).append(row)
    order = list(dict.fromkeys(row["action"] for row in kills))
    panels = {key: panels[key] for key in sorted(panels, key=lambda k: (order.index(k[0]), *k[1:]))}
    lanes = list(dict.fromkeys(name_of(row) for row in kills))
    columns = len({ranks for _, _, ranks in panels})
    lines = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(
        lines,
        columns,
        figsize=(3.4 * columns, 2.9 * lines),
        squeeze=False,
        sharex="row",
        sharey=True,
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, ((action, size, ranks), panel) in zip(axes.flat, panels.items(), strict=False):
        for index, lane in enumerate(lanes):
            chosen = [row for row in panel if name_of(row) == lane and row["outcome"] != "minority"]
            for name, style in (("resumed", "-"), ("known", ":")):
                values = sorted(
                    row[f"{name}_ms"] for row in chosen if row[f"{name}_ms"] is not None
                )
                if not values:
                    continue
                shares = [number / len(values) * 100 for number in range(len(values) + 1)]
                axis.step([values[0], *values], shares, style, where="post", color=f"C{index}")
        title = f"{action}, {ranks} ranks, {format_size(size)}"
        silent = action == "stop"
        axis.set(title=title, xlabel="ms beyond failure_timeout" if silent else "ms since the kill")
        if not silent:
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axis.grid(alpha=0.3)
    for line in axes[:, 0]:
        line.set_ylabel("% of the kills")
    handles = [pyplot.Line2D([], [], color=f"C{i}", label=lane) for i, lane in enumerate(lanes)]
    handles.append(pyplot.Line2D([], [], color="gray", label="resumed (gloo: raised)"))
    handles.append(pyplot.Line2D([], [], color="gray", linestyle=":", label="known"))
    figure.legend(handles=handles, loc="lower center", ncol=min(len(handles), 2 * columns))
    figure.suptitle("from the kill of a rank to the last survivor")
    figure.tight_layout(rect=(0, 0.45 / lines / 2.9, 1, 1))
    figure.savefig(path, dpi=110)
    print(f"plot: {path}")
