"""Gradients of DistributedDataParallel when a rank is lost: the hooks of mooncake_backend."""

from __future__ import annotations

import signal

import cards
import harness
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mooncake_backend as mb

RANKS, VICTIM = 3, 1
ALIVE = [rank for rank in range(RANKS) if rank != VICTIM]
LAYERS, WIDTH = 3, 64 * 64  # float32 elements: each layer has a bucket of its own
DIES_IN, STEPS = 1, 3


class Layers(torch.nn.Module):
    """The gradient of each layer is a number that tells the rank. `before(layer)` is called in the
    backward, the last layer first."""

    def __init__(self, before):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(WIDTH) for _ in range(LAYERS))
        self.before = before

    def forward(self, x, rank):
        for layer, weight in enumerate(self.weights):
            x = x + (weight * gradient_of(rank)).sum()
            x.register_hook(lambda _, layer=layer: self.before(layer))
        return x


def gradient_of(rank):
    return float(4**rank)


def mean(ranks):
    return sum(gradient_of(rank) for rank in ranks) / len(ranks)


def train_on_rank(me, hook, group_too):
    step = 0

    def before(layer):
        # The last layer's bucket is on its way, or has ended.
        if me.rank == VICTIM and step == DIES_IN and layer == 0:
            signal.raise_signal(signal.SIGKILL)

    group = dist.new_group() if group_too else None
    model = DistributedDataParallel(
        Layers(before), process_group=group, bucket_cap_mb=WIDTH * 4 / (1 << 20)
    )
    model.register_comm_hook(group, hook)
    found, errors = [], []
    for step in range(STEPS):
        model.zero_grad()
        try:
            model(torch.zeros((), requires_grad=True), me.rank).backward()
        except mb.PeerLostError:
            errors.append(step)
            continue
        for weight in model.module.weights:
            assert (weight.grad == weight.grad[0]).all()
        found.append([weight.grad[0].item() for weight in model.module.weights])
    return found, errors


@pytest.mark.parametrize("mode", ["continue", "raise"])
@pytest.mark.parametrize(
    ("hook", "group_too"),
    [(mb.mean_over_contributors, False), (mb.bf16_mean_over_contributors, True)],
)
def test_the_mean_is_over_the_ranks_that_contributed(hook, group_too, mode):
    env = {**cards.over("shm"), "MOONCAKE_ON_FAILURE": mode}
    with harness.starting(RANKS, train_on_rank, hook, group_too, env=env) as crew:
        results = crew.results(dead=[VICTIM])
    found, errors = results[ALIVE[0]]
    assert all(results[rank] == (found, errors) for rank in ALIVE)
    assert errors == ([DIES_IN] if mode == "raise" else [])
    before, after = mean(range(RANKS)), mean(ALIVE)
    assert found[0] == [before] * LAYERS
    assert found[-1] == [after] * LAYERS
    if mode == "continue":
        # Each bucket has contributors of its own.
        assert found[1][0] == after
        assert set(found[1]) <= {before, after}
