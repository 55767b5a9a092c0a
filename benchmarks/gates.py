"""The limits of speed, and the judgement of a run. Pure functions: rows in, findings out.

The floor of a cell is torch's dispatch: the fake backend's row of the same cell (lanes.py has the
method).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from common import format_size, geomean, print_table, short

GATED_BYTES = 4 << 20  # larger sizes have no limit
MPI_GEOMEAN_LIMIT = 1.25  # ours / (OpenMPI + floor), over all cells, 2 and 4 ranks
MPI_CELL_LIMIT = 2.0  # the same, each cell
GLOO_CELL_LIMIT = 1.0  # ours / gloo, each cell
TCP_GEOMEAN_LIMIT = 2.0  # lower limit of gloo / ours over all cells, without shared memory
EIGHT_RANKS_LIMIT = 3.0  # smallest all_reduce on 8 ranks / on 4 of them

Rows = list[dict[str, Any]]


@dataclass
class CellRows:
    """The rows of all backends for one (mode, ranks, op, size)."""

    op: str
    size: int
    rows: dict[str, dict[str, Any]]

    def us(self, backend: str) -> float | None:
        """Median microseconds per call; None if it was not measured."""
        return self.rows.get(backend, {}).get("p50_us")

    def against(self, ours: str, peer: str) -> float | None:
        """ours / peer; below 1 ours is faster."""
        mine, theirs = self.us(ours), self.us(peer)
        return mine / theirs if mine and theirs else None

    def against_mpi(self, ours: str) -> float | None:
        """ours / (OpenMPI + floor)."""
        mine, mpi, floor = self.us(ours), self.us("mpi"), self.us("fake")
        return mine / (mpi + floor) if mine and mpi and floor else None


@dataclass
class Finding:
    """One measured value and its limit. ok is None if there is no limit, or no value."""

    name: str
    value: float | None
    limit: str
    ok: bool | None
    detail: str = ""

    def as_row(self) -> dict[str, Any]:
        return {"kind": "summary", **asdict(self)}


def find_ours(backends: list[str]) -> str | None:
    """The first backend of this project in a list of names."""
    return next((name for name in backends if name.startswith("mooncake")), None)


def by_job(cells: Rows) -> dict[tuple[str, int], Rows]:
    """Rows grouped by (mode, ranks)."""
    jobs: dict[tuple[str, int], Rows] = {}
    for row in cells:
        jobs.setdefault((row["mode"], row["ranks"]), []).append(row)
    return jobs


def by_cell(job: Rows) -> list[CellRows]:
    """The cells of one job, by operation, then size."""
    cells: dict[tuple[str, int], dict[str, Any]] = {}
    for row in job:
        cells.setdefault((row["op"], row["bytes"]), {})[row["backend"]] = row
    ops = list(dict.fromkeys(op for op, _ in cells))
    ordered = sorted(cells, key=lambda key: (ops.index(key[0]), key[1]))
    return [CellRows(op, size, cells[op, size]) for op, size in ordered]


def at_most(name: str, values: dict[str, float], limit: float | None) -> Finding:
    """Judges the worst of some named values against an upper limit, and counts those above it."""
    if not values:
        return Finding(name, None, _upper(limit), None, "not measured")
    worst = max(values, key=values.__getitem__)
    above = [key for key, value in values.items() if limit is not None and value > limit]
    detail = worst + (f"; {len(above)} of {len(values)} above" if above and len(values) > 1 else "")
    return Finding(name, values[worst], _upper(limit), None if limit is None else not above, detail)


def _upper(limit: float | None) -> str:
    return "" if limit is None else f"<= {limit:g}"


def judge(cells: Rows, ours: str | None) -> list[Finding]:
    """All findings about limits that these rows allow."""
    findings = []
    for (mode, ranks), job in by_job(cells).items() if ours else ():
        prefix = f"{ranks} ranks" + (" TCP only" if mode == "tcp" else "")
        gated = {f"{c.op} {format_size(c.size)}": c for c in by_cell(job) if c.size <= GATED_BYTES}
        gloo = _only_measured({key: c.against(ours, "gloo") for key, c in gated.items()})
        mpi = _only_measured({key: c.against_mpi(ours) for key, c in gated.items()})
        if mode == "tcp":
            findings.append(_tcp_geomean(prefix, gloo))
            findings.append(at_most(f"{prefix}: worst cell, ours / gloo", gloo, GLOO_CELL_LIMIT))
            continue
        strict = ranks in (2, 4)
        mean = {f"{len(mpi)} cells": geomean(mpi.values())} if mpi else {}
        name = f"{prefix}: geometric mean, ours / (mpi + floor)"
        findings.append(at_most(name, mean, MPI_GEOMEAN_LIMIT if strict else None))
        name = f"{prefix}: worst cell, ours / (mpi + floor)"
        findings.append(at_most(name, mpi, MPI_CELL_LIMIT if strict else None))
        findings.append(at_most(f"{prefix}: worst cell, ours / gloo", gloo, GLOO_CELL_LIMIT))
        findings += _against_half(prefix, ours, ranks, gated)
        coalesced = [key for key in gated if "_coalesced" in key]
        one_by_one = {key: _coalesced_ratio(ours, key, gated) for key in coalesced}
        if any(one_by_one.values()):
            name = f"{prefix}: 8 tensors coalesced / one by one"
            findings.append(at_most(name, _only_measured(one_by_one), GLOO_CELL_LIMIT))
    return findings


def _only_measured(values: dict[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in values.items() if value is not None}


def _tcp_geomean(prefix: str, ours_to_gloo: dict[str, float]) -> Finding:
    name, limit = f"{prefix}: geometric mean, gloo / ours", f">= {TCP_GEOMEAN_LIMIT:g}"
    if not ours_to_gloo:
        return Finding(name, None, limit, None, "not measured")
    value = 1 / geomean(ours_to_gloo.values())
    return Finding(name, value, limit, value >= TCP_GEOMEAN_LIMIT, f"{len(ours_to_gloo)} cells")


def _against_half(prefix: str, ours: str, ranks: int, gated: dict[str, CellRows]) -> list[Finding]:
    half = f"{ours}/{ranks // 2}"
    ratios = {key: cell.against(ours, half) for key, cell in gated.items() if half in cell.rows}
    limit = EIGHT_RANKS_LIMIT if ranks == 8 else None
    return (
        [at_most(f"{prefix}: ours / ours on {ranks // 2} of them", _only_measured(ratios), limit)]
        if ratios
        else []
    )


def _coalesced_ratio(ours: str, key: str, gated: dict[str, CellRows]) -> float | None:
    each = gated.get(key.replace("_coalesced", "_8_calls"))
    mine, one_by_one = gated[key].us(ours), each.us(ours) if each else None
    return mine / one_by_one if mine and one_by_one else None


def show(findings: list[Finding], title: str = "summary (ratios of medians)") -> None:
    """Prints the findings as a table."""
    verdict = {True: "ok", False: "BROKEN", None: "-"}
    if findings:
        lines = [[f.name, short(f.value), f.limit, verdict[f.ok], f.detail] for f in findings]
        print_table(title, ["what", "value", "limit", "", "where"], lines)


def exit_code(cells: Rows, findings: list[Finding], gate: bool) -> int:
    """1 after a wrong result. With gate also 1 if a limit is broken, or if no limit could be
    judged."""
    if any(row["error"] for row in cells):
        return 1
    judged = [finding.ok for finding in findings if finding.ok is not None]
    return int(gate and not (judged and all(judged)))
