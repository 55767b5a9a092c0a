"""Helpers of the benchmark scripts: sizes, statistics, tables, progress, JSON lines, plots, facts
about the machine."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """'4M' -> 4194304 bytes. Suffixes K, M, G (with or without B, iB), powers of 1024."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    if not match:
        raise ValueError(f"not a size: {text!r} (examples: 512, 1K, 4M)")
    return int(match[1]) * UNITS[match[2]]


def format_size(size: int) -> str:
    """4194304 -> '4M', which parse_size() reads back."""
    for suffix in ("G", "M", "K"):
        if size >= UNITS[suffix] and size % UNITS[suffix] == 0:
            return f"{size // UNITS[suffix]}{suffix}"
    return str(size)


def size_steps(begin: int, end: int, factor: int) -> list[int]:
    """Sizes in bytes from begin to end, each factor times the one before."""
    if begin < 1 or factor < 2:
        raise ValueError("sizes start at 1 byte or more and grow by a factor of 2 or more")
    sizes = []
    while begin <= end:
        sizes.append(begin)
        begin *= factor
    return sizes


def names(text: str) -> list[str]:
    """'a, b' -> ['a', 'b'], the form of every list on a command line here."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str) -> list[int]:
    """'2,4' -> [2, 4]."""
    return [int(part) for part in names(text)]


def geomean(values: Iterable[float]) -> float:
    """Geometric mean, the right mean for ratios."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def spread(values: Sequence[float], prefix: str = "", unit: str = "us") -> dict[str, float]:
    """p50, min and mean of a list, as JSON fields that name their unit."""
    facts = {"p50": statistics.median(values), "min": min(values), "mean": statistics.fmean(values)}
    return {f"{prefix}{name}_{unit}": round(value, 4) for name, value in facts.items()}


def percentiles(name: str, values: list[float]) -> dict[str, float | None]:
    """p50, p90, p99 and max. pN is the smallest value that N % of the values do not exceed."""
    ordered = sorted(values)
    facts: dict[str, float | None] = {"p50": statistics.median(ordered) if ordered else None}
    for percent in (90, 99):
        index = math.ceil(len(ordered) * percent / 100) - 1
        facts[f"p{percent}"] = ordered[index] if ordered else None
    facts["max"] = ordered[-1] if ordered else None
    return {f"{name}_{key}_ms": value for key, value in facts.items()}


def percentile_text(row: dict[str, Any], name: str) -> str:
    """p50/p90/p99/max of a row that has the fields of percentiles()."""
    values = [row[f"{name}_{key}_ms"] for key in ("p50", "p90", "p99", "max")]
    return "/".join(short(value) for value in values) if values[0] is not None else "-"


def short(value: float | None) -> str:
    """Three significant digits, without an exponent: 0.0123, 1.23, 12.3, 123, 12345."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table: with rich if it is installed, otherwise plain columns. Numbers are aligned to
    the right."""
    if util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        width = (
            sum(
                max(len(str(line[i])) for line in [headers, *rows]) + 3 for i in range(len(headers))
            )
            + 1
        )
        table = Table(title=title, title_justify="left")
        for index, header in enumerate(headers):
            table.add_column(header, justify="left" if index == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*[str(cell).replace("[", "\\[") for cell in row])
        Console(width=max(width, len(title)), highlight=False).print(table)
        return
    widths = [max(len(str(line[i])) for line in [headers, *rows]) for i in range(len(headers))]
    print(f"\n{title}")
    for line in [headers, ["-" * width for width in widths], *rows]:
        first, *rest = [str(cell) for cell in line]
        print(
            "  ".join(
                [
                    first.ljust(widths[0]),
                    *[cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True)],
                ]
            )
        )


