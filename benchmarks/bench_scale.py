"""Counts the messages with which the ranks of a job leave it (scale_bench.cc), and prints the time.

    python benchmarks/bench_scale.py --build build/cpp-none --ranks 64,128 --wires tcp,shm --gate

`--build` is a build folder of csrc with MOONCAKE_BUILD_BENCHMARKS. The limits count messages: times
depend on the cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import names, numbers, print_table
from gates import Finding
from ranks import run_main

MOST_MESSAGES = 64  # that a rank sends as it leaves, on average; beside its farewell to each peer
DEADLINE_S = 180


def leave(
    build: Path, ranks: int, wire: str, how: str, late_ms: int = 0, victim: int = -1
) -> dict[str, Any]:
    command = [str(build / "scale_bench"), str(ranks), wire, how, str(late_ms), str(victim)]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S
    )
    return json.loads(done.stdout)


def judge(row: dict[str, Any]) -> list[Finding]:
    detail = f"{row['ranks']} ranks, {row['wire']}, {row['how']}"
    wrong = row["accused"] + row["outvoted"]
    limit = MOST_MESSAGES + (row["ranks"] - 1 if row["how"] == "end" else 0)
    return [
        Finding("messages a rank", row["sent"], f"<= {limit}", row["sent"] <= limit, detail),
        Finding("wrong accusations", wrong, "0", wrong == 0, detail),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--ranks", type=numbers, default=[64, 128])
    parser.add_argument("--wires", type=names, default=["tcp", "shm"])
    parser.add_argument("--gate", action="store_true")
    options = parser.parse_args()
    rows = [
        leave(options.build, ranks, wire, how)
        for ranks in options.ranks
        for wire in options.wires
        for how in ("destroy", "end")
    ]
    columns = ["ranks", "wire", "how", "sent", "most", "bytes", "seconds"]
    print_table(
        "leaving a job", columns, [[str(row[column]) for column in columns] for row in rows]
    )
    broken = [finding for row in rows for finding in judge(row) if not finding.ok]
    for finding in broken:
        print(f"{finding.name} = {finding.value}, limit {finding.limit} ({finding.detail})")
    return 1 if options.gate and broken else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
