"""Times the forms of collectives by kernels, and writes the table of the fastest ones, which
MOONCAKE_PEER_TABLE then names.

    python benchmarks/bench_peer_table.py --device cuda --ranks 2,4,8 --write peers.txt

A form is a number of blocks and, for all_reduce of three ranks and more, of exchanges. Each has a
group of its own, and they take turns. Without a GPU it runs on the tests' device
(tests/fake_device): its times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench_device import open_device
from common import (
    format_size,
    machine_facts,
    names,
    numbers,
    parse_size,
    print_table,
    short,
    size_steps,
    write_json_lines,
)
from ranks import COLLECTIVE_TIMEOUT_S, Rank, run_job, run_main

VERBS = ["all_reduce", "reduce_scatter", "all_gather"]
BLOCKS = [1, 2, 4, 8]
WORTH = 0.95  # a form replaces that of the smaller sizes if it takes at most so much of its time

Rows = list[dict[str, Any]]
Form = tuple[int, int]  # exchanges, blocks


def forms_of(verb: str, ranks: int) -> list[Form]:
    exchanges = [1, 2] if verb == "all_reduce" and ranks > 2 else [1]
    return [(number, blocks) for number in exchanges for blocks in BLOCKS]


def _group(me: Rank, verb: str, form: Form) -> Any:
    """A group with a table of this form alone."""
    import torch.distributed as dist

    path = Path(me.spec["folder"]) / f"rank{me.rank}.txt"
    path.write_text(f"{verb} {me.size} 0 {form[0]} {form[1]}\n")
    os.environ["MOONCAKE_PEER_TABLE"] = str(path)
    return dist.new_group()


def _call(me: Rank, verb: str, size: int, device: Any) -> Callable[[Any], None]:
    """Calls the verb in a group. The input of a rank has so many bytes."""
    import torch
    import torch.distributed as dist

    count = max(1, size // 4 // me.size) * me.size
    mine = torch.zeros(count, device=device)
    if verb == "all_reduce":
        return lambda group: dist.all_reduce(mine, group=group)
    if verb == "reduce_scatter":
        part = torch.zeros(count // me.size, device=device)
        return lambda group: dist.reduce_scatter_tensor(part, mine, group=group)
    all_parts = torch.zeros(count * me.size, device=device)
    return lambda group: dist.all_gather_into_tensor(all_parts, mine, group=group)


def _time(me: Rank, call: Callable[[Any], None], group: Any, calls: int) -> float:
    """Microseconds of a call on the slowest rank: many follow each other on the device."""
    import torch

    me.meeting.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call(group)
    torch.accelerator.synchronize()
    took = (time.perf_counter() - start) / calls * 1e6
    return float(max(me.meeting.exchange(took)))


def rank_main(me: Rank) -> None:
    import torch
    import torch.distributed as dist

    spec = me.spec
    gc.disable()
    os.environ["MOONCAKE_PEER_BYTES"] = str(max(spec["sizes"]))
    device = open_device(spec["device"], me.rank)
    dist.init_process_group(
        f"cpu:mooncake,{spec['device']}:mooncake",
        store=me.open_store(),
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    for verb in spec["verbs"]:
        groups = {form: _group(me, verb, form) for form in forms_of(verb, me.size)}
        for size in spec["sizes"]:
            call = _call(me, verb, size, device)
            took: dict[Form, list[float]] = {form: [] for form in groups}
            for round in range(spec["rounds"] + 1):
                for form in list(groups)[:: 1 if round % 2 else -1]:
                    us = _time(me, call, groups[form], spec["calls"])
                    if round:  # the first one shares memory
                        took[form].append(us)
            for form, times in took.items():
                me.emit(
                    {
                        "kind": "peer_table",
                        "device": spec["device"],
                        "ranks": me.size,
                        "verb": verb,
                        "size": size,
                        "exchanges": form[0],
                        "blocks": form[1],
                        "us": statistics.median(times),
                    }
                )
            best = min(took, key=lambda form: statistics.median(took[form]))
            chosen = f"{best[0]} exchanges, {best[1]} blocks"
            me.say(f"{me.size} ranks  {verb}  {format_size(size)}  {chosen}")
        for group in groups.values():
            dist.destroy_process_group(group)
        torch.accelerator.synchronize()
    dist.destroy_process_group()


def best_lines(rows: Rows) -> list[str]:
    """The lines of the table: a new one wherever another form is clearly faster."""
    lines = []
    for verb, ranks in sorted({(row["verb"], row["ranks"]) for row in rows}):
        current: Form | None = None
        mine = [row for row in rows if (row["verb"], row["ranks"]) == (verb, ranks)]
        for size in sorted({row["size"] for row in mine}):
            times = {
                (row["exchanges"], row["blocks"]): row["us"] for row in mine if row["size"] == size
            }
            best = min(times, key=times.__getitem__)
            if current is None or times[best] <= WORTH * times[current]:
                begin = 0 if current is None else size
                if best != current:
                    lines.append(f"{verb} {ranks} {begin} {best[0]} {best[1]}")
                current = best
    return lines


def show(rows: Rows) -> None:
    table: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        key = (row["ranks"], row["verb"], row["size"])
        cell = f"{row['exchanges']}x{row['blocks']} {short(row['us'])}"
        table.setdefault(key, []).append(cell)
    print_table(
        "us of a call, by exchanges x blocks",
        ["ranks", "verb", "size", "forms"],
        [
            [str(ranks), verb, format_size(size), "  ".join(cells)]
            for (ranks, verb, size), cells in table.items()
        ],
    )


def run(
    ranks: int,
    sizes: list[int],
    *,
    device: str = "fake",
    verbs: list[str] = VERBS,
    rounds: int = 5,
    calls: int = 20,
) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        spec = {
            "sizes": sizes,
            "device": device,
            "verbs": verbs,
            "rounds": rounds,
            "calls": calls,
            "folder": folder,
        }
        return run_job("bench_peer_table:rank_main", ranks, spec)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-b", "--begin", type=parse_size, default=parse_size("1K"))
    parser.add_argument("-e", "--end", type=parse_size, default=parse_size("64K"))
    parser.add_argument("-f", "--factor", type=int, default=4)
    parser.add_argument("--ranks", type=numbers, default=[2])
    parser.add_argument("--verbs", type=names, default=VERBS, help=", ".join(VERBS))
    parser.add_argument("--device", default="fake", help="fake (tests/fake_device), or cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20, help="in a row, for one time")
    parser.add_argument("--write", help="writes the table to this file")
    parser.add_argument("--json", help="also writes the rows to this file")
    args = parser.parse_args()
    rows: Rows = []
    for ranks in args.ranks:
        rows += run(
            ranks,
            size_steps(args.begin, args.end, args.factor),
            device=args.device,
            verbs=args.verbs,
            rounds=args.rounds,
            calls=args.calls,
        )
    show(rows)
    lines = best_lines(rows)
    print("\n".join(lines))
    if args.write:
        head = "# VERB RANKS BYTES EXCHANGES BLOCKS, by benchmarks/bench_peer_table.py"
        Path(args.write).write_text("\n".join([head, *lines, ""]))
    write_json_lines(args.json, [machine_facts(), *rows])
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