class Progress:
    """Shows the progress of a run: a bar on a terminal, otherwise a line per cell."""

    WIDTH = 30

    def __init__(self, total: int) -> None:
        self.total, self.done, self.start = total, 0, time.monotonic()
        self.live = sys.stderr.isatty()

    def step(self, what: str) -> None:
        self.done += 1
        if self.live:
            bar = "#" * (self.WIDTH * self.done // self.total)
            left_s = (time.monotonic() - self.start) / self.done * (self.total - self.done)
            text = f"[{bar:<{self.WIDTH}}] {self.done}/{self.total} {what}, {left_s:.0f} s left"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        print("\r\x1b[K" * self.live + text, file=sys.stderr, flush=True)


def write_json_lines(path: str | None, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object per line; nothing if path is None."""
    if path:
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


Panels = dict[str, dict[str, list[tuple[float, float]]]]


def plot_panels(path: str | None, panels: Panels, columns: int, **text: str) -> None:
    """Draws log-log lines into a PNG: panels[panel title][line name] = [(x, y), ...]. Prints a line
    if matplotlib is missing.

    text: title, x, y.
    """
    if not path or not panels:
        return
    if not util.find_spec("matplotlib"):
        print("no plot: matplotlib is not installed")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    lines = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    colors = {name: f"C{index}" for index, name in enumerate(lines)}
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.4 * columns, 2.9 * rows), squeeze=False, sharey="row"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, panel) in zip(axes.flat, panels.items(), strict=False):
        for name, points in panel.items():
            axis.plot(
                *zip(*sorted(points), strict=True),
                marker="o",
                markersize=3,
                color=colors[name],
                label=name,
            )
        axis.set(title=title, xscale="log", yscale="log", xlabel=text.get("x"))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_size(round(x))))
        axis.set_xticks([x for x, _ in sorted(next(iter(panel.values())))][::2])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for line in axes[:, 0]:
        line.set_ylabel(text.get("y"))
    handles = [
        pyplot.Line2D([], [], color=colors[name], marker="o", markersize=3, label=name)
        for name in lines
    ]
    figure.legend(handles=handles, loc="lower center", ncol=max(1, len(lines)))
    figure.suptitle(text.get("title"))
    figure.tight_layout(rect=(0, 0.25 / rows / 2.9, 1, 1))
    figure.savefig(path, dpi=110)
    print(f"plot: {path}")


class OthersWatch:
    """Measures the CPU time that other processes took during a run. Other work slows spinning
    libraries most."""

    WORTH_A_WARNING = 0.05  # of all cores

    def __init__(self):
        self.start = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Seconds of CPU: all there was; busy or stolen; ours (this process and its ended
        children)."""
        ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        usages = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        ours = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        hertz = os.sysconf("SC_CLK_TCK")
        return sum(ticks) / hertz, (sum(ticks) - ticks[3] - ticks[4]) / hertz, ours

    def share(self) -> float:
        """Share of all CPU time since the start that other processes took, 0 to 1. Call it when all
        children have ended."""
        total, busy, ours = [b - a for a, b in zip(self.start, self._read(), strict=True)]
        return max(0.0, busy - ours) / max(total, 1e-9)

    def tell(self) -> float:
        """Prints the share, with a warning if it spoils the numbers; returns it."""
        share = self.share()
        spoiled = share > self.WORTH_A_WARNING
        warning = (
            ": NOT A QUIET MACHINE, do not trust ratios (spinning MPI suffers most)"
            if spoiled
            else ""
        )
        print(f"other processes took {share:.0%} of the CPU during the run{warning}")
        return round(share, 4)


def machine_facts() -> dict[str, Any]:
    """Facts that a reader needs to judge the numbers. No path and no host name."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    facts: dict[str, Any] = {
        "kind": "machine",
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": os.getloadavg()[0],
    }
    for package in ("torch", "mpi4py", "mooncake-backend"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    try:
        shown = subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, timeout=20
        ).stdout
        facts["mpirun"] = shown.splitlines()[0]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        facts["mpirun"] = None
    return facts
