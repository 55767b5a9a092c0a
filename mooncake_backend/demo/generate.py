"""One rank of the mixture of experts. It learns with the other ranks and keeps its share of the
experts. Then it generates text from its own prompts, through the experts of all ranks.

A replacement of a rank that died loads the model from the checkpoint that rank 0 wrote after the
learning, and generates with the other ranks from their next turn on.

Each process writes its results to a file at once; rank 0 also prints one JSON line per step.
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

import mooncake_backend
from mooncake_backend import pg
from mooncake_backend.demo.mixture import (
    BALANCE,
    CONTEXT,
    EXPERTS_OF_A_RANK,
    LENGTH,
    LOOK_BACK,
    PROMPT,
    TURNS_AFTER,
    TURNS_BEFORE,
    WIDTH,
    Experts,
    MixtureModel,
    Past,
    loss_of,
)
from mooncake_backend.demo.model import Text, die_with_launcher, is_replacement, report_of
from mooncake_backend.ep.mooncake_buffer import Buffer, get_ep_buffer_size_hint

BATCH = 4
RATE = 4e-3
SENTENCES = 8  # of each rank
TEMPERATURE = 0.6
NO_LIMIT = -1  # living ranks are waited for until the Buffer's timeout


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
        received, counts, handle, _, _ = self.buffer.dispatch(
            rows.bfloat16(), chosen, self.active, BATCH * CONTEXT, count, NO_LIMIT, use_fp8=False
        )
        assert isinstance(received, Tensor)  # without FP8
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        mine = [rows[:n].float() for rows, n in zip(received, counts.tolist(), strict=True)]
        answers = torch.empty_like(received)
        for place, answer in zip(answers, self.experts.answer(mine), strict=True):
            place[: len(answer)] = answer
        mixed, event, _ = self.buffer.combine(
            answers, chosen, weights, self.active, NO_LIMIT, handle
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
        number = self.rank + self.size * is_replacement()  # of this process
        self.own = torch.Generator().manual_seed(1 + number)
        self.report = report_of(reports, self.rank, is_replacement()).open("w", encoding="utf-8")
        self.checkpoint = reports / "model.pt"
        self.active = torch.ones(self.size, dtype=torch.int32)
        self.lost_at: float | None = None  # when the loss of a rank was seen, monotonic
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
        if self.rank == 0:
            torch.save(self.model.state_dict(), self.checkpoint)

    def load(self) -> None:
        """Loads what learn() has made."""
        self.model.load_state_dict(torch.load(self.checkpoint, weights_only=True))

    def keep_share(self) -> None:
        """Keeps this rank's experts; the other experts are reached through their ranks. Collective:
        a replacement's call meets the other ranks' first dispatch after let_in()."""
        self.model.eval()
        sizes = (BATCH * CONTEXT, WIDTH, self.size, EXPERTS_OF_A_RANK * self.size)
        # If one of a character's two experts is lost, the other counts for both.
        buffer = Buffer(dist.group.WORLD, get_ep_buffer_size_hint(*sizes), renormalize=True)
        first = EXPERTS_OF_A_RANK * self.rank
        for layer in self.layers:
            self.shared.append(Shared(buffer, self.active, layer))
            layer.keep(slice(first, first + EXPERTS_OF_A_RANK), self.shared[-1])

    def avoid_the_lost(self) -> None:
        """Makes the routers choose only among experts of ranks that live. Notes the first loss."""
        self.avoid(self.active == 0)
        if self.lost_at is None and 0 in self.active:
            self.lost_at = time.monotonic()

    def avoid(self, ranks: Tensor) -> None:
        for shared in self.shared:
            shared.experts.avoided = ranks.repeat_interleave(EXPERTS_OF_A_RANK)

    def compare(self, batches: int = 8) -> float:
        """The loss per character of held-out text, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        losses = []
        for _ in range(batches):
            symbols = self.windows(self.held_out, generator)
            losses.append(loss_of(self.model(symbols[:, :-1]), symbols))
        return torch.stack(losses).mean().item()

    def compare_without_the_lost(self) -> dict[str, float]:
        """The loss per character when the routers avoid the experts of lost ranks, and when they
        choose them and get no answer."""
        avoided = self.compare()
        self.avoid(torch.zeros(self.size, dtype=torch.bool))
        missing = self.compare()
        self.avoid_the_lost()
        return {"avoided": avoided, "missing": missing}

    def let_in(self, patience: float) -> bool:
        """Generates further turns until a replacement is in, at most for `patience` seconds since
        the loss. Returns whether it is in. On all ranks alike."""
        started = time.monotonic()
        latest = (self.lost_at or started) + patience
        while not mooncake_backend.admit(dist.group.WORLD):
            is_late = torch.tensor(int(started > latest))
            dist.all_reduce(is_late, op=dist.ReduceOp.MAX)
            if is_late:
                return False
            self.generate()
            started = time.monotonic()
        self.shared[0].buffer.update_ep_member()
        self.active.fill_(1)
        self.avoid_the_lost()
        ended = time.monotonic()
        self.write(let_in=ended - started, away=ended - (self.lost_at or started))
        return True

    def generate(self, kill_at: int | None = None) -> None:
        """Generates all sentences of a turn together, one character of each at a time."""
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


def serve(rank: Rank, steps: int, victim: int | None, patience: float) -> None:
    """The life of a rank's first process."""
    rank.learn(steps)
    with torch.no_grad():
        rank.keep_share()
        loss = {"whole": rank.compare()}
        for turn in range(TURNS_BEFORE):
            dies = rank.rank == victim and turn + 1 == TURNS_BEFORE
            rank.generate(LENGTH // 2 if dies else None)
        if victim is not None:
            loss |= rank.compare_without_the_lost()
            if rank.let_in(patience):
                loss["again"] = finish(rank)
        rank.write(loss=loss)


def replace(rank: Rank) -> None:
    """The life of a replacement."""
    with torch.no_grad():
        rank.load()
        pg.join_group(dist.group.WORLD)
        rank.keep_share()
        rank.write(loss={"again": finish(rank)})


def finish(rank: Rank) -> float:
    """The last turns. Returns the loss per character after them."""
    for _ in range(TURNS_AFTER):
        rank.generate()
    return rank.compare()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--victim", type=int)
    parser.add_argument("--patience", type=float, default=0.0)
    parser.add_argument("--reports", type=Path, required=True)
    parser.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()

    die_with_launcher()
    torch.set_num_threads(1)
    text = Text(given.files)
    dist.init_process_group("mooncake", timeout=timedelta(seconds=60))
    try:
        rank = Rank(text, given.reports)
        if is_replacement():
            replace(rank)
        else:
            serve(rank, given.steps, given.victim, given.patience)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
