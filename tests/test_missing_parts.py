"""Warnings for programs that train on without the part of a lost rank and do not know it."""

from __future__ import annotations

import re
import signal

import cards
import harness
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mooncake_backend as mb

RANKS = 4
DIES_IN = {1: 1, 2: 3}  # rank: step
ALIVE = [rank for rank in range(RANKS) if rank not in DIES_IN]
STEPS = 5
WARNING = re.compile(r" W rank \d: all_\w+ #\d+ of group '[^']*'.*")


def train_on_rank(me, case):
    model, group = torch.nn.Linear(8, 8), None
    if case == "active_ranks given":
        options = mb.MooncakeBackendOptions(torch.ones(RANKS, dtype=torch.int32))
        group = dist.new_group(pg_options=options)
    if case == "FSDP2":
        fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    elif case != "sums after the backward":
        model = DistributedDataParallel(model, process_group=group)
    if case == "our hook":
        model.register_comm_hook(None, mb.mean_over_contributors)
    if case == "a hook of torch":
        model.register_comm_hook(None, allreduce_hook)
    for step in range(STEPS):
        loss = model(torch.ones(2, 8)).sum()
        if DIES_IN.get(me.rank) == step:
            signal.raise_signal(signal.SIGKILL)
        loss.backward()
        if case == "sums after the backward":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if case == "reads the contributors":
            work = dist.barrier(async_op=True)
            work.wait()
            assert me.rank in work.contributors


def warnings_of(case, mode="continue"):
    env = {**cards.over("shm"), "MOONCAKE_ON_FAILURE": mode}
    with harness.starting(RANKS, train_on_rank, case, env=env) as crew:
        crew.results(dead=list(DIES_IN))
        return [WARNING.findall(crew.log(rank)) for rank in ALIVE]


@pytest.mark.parametrize("case", ["DDP", "a hook of torch"])
def test_a_sum_of_gradients_is_reported_once_for_each_loss(case):
    for found in warnings_of(case):
        for text, lost in zip(found, ["rank 1", "ranks 1, 2|rank 1 .*, rank 2"], strict=True):
            assert re.search(rf" all_reduce #\d+ of group '0', .* the part of ({lost})", text)
            assert "DistributedDataParallel still divides it by 4" in text
            assert "register_comm_hook(None, mooncake_backend.mean_over_contributors)" in text


def test_a_gather_with_zeros_is_reported_once_for_each_loss():
    for found in warnings_of("FSDP2"):
        assert len(found) == len(DIES_IN), found
        for text in found:
            assert re.search(r" all_gather_into_tensor #\d+ of group .* zeros .* rank", text)
            assert 'on_failure="raise"' in text


@pytest.mark.parametrize(
    "case",
    ["our hook", "reads the contributors", "active_ranks given", "sums after the backward"],
)
def test_a_program_that_knows_of_losses_is_not_warned(case):
    assert warnings_of(case) == [[], []]
