"""Time of a DDP training step, backends interleaved in the same processes.

    python benchmarks/bench_ddp.py --ranks 4 --backends mooncake-cpu,gloo --json out.json

Each backend trains its own copy of one model (25 M float32 parameters: 100 MB of gradients per
step) on the same data. The models must agree in the end, over ranks exactly and over backends up to
rounding.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import gates
from common import machine_facts, names, print_table, short, spread, write_json_lines
from gates import Finding
from ranks import Rank, is_registered, run_job, run_main

WIDTH = 1024  # a layer has WIDTH x WIDTH weights and WIDTH biases: about 1.05 M parameters
BATCH = 4  # samples per rank; small, so that gradients matter more than arithmetic

Rows = list[dict[str, Any]]


def rank_main(me: Rank) -> None:
    """Rounds of one step per backend; one row per backend, milliseconds, slowest rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
            for _ in range(me.spec["layers"])
        ]
        return torch.nn.Sequential(*layers)

    dist.init_process_group("gloo", store=me.open_store(), rank=me.rank, world_size=me.size)
    models, optimizers, took_ms = {}, {}, {name: [] for name in me.spec["backends"]}
    for name in me.spec["backends"]:
        if not is_registered(name):
            raise RuntimeError(
                f"torch.distributed does not know the backend {name!r}: is its package installed?"
            )
        group = dist.new_group(list(range(me.size)), backend=name)
        models[name] = DistributedDataParallel(build(), process_group=group)
        optimizers[name] = torch.optim.SGD(models[name].parameters(), lr=0.01)
    torch.manual_seed(me.rank + 1)
    data = torch.randn(BATCH, WIDTH)

    def step(name: str) -> float:
        me.meeting.barrier()
        start = time.perf_counter()
        optimizers[name].zero_grad()
        models[name](data).square().mean().backward()
        optimizers[name].step()
        return (time.perf_counter() - start) * 1e3

    for number in range(
        me.spec["rounds"] + 2
    ):  # DDP rebuilds its buckets in the first steps: those do not count
        for name in me.spec["backends"][:: 1 if number % 2 else -1]:
            slowest_ms = max(me.meeting.exchange(step(name)))
            if number >= 2:
                took_ms[name].append(slowest_ms)
    parameters = {
        name: torch.cat([p.detach().flatten() for p in models[name].parameters()])
        for name in models
    }
    reference = next(iter(parameters.values()))
    for name, values in parameters.items():
        # Folds all bytes of the parameters into one number: equal only if all bits are.
        folded = int((values.view(torch.int32).long() * torch.arange(1, values.numel() + 1)).sum())
        same_bits = len(set(me.meeting.exchange(folded))) == 1
        close = all(me.meeting.exchange(torch.allclose(values, reference, rtol=1e-4, atol=1e-6)))
        error = (
            None
            if same_bits and close
            else "wrong result: the ranks' models differ"
            if close
            else "wrong result"
        )
        row = {
            "kind": "ddp",
            "ranks": me.size,
            "backend": name,
            "parameters": values.numel(),
            "error": error,
        }
        me.emit({**row, **spread(took_ms[name], unit="ms")})
    me.meeting.barrier()
    models.clear()
    optimizers.clear()
    dist.destroy_process_group()


def run(backends: list[str], ranks: int, rounds: int, layers: int = 24) -> Rows:
    """Rows of kind 'ddp'. layers: 24 are 25 M parameters."""
    return run_job(
        "bench_ddp:rank_main", ranks, {"backends": backends, "rounds": rounds, "layers": layers}
    )


def judge(rows: Rows, ours: str | None) -> list[Finding]:
    """Judges the time of our step against Gloo's."""
    times = {row["backend"]: row["p50_ms"] for row in rows}
    if ours not in times or "gloo" not in times:
        return []
    return [gates.at_most("DDP step: ours / gloo", {"step": times[ours] / times["gloo"]}, 1.0)]


def show(rows: Rows) -> None:
    """One line per backend."""
    fields = ("p50_ms", "min_ms", "mean_ms")
    lines = [
        [row["backend"], *[short(row[field]) for field in fields], row["error"] or "ok"]
        for row in rows
    ]
    millions = rows[0]["parameters"] / 1e6
    title = f"DDP step, {rows[0]['ranks']} ranks, {millions:.1f} M parameters, ms, slowest rank"
    print_table(title, ["backend", "p50", "min", "mean", "models"], lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--backends", type=names, default=["mooncake-cpu", "gloo"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=24, help="24 are 25 M parameters")
    parser.add_argument(
        "--ours", help="the backend the limit is about (default: the first mooncake one)"
    )
    parser.add_argument("--json", help="write JSON lines here")
    parser.add_argument("--gate", action="store_true", help="exit 1 if the limit is broken")
    args = parser.parse_args(argv)
    rows = run(args.backends, args.ranks, args.rounds, args.layers)
    findings = judge(rows, args.ours or gates.find_ours(args.backends))
    show(rows)
    gates.show(findings, "summary")
    write_json_lines(
        args.json, [machine_facts(), *rows, *[finding.as_row() for finding in findings]]
    )
    return gates.exit_code(rows, findings, args.gate)


if __name__ == "__main__":
    sys.exit(run_main(main))
