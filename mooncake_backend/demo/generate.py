"""One rank of the mixture of experts. It learns with the other ranks and keeps its share of the
experts. Then it generates text from its own prompts, through the experts of all ranks.

It writes all results to rank-N.jsonl at once; rank 0 also prints one JSON line per step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mooncake_backend.demo.mixture import (
    BALANCE,
    CONTEXT,
    EXPERTS_OF_A_RANK,
    LENGTH,
    LOOK_BACK,
    PROMPT,
    WIDTH,
    Experts,
    MixtureModel,
    Past,
    loss_of,
)
from mooncake_backend.demo.model import Text, die_with_launcher
from mooncake_backend.ep import Buffer

BATCH = 4
RATE = 4e-3
SENTENCES = 8  # of each rank
TEMPERATURE = 0.6


class Shared:
    """The experts of one layer, on all ranks. The layers share the Buffer and `active`."""

    def __init__(self, buffer: Buffer, active: Tensor, experts: Experts) -> None:
        self.buffer, self.active, self.experts = buffer, active, experts
        # The last call's, per row: ranks of the chosen experts; whether one did not answer.
        self.asked = torch.empty(0)
        self.missing = torch.empty(0)
        self.dies = False  # between dispatch and combine

    def __call__(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        count = EXPERTS_OF_A_RANK * self.buffer.group_size
        received, counts, handle, _, _ = self.buffer.low_latency_dispatch(
            rows.bfloat16(), chosen, BATCH * CONTEXT, count, use_fp8=False, active_ranks=self.active
        )
        assert isinstance(received, Tensor)  # without FP8
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        mine = [rows[:n].float() for rows, n in zip(received, counts.tolist(), strict=True)]
        answers = torch.empty_like(received)
        for place, answer in zip(answers, self.experts.answer(mine), strict=True):
            place[: len(answer)] = answer
        mixed, event, _ = self.buffer.low_latency_combine(
            answers, chosen, weights, handle, active_ranks=self.active
        )
        self.asked = chosen // EXPERTS_OF_A_RANK
        self.missing = event.missing_contributions
        summed: Tensor = mixed.float()
        return summed


class Rank:
    def __init__(self, text: Text, reports: Path) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # The last tenth is held out: for prompts, and for comparing.
        self.text = text
        self.learnt, self.held_out = text.data.tensor_split([len(text.data) * 9 // 10])
        torch.manual_seed(0)  # the same model on every rank
        self.model = MixtureModel(text.symbols, EXPERTS_OF_A_RANK * self.size)
        self.own = torch.Generator().manual_seed(1 + self.rank)
        self.report = (reports / f"rank-{self.rank}.jsonl").open("w", encoding="utf-8")
        self.active = torch.ones(self.size, dtype=torch.int32)
        self.shared: list[Shared] = []

    def write(self, **what: Any) -> None:
        print(json.dumps(what), file=self.report, flush=True)

    def progress(self, phase: str, loss: float | None = None) -> None:
        if self.rank == 0:
            print(json.dumps({"phase": phase, "loss": loss}), flush=True)

    @property
    def layers(self) -> list[Experts]:
        return [layer for layer in self.model.experts if isinstance(layer, Experts)]

    def windows(self, data: Tensor, generator: torch.Generator) -> Tensor:
        length = LOOK_BACK + CONTEXT + 1
        starts = torch.randint(len(data) - length, (BATCH, 1), generator=generator)
        return data[starts + torch.arange(length)]

    def learn(self, steps: int) -> None:
        model = DistributedDataParallel(self.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1, (step + 1) / 10) * (1 - step / steps)
            symbols = self.windows(self.learnt, self.own)
            loss = loss_of(model(symbols[:, :-1]), symbols)
            imbalance = sum((layer.imbalance for layer in self.layers), torch.zeros(()))
            optimizer.zero_grad()
            (loss + BALANCE * imbalance).backward()
            optimizer.step()
            self.progress("learn", loss.item())
        self.model.eval()

    def keep_share(self) -> None:
        """Keeps this rank's experts; the other experts are reached through their ranks."""
        sizes = (BATCH * CONTEXT, WIDTH, self.size, EXPERTS_OF_A_RANK * self.size)
        buffer = Buffer(
            dist.group.WORLD,
            num_rdma_bytes=Buffer.get_low_latency_rdma_size_hint(*sizes),
            low_latency_mode=True,
            renormalize=True,  # if one of two experts is lost, the other counts for both
        )
        first = EXPERTS_OF_A_RANK * self.rank
        for layer in self.layers:
            self.shared.append(Shared(buffer, self.active, layer))
            layer.keep(slice(first, first + EXPERTS_OF_A_RANK), self.shared[-1])

    def avoid_the_lost(self) -> None:
        """Makes the routers choose only among experts of ranks that live."""
        lost = (self.active == 0).repeat_interleave(EXPERTS_OF_A_RANK)
        for shared in self.shared:
            shared.experts.avoided = lost

    def compare(self, batches: int = 8) -> float:
        """The loss per character of held-out text, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        losses = []
        for _ in range(batches):
            symbols = self.windows(self.held_out, generator)
            losses.append(loss_of(self.model(symbols[:, :-1]), symbols))
        return torch.stack(losses).mean().item()

    def generate(self, kill_at: int | None) -> None:
        """Generates all sentences together, one character of each at a time."""
        starts = torch.tensor(self.text.sentences(len(self.learnt), LOOK_BACK, PROMPT))
        drawn = torch.randint(len(starts), (SENTENCES, 1), generator=self.own)
        index = starts[drawn] + torch.arange(-LOOK_BACK, PROMPT)
        symbols, past = self.text.data[index], Past()
        self.write(prompts=[self.text.words(row[LOOK_BACK:]) for row in symbols])
        for place in range(LENGTH):
            started = time.perf_counter()
            self.shared[0].dies = place == kill_at
            scores = self.model(symbols, past)[:, -1] / TEMPERATURE
            drawn = torch.multinomial(scores.softmax(-1), 1, generator=self.own)
            # The hash needs the three characters before it; `past` has all keys and values.
            symbols = torch.cat([symbols[:, -LOOK_BACK:], drawn], 1)
            seconds = time.perf_counter() - started
            missing = torch.cat([_last(one.missing) for one in self.shared], 1)
            self.write(
                characters=self.text.words(drawn[:, 0]),
                seconds=seconds,
                asked=torch.cat([_last(one.asked) for one in self.shared], 1).tolist(),
                missing=missing.any(1).nonzero()[:, 0].tolist(),
                active=self.active.tolist(),
            )
            self.avoid_the_lost()
            self.progress("generate")


def _last(rows: Tensor) -> Tensor:
    """[SENTENCES, x]: each sentence's last row. The first call has rows of the prompts, too."""
    return rows.view(SENTENCES, len(rows) // SENTENCES, -1)[:, -1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--victim", type=int)
    parser.add_argument("--reports", type=Path, required=True)
    parser.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()

    die_with_launcher()
    torch.set_num_threads(1)
    dist.init_process_group("mooncake", timeout=timedelta(seconds=60))
    try:
        rank = Rank(Text(given.files), given.reports)
        rank.learn(given.steps)
        with torch.no_grad():
            rank.keep_share()
            whole = rank.compare()
            rank.generate(LENGTH // 2 if rank.rank == given.victim else None)
            avoided = rank.compare()
            for shared in rank.shared:
                shared.experts.avoided.zero_()
            rank.write(loss={"whole": whole, "avoided": avoided, "missing": rank.compare()})
        rank.shared[0].buffer.destroy()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
