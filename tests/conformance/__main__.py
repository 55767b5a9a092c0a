"""Runs torch's own suite of torch.distributed on a backend, beside Gloo.

    python tests/conformance                   whatever passes on Gloo must pass on mooncake-cpu
    python tests/conformance NAME ...          some of its tests
    python tests/conformance --every 8         each eighth: a smoke test of another torch
    python tests/conformance --device fake     the same with tensors of a device, beside CPU tensors
    TEST_DEVICE=cuda python tests/conformance --device cuda    the same on a GPU, else hidden
    python tests/conformance --alone --backend fake   what torch's backend passes that moves nothing

What passes is not run on the reference: only the others can be wrong. All that a failed test has to
say is in build/conformance/.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import re
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

import suite
import torch

LOGS = Path(__file__).resolve().parents[2] / "build/conformance"
RANK_RAISED = f"exited with error code {suite.Suite.TEST_ERROR_EXIT_CODE}"
# dist.monitored_barrier() refuses every backend that is not called gloo, before it asks it.
OUT_OF_REACH = {
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_wait_all_ranks",
}
# Why tests of CPU tensors make no sense with those of the test's device.
NOT_ON_DEVICES = {
    "test_DistributedDataParallel_non_default_stream": "asks for a device for each rank",
    "test_ddp_compile_static_graph": "torch's compiler does not know the device's streams",
    "test_ddp_logging_data_cpu": "wants times that torch measures on the CPU and on CUDA",
    "test_ddp_uneven_inputs": "wants torch's convolution_overrideable, which `fake` lacks",
    "test_irecv": "wants a message to be completed after wait(), which is the stream's",
    "test_sparse_all_reduce_sum": "sparse",
    "test_sparse_all_reduce_sum_cuda": "sparse",
}
_fork = multiprocessing.get_context("fork")


@dataclass
class Outcome:
    name: str
    status: str  # "passed", "skipped", "failed"
    text: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.status:8}{self.seconds:6.1f} s  {self.name}  {self.reason}".rstrip()

    @property
    def reason(self) -> str:
        """The last error of the first rank that failed, or why the test was skipped."""
        of_first = re.split(r"^Process \d+ exited", self.text, flags=re.MULTILINE)[:2][-1]
        lines = of_first.strip().splitlines()
        errors = [line for line in lines if re.match(r"[\w.]+: ", line)]
        return (errors or lines or [""])[-1]


def run_one(name: str, log: Path) -> Outcome:
    os.truncate(log, 0)
    result = unittest.TestResult()
    begin = time.monotonic()
    suite.Suite(name).run(result)
    seconds = time.monotonic() - begin
    if bad := result.errors + result.failures:
        text = bad[0][1]
        if RANK_RAISED not in text:
            text += log.read_text(errors="replace")
        return Outcome(name, "failed", text, seconds)
    if result.skipped:
        return Outcome(name, "skipped", result.skipped[0][1], seconds)
    return Outcome(name, "passed", "", seconds)


def work(link: connection.Connection, backend: str, device: str | None) -> None:
    """A process that runs the tests whose names it is sent, one after the other."""
    suite.end_with_parent()
    suite.use(backend, device)
    with tempfile.NamedTemporaryFile(prefix="mooncake-conformance-") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        while (name := link.recv()) is not None:
            link.send(run_one(name, Path(log.name)))


def run(names: Sequence[str], backend: str, jobs: int, device: str | None) -> Iterator[Outcome]:
    """The outcomes, as they come."""
    waiting = list(reversed(names))
    links: list[connection.Connection] = []
    for _ in range(min(jobs, len(names))):
        here, there = _fork.Pipe()
        _fork.Process(target=work, args=(there, backend, device)).start()
        there.close()
        here.send(waiting.pop())
        links.append(here)
    while links:
        for link in connection.wait(links):
            outcome = link.recv()
            if waiting:
                link.send(waiting.pop())
            else:
                link.send(None)
                links.remove(link)
            yield outcome


def run_and_show(
    names: Sequence[str], backend: str, jobs: int, device: str | None = None
) -> dict[str, Outcome]:
    LOGS.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    with open(LOGS / f"{backend.replace(':', '-')}.log", "w", encoding="utf-8") as log:
        for outcome in run(names, backend, jobs, device):
            outcomes[outcome.name] = outcome
            print(f"{backend}: {outcome}", flush=True)
            print(f"==== {outcome}\n{outcome.text}", file=log, flush=True)
    return outcomes


def verdict(
    outcomes: dict[str, Outcome],
    on_reference: Callable[[list[str]], dict[str, Outcome]],
    reference: str,
) -> tuple[dict[str, list[str]], list[str]]:
    """The names by what became of them, and those that pass on the reference only."""
    kinds = collections.defaultdict(list)
    missed = []
    for name, outcome in sorted(outcomes.items()):
        if outcome.status == "passed":
            kinds["passed"].append(name)
        elif name in OUT_OF_REACH:
            kinds["want the name gloo"].append(name)
        else:
            missed.append(name)
    wrong = []
    for name, outcome in sorted(on_reference(missed).items()):
        passed = outcome.status == "passed"
        kind = f"passed on {reference} only" if passed else f"not on {reference} either"
        kinds[kind].append(name)
        if outcome.status == "passed":
            wrong.append(name)
    return kinds, wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--backend", default="mooncake-cpu")
    parser.add_argument(
        "--device", help="whatever passes on CPU tensors must pass on this device's"
    )
    parser.add_argument("--alone", action="store_true", help="do not run on Gloo what fails")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)) + 1)
    options = parser.parse_args()
    names = options.names or suite.names()
    if options.device and not options.names:
        names = [name for name in names if name not in NOT_ON_DEVICES]
    names = names[:: options.every]

    backend, reference = options.backend, "gloo"
    if options.device:
        suite.devices.prepare(options.device)
        backend, reference = f"cpu:mooncake,{options.device}:mooncake", backend
    outcomes = run_and_show(names, backend, options.jobs, options.device)
    if options.alone:
        counts = collections.Counter(outcome.status for outcome in outcomes.values())
        print(f"{backend}, torch {torch.__version__}: {dict(counts)}")
        return
    kinds, wrong = verdict(
        outcomes, lambda some: run_and_show(some, reference, options.jobs), reference
    )
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in kinds.items())
    print(f"{backend}, torch {torch.__version__}: {counts}, of {len(names)} tests of torch")
    for name in wrong:
        print(f"passed on {reference} only: {outcomes[name]}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
