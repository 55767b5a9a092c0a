"""Measures how long planned changes of a group hold up the ranks that stay.

    python benchmarks/bench_changes.py --ranks 4 --modes shm,tcp --times 30 --json o.json --gate

Ranks call all_reduce of 1 KiB in a loop. One of them takes itself out with deactivate_ranks, and
comes back with join_group; then one process with a new rank comes, or four at once. The lowest rank
lets them in with activate_ranks, in a thread beside the traffic. Each change is the longest time
between two results of a rank that stays, from before the change until all have had a result of the
ranks that are there then; `quiet` is the same of as long a time without a change.
docs/changing.md has the method.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from datetime import timedelta
from typing import Any

import gates
from bench_failure import MODES
from bench_rejoin import DEADLINE_S, FAILURE_TIMEOUT_S, SETTLE_S, Loop, Replaced
from common import (
    OthersWatch,
    Progress,
    machine_facts,
    names,
    numbers,
    percentile_text,
    percentiles,
    print_table,
    write_json_lines,
)
from fork_server import Crew, Member
from gates import Finding
from ranks import run_main

GAP_P99_MS = {"shm": 20.0, "tcp": 50.0}  # of each change, 4 ranks
GATED_RANKS = 4
TOGETHER_S = 0.05  # newcomers that get ready within this are let in by one change
GROWTH = (1, 4)
A_JOB = 3  # rounds of a job: each takes five new processes

Rows = list[dict[str, Any]]


# ---- in the ranks


class ChangingLoop(Loop):
    def __init__(self, me: Member, group: Any) -> None:
        super().__init__(me, me.rank)
        self.group = group

    def obey(self, word: str) -> None:
        from mooncake_backend import pg

        if word == "leave":
            pg.deactivate_ranks(self.group, [self.rank])

    def reduce_or_return(self) -> int:
        """An all_reduce. A rank that is out first waits until it is to come back."""
        from mooncake_backend import pg

        try:
            return self.reduce()
        except RuntimeError as error:
            if "rank is not active" not in str(error):
                raise
        self.me.link.send("out")
        self.me.link.recv()
        pg.join_group(self.group)
        self.last = time.monotonic()
        return self.reduce()


def admit_together(group: Any) -> None:
    """On the lowest rank, beside its traffic: lets in all that are ready, once no more come."""
    from mooncake_backend import pg

    before: list[int] = []
    since = time.monotonic()
    while True:
        active = pg.get_active_ranks(group).tolist()
        ready: list[int] = []
        if 1 in active and active.index(1) == group.rank():
            missing = [rank for rank, is_active in enumerate(active) if not is_active]
            ready = [rank for rank in missing if pg.get_peer_state(group, [rank]) == [True]]
        if ready != before:
            before, since = ready, time.monotonic()
        elif ready and time.monotonic() - since > TOGETHER_S:
            pg.activate_ranks(group, ready)
        time.sleep(0.002)


def rank_main(me: Member) -> None:
    """A member, or a process with a new rank, which waits until it is to come."""
    import torch
    import torch.distributed as dist

    from mooncake_backend import MooncakeBackendOptions, pg

    torch.set_num_threads(1)
    ranks, room = me.spec["ranks"], me.spec["room"]
    rank, is_new = me.rank, me.rank >= ranks
    if is_new:
        me.link.send("ready")
        rank = me.link.recv()
    dist.init_process_group(
        "mooncake-cpu",
        store=me.open_store(DEADLINE_S),
        rank=rank,
        world_size=room if is_new else ranks,
        timeout=timedelta(seconds=DEADLINE_S),
        pg_options=MooncakeBackendOptions(
            max_group_size=room, is_extension=is_new, failure_timeout=FAILURE_TIMEOUT_S
        ),
    )
    me.rank = rank
    if is_new:
        pg.join_group(dist.group.WORLD)
    loop = ChangingLoop(me, dist.group.WORLD)
    threading.Thread(target=admit_together, args=(dist.group.WORLD,), daemon=True).start()
    loop.run(loop.reduce_or_return)


# ---- one job


class Changed(Replaced):
    """A job whose ranks come and go by plan."""

    def members(self) -> list[int]:
        return list(range(self.ranks))

    def longest(self, ranks: list[int], contributors: int) -> float:
        return self.ask_until(ranks, contributors)["longest"] * 1e3

    def takes_out(self, rank: int) -> None:
        self.job.links[self.place[rank]].send("leave")
        for expected in (dict, str):
            said = self.job.hear([self.place[rank]], DEADLINE_S).get(self.place[rank])
            if not isinstance(said, expected):
                raise RuntimeError(f"rank {rank} does not leave: {said}")

    def quiet(self) -> float:
        self.ask(self.members())
        time.sleep(2 * SETTLE_S)
        return self.longest(self.members(), self.ranks)

    def removal_and_return(self, leaver: int) -> dict[str, float]:
        others = [rank for rank in self.members() if rank != leaver]
        self.ask(others)
        self.takes_out(leaver)
        found = {"removal": self.longest(others, self.ranks - 1)}
        time.sleep(SETTLE_S)
        self.ask(others)
        self.job.links[self.place[leaver]].send("back")
        found["return"] = self.longest(others, self.ranks)
        time.sleep(SETTLE_S)
        return found

    def growth(self, count: int) -> float:
        """New processes come, and are taken out again, the last one first."""
        new, self.spares = self.spares[:count], self.spares[count:]
        self.ask(self.members())
        for rank, process in enumerate(new, self.ranks):
            self.job.links[process].send(rank)
        longest = self.longest(self.members(), self.ranks + count)
        self.place += new
        if any(said != "ready" for said in self.job.hear(new, DEADLINE_S).values()):
            raise RuntimeError("a new process does not go on")
        for rank in reversed(range(self.ranks, self.ranks + count)):
            self.takes_out(rank)
            os.kill(self.job.pids[self.place[rank]], signal.SIGKILL)  # it holds its rank of the job
        del self.place[self.ranks :]
        self.ask_until(self.members(), self.ranks)
        time.sleep(SETTLE_S)
        return longest


def one_job(crew: Crew, mode: str, ranks: int, rounds: int, rng: random.Random) -> Rows:
    """One row for each change."""
    spec = {"ranks": ranks, "room": ranks + max(GROWTH), "experts": False}
    base = {"kind": "change", "mode": mode, "ranks": ranks, "error": None}
    rows: Rows = []
    processes = ranks + rounds * sum(GROWTH)
    with crew.job("bench_changes:rank_main", processes, spec, MODES[mode]) as job:
        run = Changed(job, ranks, mode, False, rng)
        if wrong := job.await_ready(DEADLINE_S):
            return [{**base, "error": wrong}]
        try:
            for _ in range(rounds):
                found = {"quiet": run.quiet()}
                found |= run.removal_and_return(rng.randrange(ranks))
                found |= {f"growth by {count}": run.growth(count) for count in GROWTH}
                rows += [{**base, "change": name, "ms": ms} for name, ms in found.items()]
        except (RuntimeError, OSError) as error:
            words = "; ".join(job.log(place)[-300:] for place in run.place)
            rows.append({**base, "error": f"{error}: {words}"})
    return rows


def run(modes: list[str], sizes: list[int], times: int, seed: int = 1) -> Rows:
    rng = random.Random(seed)
    cells = [(mode, ranks) for ranks in sizes for mode in modes]
    jobs = [(*cell, min(A_JOB, times - done)) for done in range(0, times, A_JOB) for cell in cells]
    progress, rows = Progress(len(jobs)), []
    with Crew(["bench_changes"]) as crew:
        for mode, ranks, rounds in jobs:
            rows += one_job(crew, mode, ranks, rounds, rng)
            if rows[-1]["error"]:
                progress.say(f"FAILED {ranks} ranks {mode}: {rows[-1]['error']}")
            progress.step(f"{ranks} ranks, {mode}")
    return rows


# ---- results


def summarize(rows: Rows) -> Rows:
    """By mode, ranks and change."""
    cells = defaultdict(list)
    for row in rows:
        cells[row["mode"], row["ranks"], row.get("change", "")].append(row)
    summaries = []
    for (mode, ranks, change), some in cells.items():
        timed = [row["ms"] for row in some if not row["error"]]
        wrong = [row["error"] for row in some if row["error"]]
        summaries.append(
            {"kind": "change_cell", "mode": mode, "ranks": ranks, "change": change,
             "times": len(timed), "error": wrong[0] if wrong else None,
             **percentiles("gap", timed)}
        )  # fmt: skip
    return summaries


def judge(summaries: Rows) -> list[Finding]:
    """Limits hold for 4 ranks; other sizes are reported."""
    return [
        gates.at_most(
            f"{row['ranks']} ranks {row['mode']}: {row['change']}, p99, ms",
            {f"{row['times']} times": row["gap_p99_ms"]} if row["times"] else {},
            GAP_P99_MS[row["mode"]] if row["ranks"] == GATED_RANKS else None,
        )
        for row in summaries
        if row["change"] != "quiet"
    ]


def show(summaries: Rows) -> None:
    lines = [
        [f"{row['ranks']} ranks {row['mode']}, {row['change']}", str(row["times"]),
         percentile_text(row, "gap")]
        for row in summaries
    ]  # fmt: skip
    print_table("the longest wait of a rank that stays, p50/p90/p99/max, ms",
                ["change", "times", "wait"], lines)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=numbers, default=[4])
    parser.add_argument("--modes", type=names, default=list(MODES), help="shm, tcp")
    parser.add_argument("--times", type=int, default=30, help="changes of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of the ranks that leave")
    parser.add_argument("--json", help="write JSON lines here")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is broken")
    args = parser.parse_args(argv)
    if min(args.ranks, default=0) < 2 or args.times < 1:
        parser.error("a change needs 2 ranks or more")
    facts, watch = machine_facts(), OthersWatch()
    rows = run(args.modes, args.ranks, args.times, args.seed)
    summaries = summarize(rows)
    findings = judge(summaries)
    show(summaries)
    gates.show(findings, "summary")
    facts["cpu_share_of_others"] = watch.tell()
    write_json_lines(args.json, [facts, *summaries, *rows, *[one.as_row() for one in findings]])
    return gates.exit_code(summaries, findings, args.gate)


if __name__ == "__main__":
    sys.exit(run_main(main))
