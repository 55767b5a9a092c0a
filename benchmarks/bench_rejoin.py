"""Measures what a new process in the place of a lost rank costs the others, and how soon it is in.

    python benchmarks/bench_rejoin.py --ranks 4,8,16 --modes shm,tcp --times 50 --json o.json --gate

Ranks call all_reduce in a loop. One of them is killed; once the others go on, a spare process that
has imported everything calls init_process_group in its place, and joins. A thread of the lowest
rank calls activate_ranks beside the traffic. In every second replacement the newcomer is hit before
it is in, by SIGKILL or SIGSTOP at a random moment (`--hit`), and another one comes after it. Ranks
with a Buffer call dispatch and combine instead, and let newcomers in between two calls.
docs/replacing.md has the method.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import gates
from bench_failure import MODES
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
from fork_server import WARM_UP, Crew, Job, Member
from gates import Finding
from ranks import run_main

GAP_P99_MS = {"shm": 20.0, "tcp": 50.0}  # of a replacement, 4 ranks
HIT_GAP_MS = 100.0  # while a newcomer is killed or stopped before it is in, each of them
FIRST_MS = 300.0  # from init_process_group to the first common all_reduce, 4 ranks, p99
DISPATCH_MS = 60.0  # that begins with a newcomer, 4 ranks, p99
GATED_RANKS = 4

SPARES = 12  # of a job
SETTLE_S = 0.1  # between two steps of a replacement
WATCHED_S = 0.5  # after a hit, beside failure_timeout for a stopped newcomer
FAILURE_TIMEOUT_S = 1.0
DEADLINE_S = 60.0
HITS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
# Experts: a small model's, so that the time is that of the change.
TOKENS, HIDDEN, EXPERTS_OF_A_RANK = 8, 256, 2

Rows = list[dict[str, Any]]


# ---- in the ranks


class Loop:
    """Traffic of one rank. Answers the questions that come over the link between two calls."""

    def __init__(self, me: Member, rank: int) -> None:
        import torch.distributed as dist

        from mooncake_backend.group import backend_of

        self.me, self.rank = me, rank
        self.size = me.spec["ranks"]
        self.backend = backend_of(dist.group.WORLD)
        self.last = time.monotonic()
        self.longest = 0.0  # between two results, since the last question
        self.gap: float | None = None  # between the last result without all ranks and the next one
        self.contributors = 0
        self.buffer: Any = None
        self.dispatch: float | None = None  # the first one since the last change of members

    def run(self, call: Any) -> None:
        done = 0
        while True:
            contributors = call()
            now = time.monotonic()
            elapsed, self.last = now - self.last, now
            self.longest = max(self.longest, elapsed)
            if 0 < self.contributors < contributors:
                self.gap = elapsed
            self.contributors = contributors
            done += 1
            if done == WARM_UP:
                self.me.link.send("ready")
            while self.me.link.poll():
                self.obey(self.me.link.recv())
                self.me.link.send(
                    {
                        "longest": self.longest,
                        "gap": self.gap,
                        "dispatch": self.dispatch,
                        "contributors": contributors,
                        "series": self.backend.series,
                    }
                )
                self.longest, self.gap, self.last = 0.0, None, time.monotonic()

    def obey(self, word: str) -> None:
        """A question is all that a rank is told here."""

    def reduce(self) -> int:
        """An all_reduce. Returns how many ranks are in the result."""
        import torch
        import torch.distributed as dist

        tensor = torch.ones(256)
        dist.all_reduce(tensor)
        value = int(tensor[0].item())
        assert (tensor == value).all(), tensor
        return value

    def experts(self) -> int:
        """A dispatch and its combine, and the place where newcomers come."""
        import torch
        import torch.distributed as dist

        from mooncake import mooncake_ep_buffer
        from mooncake_backend import replacing

        experts = EXPERTS_OF_A_RANK * self.size
        began = time.monotonic()
        if self.buffer is None:
            size = mooncake_ep_buffer.Buffer.get_ep_buffer_size_hint(
                TOKENS, HIDDEN, self.size, experts
            )
            self.buffer = mooncake_ep_buffer.Buffer(dist.group.WORLD, size, on_failure="continue")
        x = torch.full((TOKENS, HIDDEN), float(self.rank)).bfloat16()
        chosen = (torch.arange(TOKENS * 2).view(TOKENS, 2) * EXPERTS_OF_A_RANK) % experts
        active = torch.ones(self.size, dtype=torch.int32)
        rows, _, handle, _, _ = self.buffer.dispatch(
            x, chosen, active, TOKENS, experts, -1, use_fp8=False
        )
        elapsed = time.monotonic() - began
        if self.dispatch is None:
            self.dispatch = elapsed
        weights = torch.full((TOKENS, 2), 0.5)
        combined = self.buffer.combine(rows, chosen, weights, active, -1, handle)[0]
        there = active.bool()
        parts = there[chosen // EXPERTS_OF_A_RANK].sum(1, keepdim=True)
        assert torch.equal(combined, (x.float() * parts * 0.5).bfloat16()), active
        if replacing.admit(dist.group.WORLD):
            self.buffer.update_ep_member()
            self.dispatch = None
        return int(there.sum())


def admit_beside(group: Any) -> None:
    """Lets newcomers in as soon as they are ready, on the lowest rank, while that computes."""
    from mooncake_backend import pg

    while True:
        active = pg.get_active_ranks(group).tolist()
        rank = group.rank()
        if active.index(1) == rank:
            lost = [r for r, is_active in enumerate(active) if not is_active]
            ready = [r for r in lost if pg.get_peer_state(group, [r]) == [True]]
            if ready:
                pg.activate_ranks(group, ready)
        time.sleep(0.002)


def rank_main(me: Member) -> None:
    """A member, or a spare that waits until it is told in place of which rank it comes."""
    import torch
    import torch.distributed as dist

    from mooncake_backend import MooncakeBackendOptions, pg

    torch.set_num_threads(1)
    spec, rank = me.spec, me.rank
    is_newcomer = rank >= spec["ranks"]
    if spec["experts"]:
        from mooncake import mooncake_ep_buffer  # noqa: F401  its import is not measured
    if is_newcomer:
        me.link.send("ready")
        rank = me.link.recv()
        os.environ["MOONCAKE_REJOIN"] = "1"
    store = me.open_store(DEADLINE_S)
    began = time.monotonic()
    dist.init_process_group(
        "mooncake-cpu",
        store=store,
        rank=rank,
        world_size=spec["ranks"],
        timeout=timedelta(seconds=DEADLINE_S),
        pg_options=MooncakeBackendOptions(failure_timeout=spec["failure_timeout_s"]),
    )
    group = dist.group.WORLD
    made = time.monotonic()
    loop = Loop(me, rank)
    if is_newcomer:
        pg.join_group(group)
        joined = time.monotonic()
        if spec["experts"]:
            loop.experts()
        else:
            assert loop.reduce() == spec["ranks"]
        first = time.monotonic()
        me.link.send({"init": made - began, "joined": joined - began, "first": first - began})
    if not spec["experts"]:
        threading.Thread(target=admit_beside, args=(group,), daemon=True).start()
    loop.run(loop.experts if spec["experts"] else loop.reduce)


# ---- one job


def watched_s(how: str) -> float:
    """How long the survivors are watched after a newcomer was hit."""
    return WATCHED_S + (2 * FAILURE_TIMEOUT_S if how == "stop" else 0)


class Replaced:
    """A job whose ranks are replaced one after the other."""

    def __init__(self, job: Job, ranks: int, mode: str, experts: bool, rng: random.Random) -> None:
        self.job, self.ranks, self.rng = job, ranks, rng
        self.place = list(range(ranks))  # by rank: the process that holds it
        self.spares = list(range(ranks, len(job.pids)))
        self.row = {"kind": "rejoin", "mode": mode, "ranks": ranks, "experts": experts}
        self.typical_s = 0.1  # from a newcomer's begin to its first all_reduce

    def ask(self, ranks: list[int]) -> list[dict[str, Any]]:
        """What these ranks have seen since the last question."""
        for rank in ranks:
            self.job.links[self.place[rank]].send("tell")
        places = [self.place[rank] for rank in ranks]
        told = self.job.hear(places, DEADLINE_S)
        bad = [place for place in places if "longest" not in told.get(place, {})]
        if bad:
            raise RuntimeError(self.job.words(places, told, "nothing was told"))
        return [told[place] for place in places]

    def ask_until(self, ranks: list[int], contributors: int) -> dict[str, float]:
        """Asks until all of these ranks have seen a result of so many ranks. Returns the longest
        intervals of all that was told, in seconds."""
        end, worst = time.monotonic() + DEADLINE_S, {"longest": 0.0, "gap": 0.0, "dispatch": 0.0}
        while True:
            told = self.ask(ranks)
            for name in worst:
                worst[name] = max([worst[name], *[one[name] or 0.0 for one in told]])
            if all(one["contributors"] == contributors for one in told):
                return worst
            if time.monotonic() > end:
                raise RuntimeError(f"not {contributors} ranks in time: {told}")

    def kill(self, victim: int, quiet_s: float) -> list[int]:
        """Returns the survivors, which go on. Notes their longest wait in `quiet_s` afterwards."""
        os.kill(self.job.pids[self.place[victim]], signal.SIGKILL)
        survivors = [rank for rank in range(self.ranks) if rank != victim]
        self.ask_until(survivors, self.ranks - 1)
        time.sleep(SETTLE_S)
        self.ask(survivors)
        time.sleep(quiet_s)
        quiet = max(one["longest"] for one in self.ask(survivors))
        self.row["quiet_ms"] = quiet * 1e3
        return survivors

    def begin(self, victim: int) -> int:
        spare = self.spares.pop(0)
        self.job.links[spare].send(victim)
        return spare

    def replace(self, victim: int, survivors: list[int]) -> dict[str, Any]:
        spare = self.begin(victim)
        said = self.job.hear([spare], DEADLINE_S).get(spare, {})
        if "first" not in said:
            raise RuntimeError(self.job.words([spare], {spare: said}, "the newcomer is not in"))
        self.typical_s = said["first"]
        worst = self.ask_until(survivors, self.ranks)
        self.place[victim] = spare
        if self.job.hear([spare], DEADLINE_S).get(spare) != "ready":
            raise RuntimeError("the newcomer does not go on")
        return {
            **{f"{name}_ms": said[name] * 1e3 for name in ("init", "joined", "first")},
            "gap_ms": worst["gap"] * 1e3,
            "longest_ms": worst["longest"] * 1e3,
            "dispatch_ms": worst["dispatch"] * 1e3 if self.row["experts"] else None,
        }

    def hit(self, victim: int, survivors: list[int], how: str) -> dict[str, Any]:
        """A newcomer that is killed or stopped, and the survivors' longest wait. "late": the close
        came before."""
        before = self.ask(survivors)[0]["series"]
        spare = self.begin(victim)
        after = self.rng.uniform(0, self.typical_s)
        time.sleep(after)
        os.kill(self.job.pids[spare], HITS[how])
        time.sleep(watched_s(how))
        told = self.ask(survivors)
        os.kill(self.job.pids[spare], signal.SIGKILL)
        self.ask_until(survivors, self.ranks - 1)
        is_late = any(one["series"] != before for one in told)
        longest = max(one["longest"] for one in told)
        return {
            "outcome": "late" if is_late else "in time",
            "after_ms": after * 1e3,
            "longest_ms": longest * 1e3,
        }


@dataclass(frozen=True)
class Cell:
    mode: str
    ranks: int
    experts: bool = False
    hit: str | None = None

    @property
    def name(self) -> str:
        parts = [f"{self.ranks} ranks", self.mode]
        if self.experts:
            parts.append("EP")
        return " ".join(parts) + (f", newcomer hit by {self.hit}" if self.hit else "")


def one_job(crew: Crew, cell: Cell, times: int, rng: random.Random) -> Rows:
    """Rows of kind 'rejoin', one for each replacement, and one for each hit before it."""
    each = 2 if cell.hit else 1
    spec = {
        "ranks": cell.ranks,
        "experts": cell.experts,
        "failure_timeout_s": FAILURE_TIMEOUT_S,
    }
    processes = cell.ranks + times * each
    rows: Rows = []
    with crew.job("bench_rejoin:rank_main", processes, spec, MODES[cell.mode]) as job:
        run = Replaced(job, cell.ranks, cell.mode, cell.experts, rng)
        base = {**run.row, "hit": cell.hit, "error": None}
        if wrong := job.await_ready(DEADLINE_S):
            return [{**base, "error": wrong}]
        try:
            for _ in range(times):
                victim = rng.randrange(cell.ranks)
                survivors = run.kill(victim, watched_s(cell.hit) if cell.hit else SETTLE_S)
                base |= {"victim": victim, "quiet_ms": run.row["quiet_ms"]}
                if cell.hit:
                    rows.append({**base, **run.hit(victim, survivors, cell.hit)})
                replaced = run.replace(victim, survivors)
                rows.append({**base, "hit": None, "outcome": "replaced", **replaced})
        except (RuntimeError, OSError) as error:
            words = "; ".join(job.log(place)[-300:] for place in run.place)
            rows.append({**base, "error": f"{error}: {words}"})
    return rows


def run(cells: list[Cell], times: int, seed: int = 1) -> dict[Cell, Rows]:
    rng, found = random.Random(seed), {cell: [] for cell in cells}
    jobs = [
        (cell, min(SPARES // 2, times - done))
        for done in range(0, times, SPARES // 2)
        for cell in cells
    ]
    progress = Progress(len(jobs))
    with Crew(["bench_rejoin"]) as crew:
        for cell, count in jobs:
            rows = one_job(crew, cell, count, rng)
            found[cell] += rows
            for row in rows:
                if row["error"]:
                    progress.say(f"FAILED {cell.name}: {row['error']}")
            progress.step(cell.name)
    return found


# ---- results

FIELDS = ("quiet", "gap", "longest", "init", "first", "dispatch")


def summarize(cell: Cell, rows: Rows) -> dict[str, Any]:
    if cell.hit:
        timed = [row for row in rows if row["hit"] and row.get("outcome") == "in time"]
    else:
        timed = [row for row in rows if row.get("outcome") == "replaced"]
    wrong = [row["error"] for row in rows if row["error"]]
    summary = {
        "kind": "rejoin_cell", "mode": cell.mode, "ranks": cell.ranks, "experts": cell.experts,
        "hit": cell.hit, "times": len(timed),
        "late": sum(row.get("outcome") == "late" for row in rows),
        "error": f"{len(wrong)} of {len(rows)}: {wrong[0]}" if wrong else None,
    }  # fmt: skip
    for name in FIELDS:
        values = [row[f"{name}_ms"] for row in timed if row.get(f"{name}_ms") is not None]
        summary |= percentiles(name, values)
    return summary


def judge(summaries: Rows) -> list[Finding]:
    """Limits hold for 4 ranks; other sizes are reported."""
    findings = []
    for row in summaries:
        where = f"{row['ranks']} ranks {row['mode']}"
        gated = row["ranks"] == GATED_RANKS

        def limit(name: str, field: str, most: float, row=row, where=where, gated=gated) -> None:
            value = row[field]
            values = {} if value is None else {f"{row['times']} times": value}
            findings.append(gates.at_most(f"{where}: {name}", values, most if gated else None))

        if row["hit"]:
            limit(f"longest wait, newcomer hit by {row['hit']}", "longest_max_ms", HIT_GAP_MS)
        elif row["experts"]:
            limit("dispatch that begins with a newcomer, p99, ms", "dispatch_p99_ms", DISPATCH_MS)
        else:
            limit("survivors' gap, p99, ms", "gap_p99_ms", GAP_P99_MS[row["mode"]])
            limit("newcomer's first all_reduce, p99, ms", "first_p99_ms", FIRST_MS)
    return findings


def show(summaries: Rows) -> None:
    lines = [
        [
            Cell(row["mode"], row["ranks"], row["experts"], row["hit"]).name,
            f"{row['times']}" + (f" + {row['late']} late" if row["late"] else ""),
            *[percentile_text(row, name) for name in FIELDS],
        ]
        for row in summaries
    ]
    headers = ["cell", "times", "quiet", "gap", "longest", "init", "first", "dispatch"]
    print_table("a newcomer, p50/p90/p99/max, ms", headers, lines)
    for row in summaries:
        if row["error"]:
            name = Cell(row["mode"], row["ranks"], row["experts"], row["hit"]).name
            print(f"FAILED {name}: {row['error']}")


def cells_of(ranks: list[int], modes: list[str], hits: list[str], experts: bool) -> list[Cell]:
    """Hits and experts with the smallest number of ranks."""
    cells = [Cell(mode, count) for count in ranks for mode in modes]
    cells += [Cell(mode, min(ranks), hit=hit) for hit in hits for mode in modes]
    return cells + [Cell(mode, min(ranks), experts=True) for mode in modes if experts]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=numbers, default=[4])
    parser.add_argument("--modes", type=names, default=list(MODES), help="shm, tcp")
    parser.add_argument("--times", type=int, default=50, help="replacements in each cell")
    parser.add_argument("--hit", type=names, default=list(HITS), help="newcomers: kill, stop")
    parser.add_argument("--no-experts", action="store_true", help="without Buffers")
    parser.add_argument("--seed", type=int, default=1, help="of victims and moments")
    parser.add_argument("--json", help="write JSON lines here")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is broken")
    args = parser.parse_args(argv)
    if min(args.ranks, default=0) < 3 or args.times < 1:
        parser.error("a replacement needs 3 ranks or more")
    facts, watch = machine_facts(), OthersWatch()
    found = run(
        cells_of(args.ranks, args.modes, args.hit, not args.no_experts), args.times, args.seed
    )
    summaries = [summarize(cell, rows) for cell, rows in found.items()]
    findings = judge(summaries)
    show(summaries)
    gates.show(findings, "summary")
    facts["cpu_share_of_others"] = watch.tell()
    rows = [row for some in found.values() for row in some]
    write_json_lines(args.json, [facts, *summaries, *rows, *[one.as_row() for one in findings]])
    return gates.exit_code(summaries, findings, args.gate)


if __name__ == "__main__":
    sys.exit(run_main(main))
