"""One rank of the main job. Rank 0 prints one JSON line per step.

If a rank is to be killed, the job is elastic: a new process takes the dead rank's place between two
steps, while the other ranks go on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mooncake_backend
from mooncake_backend.demo.model import CharModel, Text, die_with_launcher, is_replacement

CONTEXT = 64
BATCH = 8
MOST_STEPS = 1_000_000  # an elastic job ends earlier, see End


class End:
    """Tells when an elastic job may end: after `steps` steps, and a quarter as many with the
    replacement. The job goes on for the replacement for at most `patience` seconds after
    `steps` steps."""

    def __init__(self, steps: int, patience: float) -> None:
        self.steps, self.patience = steps, patience
        self.latest: float | None = None  # on the monotonic clock
        self.back: int | None = None  # the replacement's first step
        self.is_whole = not is_replacement()

    def is_due(self, step: int, is_whole: bool) -> bool:
        """Whether `step` may be the last one. is_whole: all ranks take part in it. Call it for each
        step."""
        if is_whole and not self.is_whole:
            self.back = step
        self.is_whole = is_whole
        if step + 1 < self.steps:
            return False
        if self.latest is None:
            self.latest = time.monotonic() + self.patience
        has_returned = self.back is not None and step + 1 >= self.back + self.steps // 4
        return has_returned or time.monotonic() > self.latest


class Training:
    """kill_at: the step after which this rank kills itself. end: of an elastic job."""

    def __init__(self, text: Text, steps: int, kill_at: int | None, end: End | None) -> None:
        self.text, self.steps, self.kill_at, self.end = text, steps, kill_at, end
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)  # the same model for every rank and backend
        self.model = CharModel(text.symbols, CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def run(self) -> None:
        draw = torch.Generator()
        ended = time.perf_counter()
        for step, model, may_end in self._steps():
            dist.barrier()
            started = time.perf_counter()
            # A replacement goes on with its predecessor's batches.
            draw.manual_seed(1 + self.rank + self.size * step)
            loss = model(*self.text.batch(BATCH, CONTEXT, draw))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            pause, seconds = started - ended, time.perf_counter() - started
            ended = started + seconds
            facts = torch.tensor([loss.item(), may_end])
            work = dist.all_reduce(facts, async_op=True)
            work.wait()
            # The sum is over the ranks that took part. Our works list them; other backends need
            # all ranks.
            ranks = len(getattr(work, "contributors", range(self.size)))
            if self.rank == 0:
                line = {"step": step, "loss": facts[0].item() / ranks, "ranks": ranks}
                print(json.dumps(line | {"seconds": seconds, "pause": pause}), flush=True)
            if facts[1] > 0:  # the same on all ranks, so they end with the same step
                break
            if step == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def _steps(self) -> Iterator[tuple[int, nn.Module, bool]]:
        """Yields the number of each step, the model to use, and whether it may be the last step."""
        if self.end is None:
            model = DistributedDataParallel(self.model)
            for step in range(self.steps):
                yield step, model, step + 1 == self.steps
            return
        job = mooncake_backend.elastic(self.model, self.optimizer, wrap=DistributedDataParallel)
        for step in job.steps(MOST_STEPS):
            yield step, job.model, self.end.is_due(step, len(job.ranks) == self.size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--victim", type=int)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--patience", type=float, default=0.0)
    parser.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()

    die_with_launcher()
    torch.set_num_threads(1)
    text = Text(given.files)
    dist.init_process_group(given.backend, timeout=timedelta(seconds=60))
    try:
        is_elastic = given.victim is not None
        is_victim = dist.get_rank() == given.victim and not is_replacement()
        end = End(given.steps, given.patience) if is_elastic else None
        Training(text, given.steps, given.kill_at if is_victim else None, end).run()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
