"""One rank of the main job. Rank 0 prints one JSON line per step."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mooncake_backend.demo.model import CharModel, Text, die_with_launcher

CONTEXT = 64
BATCH = 8


def train(text: Text, steps: int, kill_at: int | None) -> None:
    """kill_at: the step after which this rank kills itself."""
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same model for every rank and backend
    model = DistributedDataParallel(CharModel(text.symbols, CONTEXT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    own_text = torch.Generator().manual_seed(1 + rank)
    for step in range(steps):
        dist.barrier()
        started = time.perf_counter()
        loss = model(*text.batch(BATCH, CONTEXT, own_text))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds = time.perf_counter() - started
        mean = loss.detach().clone()
        work = dist.all_reduce(mean, async_op=True)
        work.wait()
        # The mean is over the ranks that took part. Our works list them; other backends need all.
        ranks = len(getattr(work, "contributors", range(dist.get_world_size())))
        if rank == 0:
            line = {"step": step, "loss": mean.item() / ranks, "seconds": seconds, "ranks": ranks}
            print(json.dumps(line), flush=True)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--victim", type=int)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()

    die_with_launcher()
    torch.set_num_threads(1)
    dist.init_process_group(given.backend, timeout=timedelta(seconds=60))
    try:
        kill_at = given.kill_at if dist.get_rank() == given.victim else None
        train(Text(given.files), given.steps, kill_at)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
