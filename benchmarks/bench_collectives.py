"""Collectives side by side, in the style of nccl-tests.

    python benchmarks/bench_collectives.py -b 1K -e 4M -f 4 --ranks 2,4 \\
        --backends mooncake-cpu,gloo,mpi \\
        --json out.json --plot out.png

All backends live in the same processes and take turns in every cell (see lanes.py), so the noise of
the machine hits them alike. operations.py defines the meaning of ``size`` for each operation;
docs/benchmarks.md has the method.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from typing import Any

import gates
import lanes
import operations
from common import (
    OthersWatch,
    format_size,
    machine_facts,
    names,
    numbers,
    parse_size,
    plot_panels,
    print_table,
    short,
    size_steps,
    spread,
    write_json_lines,
)
from ranks import Rank, mpi_missing, nccl_missing, run_job, run_jobs_in_turns, run_main

Rows = list[dict[str, Any]]


def rank_main(me: Rank) -> None:
    """Runs all cells on one rank, in the order of the sizes."""
    spec = me.spec
    gc.disable()
    device = spec["device"]
    if device == "cuda":
        import torch

        torch.cuda.set_device(me.rank % torch.cuda.device_count())
    extra = [spec["half"]] if spec["half"] else []
    alone = "turns" in spec
    with lanes.open_lanes(me, spec["backends"] + extra, alone) as ready:
        for size in spec["sizes"]:
            for op in spec["ops"]:
                asked = [
                    lane
                    for lane in ready
                    if "/" not in lane.name or [op, size] == spec["half_cell"]
                ]
                with me.turn():
                    cell = lanes.Cell(me, asked, op, size, device)
                    cell.check()
                cell.race(spec["rounds"], spec["turn_s"])
                with me.turn():
                    cell.check()  # again: after thousands of calls results must still be right
                    rows = cell.results()
                for row in rows:
                    values = row.pop("rounds_us")
                    numbers_us = spread(values) if values else {}
                    me.emit(
                        {
                            "kind": "cell",
                            "mode": spec["mode"],
                            "ranks": me.size,
                            **row,
                            **numbers_us,
                        }
                    )
                    row.update(numbers_us)
                shown = "  ".join(f"{row['backend']} {_cell_text(row)}" for row in rows)
                me.say(f"{me.size} ranks  {op} {format_size(size)}  us: {shown}")
                gc.collect()


def run(
    backends: list[str],
    ranks: int,
    *,
    sizes: list[int],
    ops: list[str],
    mode: str = "auto",
    rounds: int = 15,
    turn_s: float = 0.02,
    device: str = "cpu",
    ours: str | None = None,
    independent: bool = False,
    deadline_s: float = 1800.0,
) -> Rows:
    """Measures all cells for one number of ranks; returns rows of kind 'cell'.

    mode: 'auto', or 'tcp' (our transports: tcp only; OpenMPI's: self,tcp). With 8 ranks or more,
    the first all_reduce cell of ours also runs on a group of the first half of the ranks, for the
    ratio of 8 ranks to 4.
    independent: every backend has its own job, with its own processes and tensors; the jobs take
    turns. There is no ratio of 8 ranks to 4 then.
    """
    with_floor = backends + [lanes.FLOOR] * (lanes.FLOOR not in backends)
    half_cell = ["all_reduce", sizes[0]]
    half = f"{ours}/{ranks // 2}" if ours and ranks >= 8 and "all_reduce" in ops else None
    spec = {
        "backends": with_floor,
        "half": half,
        "half_cell": half_cell,
        "sizes": sizes,
        "ops": ops,
        "mode": mode,
        "rounds": rounds,
        "turn_s": turn_s,
        "device": device,
    }
    if independent:
        specs = [{**spec, "backends": [name], "half": None} for name in with_floor]
        return run_jobs_in_turns(
            "bench_collectives:rank_main",
            ranks,
            specs,
            mpi=[name == "mpi" for name in with_floor],
            tcp_only=mode == "tcp",
            deadline_s=deadline_s,
        )
    return run_job(
        "bench_collectives:rank_main",
        ranks,
        spec,
        mpi="mpi" in backends,
        tcp_only=mode == "tcp",
        deadline_s=deadline_s,
    )


def _cell_text(row: dict[str, Any]) -> str:
    """'p50/min/mean' in microseconds, or 'WRONG' or 'failed'."""
    if row["error"]:
        return "WRONG" if "wrong result" in row["error"] else "failed"
    return "/".join(short(row[field]) for field in ("p50_us", "min_us", "mean_us"))


def show(cells: Rows, ours: str | None) -> None:
    """Prints a table for each mode and number of ranks, then the failed cells."""
    for (mode, ranks), group in gates.by_job(cells).items():
        backends = list(dict.fromkeys(row["backend"] for row in group if "/" not in row["backend"]))
        headers = ["op", "size", *[f"{name} us" for name in backends]]
        headers += ["ours/(mpi+floor)", "ours/gloo"] if ours in backends else []
        lines = []
        for cell in gates.by_cell(group):
            line = [cell.op, format_size(cell.size)]
            line += [_cell_text(cell.rows[name]) if name in cell.rows else "-" for name in backends]
            if ours in backends:
                line += [short(cell.against_mpi(ours)), short(cell.against(ours, "gloo"))]
            lines.append(line)
        title = f"{ranks} ranks, {mode}: p50/min/mean over rounds, microseconds per call"
        print_table(title, headers, lines)
    for row in cells:
        if row["error"]:
            where = f"{row['ranks']} ranks {row['op']} {format_size(row['bytes'])} {row['backend']}"
            print(f"FAILED {where}: {row['error']}")


def plot(path: str | None, cells: Rows) -> None:
    """One row of panels per job, one panel per operation."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in cells:
        if "p50_us" in row and "/" not in row["backend"]:
            title = f"{row['op']}, {row['ranks']} ranks" + (
                ", TCP only" if row["mode"] == "tcp" else ""
            )
            panels.setdefault(title, {}).setdefault(row["backend"], []).append(
                (row["bytes"], row["p50_us"])
            )
    ops = len({row["op"] for row in cells})
    ordered = {
        row_title: panels[row_title]
        for row_title in sorted(panels, key=lambda t: t.split(", ")[1:])
    }
    plot_panels(
        path,
        ordered,
        ops,
        title="time per call, median over rounds",
        x="bytes per rank",
        y="microseconds",
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-b", "--begin", type=parse_size, default="1K", help="smallest size, e.g. 1K"
    )
    parser.add_argument(
        "-e",
        "--end",
        type=parse_size,
        default="4M",
        help="largest size; above 4M is information only",
    )
    parser.add_argument(
        "-f", "--factor", type=int, default=4, help="each size is this many times the one before"
    )
    parser.add_argument(
        "--ops", type=names, default=operations.CORE, help=", ".join(operations.OPERATIONS)
    )
    parser.add_argument(
        "--ranks", type=numbers, default=[2, 4], help="numbers of ranks, e.g. 2,4,8"
    )
    parser.add_argument(
        "--backends",
        type=names,
        default=["mooncake-cpu", "gloo", "mpi"],
        help="fake is always added",
    )
    parser.add_argument("--modes", type=names, default=["auto"], help="auto, tcp")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each backend in each cell")
    parser.add_argument("--turn-ms", type=float, default=20, help="length of a turn")
    parser.add_argument(
        "--independent", action="store_true", help="a job of its own for every backend"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--ours", help="the backend the limits are about (default: the first mooncake one)"
    )
    parser.add_argument(
        "--deadline", type=float, default=1800, help="seconds for one number of ranks"
    )
    parser.add_argument("--json", help="write JSON lines here")
    parser.add_argument("--plot", help="write a PNG here")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is broken")
    args = parser.parse_args(argv)
    unknown = set(args.ops) - set(operations.OPERATIONS) | set(args.modes) - {"auto", "tcp"}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    backends = args.backends
    missing = mpi_missing()
    if "mpi" in backends and (missing or args.device != "cpu"):
        print(f"without MPI: {missing or 'only on the CPU'}")
        backends = [name for name in backends if name != "mpi"]

    ours = args.ours or gates.find_ours(backends)
    start, watch, facts, cells = time.monotonic(), OthersWatch(), machine_facts(), []
    for mode in args.modes:
        for ranks in args.ranks:
            able = backends
            if "nccl" in backends and (why := nccl_missing(ranks)):
                print(f"without NCCL: {why}")
                able = [name for name in backends if name != "nccl"]
            cells += run(
                able,
                ranks,
                sizes=size_steps(args.begin, args.end, args.factor),
                ops=args.ops,
                mode=mode,
                rounds=args.rounds,
                turn_s=args.turn_ms / 1e3,
                device=args.device,
                ours=ours,
                independent=args.independent,
                deadline_s=args.deadline,
            )
    findings = gates.judge(cells, ours)
    show(cells, ours)
    gates.show(findings)
    plot(args.plot, cells)
    facts["cpu_share_of_others"] = watch.tell()
    write_json_lines(args.json, [facts, *cells, *[finding.as_row() for finding in findings]])
    print(f"{len(cells)} results in {time.monotonic() - start:.0f} s")
    return gates.exit_code(cells, findings, args.gate)


if __name__ == "__main__":
    sys.exit(run_main(main))
