"""Measures how long a loss takes: from the kill of a random rank, at a random moment of a loop of
all_reduce, until the last survivor knows of it, and until that has a result again.

    python benchmarks/bench_failure.py --ranks 2,4,8 --sizes 1K,4M --modes shm,tcp --kills 200 \\
        --backends mooncake-cpu,gloo --json out.json --plot out.png --gate

Every kill has its own job, with ranks forked from a server (fork_server.py). No rank holds the
server of the store, so any of them may die. Backends and modes take turns kill by kill, so the
noise of the machine hits them alike. Gloo cannot go on: its time ends when every survivor has
raised an error.
docs/benchmarks.md has the method.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import gates
import losses
from common import (
    OthersWatch,
    Progress,
    format_size,
    machine_facts,
    names,
    numbers,
    parse_size,
    short,
    write_json_lines,
)
from fork_server import WARM_UP, Crew, Job, Member, random_moment_s
from losses import TIMES, Lane
from ranks import is_registered, run_main

EVIDENCE_WAIT_S = 5.0  # longest wait for a survivor's own evidence, once it has gone on
DEFAULT_TIMEOUT_S = 3.0  # failure_timeout of all actions but stop

MODES = {"shm": {}, "tcp": {"MOONCAKE_TRANSPORTS": "tcp", "MOONCAKE_HOST_IP": "127.0.0.1"}}
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "big": signal.SIGKILL,
    "segv": signal.SIGSEGV,
}
VIEW_LINE = re.compile(r"^(\S+)Z mooncake \w rank \d+: epoch \d+: .* go(?:es)? on without", re.M)

Rows = list[dict[str, Any]]


# ---- in the ranks


def rank_main(me: Member) -> None:
    """Calls all_reduce until a rank is missing in the result, then reports when and why."""
    import torch
    import torch.distributed as dist

    spec, doomed = me.spec, me.rank == me.spec["victim"]
    torch.set_num_threads(1)
    ours = spec["backend"].startswith("mooncake")
    if not is_registered(spec["backend"]):
        raise RuntimeError(f"torch.distributed does not know the backend {spec['backend']!r}")
    options = None
    if ours:
        from mooncake_backend import MooncakeBackendOptions

        options = MooncakeBackendOptions(failure_timeout=spec["failure_timeout_s"])
    ballast = torch.ones(spec["memory"], dtype=torch.uint8) if doomed else None
    if doomed and spec["action"] == "segv":
        _allow_core_dumps()
    dist.init_process_group(
        spec["backend"],
        store=me.open_store(spec["deadline_s"]),
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=spec["deadline_s"]),
        pg_options=options,
    )
    tensor = torch.empty(max(1, spec["bytes"] // 4))
    done, error, value = 0, None, float(me.size)
    while value == me.size:
        tensor.fill_(1.0)
        began = time.monotonic()
        try:
            dist.all_reduce(tensor)
        except Exception as caught:  # the moment to measure for a backend that cannot go on
            error = caught
            break
        now = time.monotonic()
        value = tensor[0].item()
        done += 1
        if done == WARM_UP:
            me.link.send("ready")
    now = time.monotonic() if error else now
    told = {"began": began, "ended": now, "value": value, "uniform": bool((tensor == value).all())}
    told |= {"raised": error and type(error).__name__, "text": str(error or ""), "seen": []}
    if ours:
        told["seen"] = _evidence(spec["victim"])
        if not error:
            dist.all_reduce(tensor.fill_(1.0))
            told["again"] = tensor[0].item()
    me.link.send(told)
    if ours:
        me.link.poll(None)  # stays: if it left, ranks that are not so far would see another loss
    del ballast  # gloo's ranks leave: others learn of the loss from the broken connections


def _evidence(victim: int) -> list[tuple[int, str, float]]:
    """(rank, kind, when) of all evidence on this rank, which must include the victim."""
    import torch.distributed as dist

    import mooncake_backend

    end = time.monotonic() + EVIDENCE_WAIT_S
    while True:
        seen = mooncake_backend.get_evidence(dist.group.WORLD)
        if any(one.rank == victim for one in seen) or time.monotonic() > end:
            return [(one.rank, one.kind, one.monotonic) for one in seen]
        time.sleep(0.001)


def _allow_core_dumps() -> None:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


# ---- one kill


@dataclass(frozen=True)
class How:
    """Settings of all kills of a run."""

    failure_timeout_s: float = 1.0  # for the action stop
    memory: int = 4 << 30  # bytes, for the action big
    deadline_s: float = 60.0  # from a kill to the last survivor's report


def one_kill(
    crew: Crew, lane: Lane, ranks: int, size: int, action: str, how: How, rng: random.Random
) -> dict[str, Any]:
    """Returns a row of kind 'failure_kill': milliseconds since the kill, or for the action stop
    since the end of failure_timeout."""
    victim, moment_s = rng.randrange(ranks), random_moment_s(rng)
    timeout_s = how.failure_timeout_s if action == "stop" else DEFAULT_TIMEOUT_S
    spec = {
        "backend": lane.backend,
        "bytes": size,
        "action": action,
        "victim": victim,
        "memory": how.memory if action == "big" else 0,
        "failure_timeout_s": timeout_s,
        "deadline_s": how.deadline_s,
    }
    row = {
        "kind": "failure_kill",
        "mode": lane.mode,
        "ranks": ranks,
        "bytes": size,
        "backend": lane.backend,
        "action": action,
        "victim": victim,
        "beyond_ms": timeout_s * 1e3 if action == "stop" else 0.0,
        "outcome": None,
        "evidence": None,
        "error": None,
        "began_ms": None,
        **{f"{name}_ms": None for name in TIMES},
    }
    with crew.job("bench_failure:rank_main", ranks, spec, MODES.get(lane.mode, {})) as job:
        everybody = list(range(ranks))
        if wrong := job.await_ready(how.deadline_s):
            return {**row, "error": wrong}
        time.sleep(moment_s)
        to_wall = time.time() - time.monotonic()
        killed = time.monotonic()
        os.kill(job.pids[victim], SIGNALS[action])
        survivors = [rank for rank in everybody if rank != victim]
        told = job.hear(survivors, how.deadline_s)
        if any("ended" not in told.get(rank, {}) for rank in survivors):
            return {**row, "error": job.words(survivors, told, "nothing after the kill")}
        start = killed + row["beyond_ms"] / 1e3

        def since(moments: list[float], which: Any = max) -> float | None:
            return round((which(moments) - start) * 1e3, 3) if moments else None

        row["resumed_ms"] = since([told[rank]["ended"] for rank in survivors])
        row["began_ms"] = since([told[rank]["began"] for rank in survivors])
        row["outcome"], row["error"] = _outcome(lane, action, ranks, victim, told)
        if lane.ours:
            seen = [s for rank in survivors for s in told[rank]["seen"] if s[0] == victim]
            row["evidence"] = "+".join(sorted({kind for _, kind, _ in seen}))
            row["known_ms"] = since([when for _, _, when in seen])
            row["known_first_ms"] = since([when for _, _, when in seen], min)
            views = [_view_time(job.log(rank)) for rank in survivors]
            if None not in views and row["outcome"] == "resumed":
                row["view_ms"] = since([view - to_wall for view in views])
        if action == "segv":
            row["core_mib"] = _core_mib(job)
        return row


def _outcome(
    lane: Lane, action: str, ranks: int, victim: int, told: dict[int, Any]
) -> tuple[str | None, str | None]:
    """Returns 'resumed', 'raised' or 'minority', and the error, if there is one."""
    for rank, said in told.items():
        if any(accused != victim for accused, _, _ in said["seen"]):
            return None, f"rank {rank} accuses others than {victim}: {said['seen']}"
        if lane.ours and not any(accused == victim for accused, _, _ in said["seen"]):
            return None, f"rank {rank} has no evidence about rank {victim}"
    raised = {said["raised"] for said in told.values()}
    if not lane.ours:
        return ("raised", None) if None not in raised else (None, "went on without a rank")
    # With two ranks, the second one must not go on if the first one is only suspected.
    suspicion = lane.mode == "tcp" or action == "stop"
    if ranks == 2 and victim == 0 and suspicion and raised == {"MinorityError"}:
        return "minority", None
    for rank, said in told.items():
        if said["raised"]:
            return None, f"rank {rank}: {said['raised']}: {said['text'].splitlines()[0]}"
        if (said["value"], said["again"], said["uniform"]) != (ranks - 1, ranks - 1, True):
            return None, f"wrong result on rank {rank}: {said['value']}, {said['again']}"
    return "resumed", None


def _view_time(log: str) -> float | None:
    """When the rank took a new view according to its log, in seconds since 1970."""
    found = VIEW_LINE.search(log)
    if not found:
        return None
    return datetime.fromisoformat(found[1]).replace(tzinfo=timezone.utc).timestamp()


def _core_mib(job: Job) -> float:
    return sum(path.stat().st_blocks * 512 for path in job.folder.glob("*core*")) / (1 << 20)


# ---- cells


def run(
    backends: list[str],
    ranks: list[int],
    *,
    sizes: list[int],
    modes: list[str],
    actions: list[str],
    kills: int,
    how: How | None = None,
    seed: int = 1,
) -> Rows:
    """Rows of kind 'failure' (one per cell and lane), then of kind 'failure_kill'."""
    how, rng = how or How(), random.Random(seed)
    ours = [Lane(name, mode) for name in backends if name.startswith("mooncake") for mode in modes]
    lanes = ours + [Lane(name, "tcp") for name in backends if not name.startswith("mooncake")]
    cells = [(action, size, n) for action in actions for n in ranks for size in sizes]
    total = kills * sum(lane.runs(action) for action, _, _ in cells for lane in lanes)
    progress, rows, every = Progress(total), [], []
    with Crew(["bench_failure"]) as crew:
        for action, size, count in cells:
            live = [lane for lane in lanes if lane.runs(action)]
            of_lane: dict[Lane, Rows] = {lane: [] for lane in live}
            what = f"{action}, {count} ranks, {format_size(size)}"
            for number in range(kills):
                shift = number % max(1, len(live))
                order = live[shift:] + live[:shift]
                for lane in reversed(order) if number % 2 else order:
                    row = one_kill(crew, lane, count, size, action, how, rng)
                    of_lane[lane].append(row)
                    if row["error"]:
                        progress.say(f"FAILED {what}, {lane.name}: {row['error']}")
                    progress.step(what)
            found = [losses.summarize(one) for one in of_lane.values() if one]
            shown = "  ".join(
                f"{losses.name_of(row)} {short(row['resumed_p50_ms'])}" for row in found
            )
            progress.say(f"{what}  resumed p50 ms: {shown}")
            rows += found
            every += [row for one in of_lane.values() for row in one]
    return rows + every


def _one_of(known: Any) -> Any:
    def parse(text: str) -> list[str]:
        chosen = names(text)
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown} not in {', '.join(known)}")
        return chosen

    return parse


def _fitting(actions: list[str], memory: int) -> list[str]:
    """The actions without `big` if this machine lacks the memory for it."""
    free = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
    if "big" not in actions or not free or int(free[1]) * 1024 > memory * 1.25:
        return actions
    print(f"without big: less than {format_size(memory)} and a quarter of memory is available")
    return [action for action in actions if action != "big"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=numbers, default=[2, 4, 8])
    parser.add_argument("--sizes", type=names, default=["1K", "4M"], help="of the all_reduce")
    parser.add_argument("--modes", type=_one_of(MODES), default=list(MODES), help="shm, tcp")
    parser.add_argument(
        "--actions",
        type=_one_of(SIGNALS),
        default=["kill"],
        help="kill; stop: silent, times count from failure_timeout on; "
        "big: kill with --memory resident; segv: with a core dump",
    )
    parser.add_argument("--kills", type=int, default=50, help="of each backend in each cell")
    parser.add_argument("--backends", type=names, default=["mooncake-cpu", "gloo"])
    parser.add_argument(
        "--failure-timeout", type=float, default=1.0, help="seconds, of the action stop"
    )
    parser.add_argument("--memory", type=parse_size, default="4G", help="of the action big")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds, of every kill")
    parser.add_argument("--seed", type=int, default=1, help="of victims and moments")
    parser.add_argument(
        "--ours", help="the backend the limits are about (default: the first mooncake one)"
    )
    parser.add_argument("--json", help="write JSON lines here")
    parser.add_argument("--plot", help="write a PNG here")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a limit is broken")
    args = parser.parse_args(argv)
    if min(args.ranks, default=0) < 2 or args.kills < 1:
        parser.error("a loss needs 2 ranks or more, and at least one kill")
    start, watch, facts = time.monotonic(), OthersWatch(), machine_facts()
    rows = run(
        args.backends,
        args.ranks,
        sizes=[parse_size(text) for text in args.sizes],
        modes=args.modes,
        actions=_fitting(args.actions, args.memory),
        kills=args.kills,
        how=How(args.failure_timeout, args.memory, args.deadline),
        seed=args.seed,
    )
    findings = losses.judge(rows, args.ours or gates.find_ours(args.backends))
    losses.show(rows)
    gates.show(findings, "summary")
    facts["cpu_share_of_others"] = watch.tell()
    write_json_lines(args.json, [facts, *rows, *[finding.as_row() for finding in findings]])
    losses.plot(args.plot, rows)
    cells = losses.cells_of(rows)
    kills = len(rows) - len(cells)
    print(f"{kills} kills in {time.monotonic() - start:.0f} s")
    return gates.exit_code(cells, findings, args.gate)


if __name__ == "__main__":
    sys.exit(run_main(main))
