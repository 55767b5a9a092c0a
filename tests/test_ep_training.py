"""Expert parallelism with gradients, beside DDP and FSDP2: the losses and gradients are those of
one process that has all experts and all data."""

from __future__ import annotations

import copy
import functools
import signal
from collections.abc import Callable
from typing import Any

import devices
import harness
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mooncake.ep import Buffer, functional, reference

SIZE, EXPERTS, TOPK, HIDDEN, TOKENS = 4, 8, 2, 32, 12
LEARNING_RATE = 0.3
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    with torch.device("cpu"):  # each device draws its own numbers
        made = make()
    return made.to(torch.get_default_device())


def expert(number: int) -> nn.Module:
    return seeded(
        100 + number,
        lambda: nn.Sequential(nn.Linear(HIDDEN, 16), nn.Tanh(), nn.Linear(16, HIDDEN)),
    )


class Model(nn.Module):
    """A dense layer, and experts that a router chooses from; `experts` runs these."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.dense = seeded(1, lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()))
        self.router = seeded(2, lambda: nn.Linear(HIDDEN, EXPERTS, bias=False))
        self.experts = experts

    def forward(self, x: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        hidden = self.dense(x)
        # Which experts a token has is given: a rounding must not change it.
        weights = self.router(hidden).softmax(dim=1).gather(1, topk_idx)
        return hidden + self.experts(hidden.bfloat16(), topk_idx, weights).float()


def answer(
    own: nn.ModuleList, rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of the answers of these experts to each row, bfloat16."""
    total = torch.zeros(rows.shape) + 0 * rows.float()
    for number, one in enumerate(own):
        scale = (weights * (numbers == number)).sum(dim=1, keepdim=True)
        total = total + one(rows.float()) * scale
    return total.bfloat16()


def all_in_one(
    own: nn.ModuleList, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor
) -> Any:
    """As SIZE ranks do it: the answers of a rank's experts are rounded before they are added."""
    owners = reference.default_owners(EXPERTS, SIZE)
    total = torch.zeros(x.shape)
    for rank in range(SIZE):
        mine = [e for e in range(EXPERTS) if owners[e] == rank]
        part = nn.ModuleList(own[e] for e in mine)
        numbers = torch.full_like(idx, -1)
        for number, e in enumerate(mine):
            numbers = torch.where(idx == e, number, numbers)
        total = total + answer(part, x, numbers, weights).float()
    return total.bfloat16()


def batches(count: int) -> list[tuple[torch.Tensor, ...]]:
    """The same on every rank: inputs, targets and chosen experts of all ranks' tokens."""
    drawn = torch.Generator().manual_seed(3)
    there = torch.get_default_device()
    made = []
    for _ in range(count):
        x = torch.randn(SIZE * TOKENS, HIDDEN, generator=drawn, device="cpu")
        target = torch.randn(SIZE * TOKENS, HIDDEN, generator=drawn, device="cpu")
        scores = torch.rand(SIZE * TOKENS, EXPERTS, generator=drawn, device="cpu")
        scores[: TOKENS * 2, 0] += 1  # an expert that is much in demand
        idx = scores.topk(TOPK, dim=1).indices
        made.append((x.to(there), target.to(there), idx.to(there)))
    return made


def step(model: Any, parameters: Any, batch: tuple[torch.Tensor, ...], rows: slice) -> torch.Tensor:
    x, target, idx = (one[rows] for one in batch)
    loss = (model(x, idx) - target).square().mean()
    for parameter in parameters:
        parameter.grad = None
    loss.backward()
    return loss.detach()


def descend(parameters: Any, scale: float = 1.0) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter -= LEARNING_RATE * scale * parameter.grad


def trains(me: harness.Rank, dense: str) -> None:
    everyone = nn.ModuleList(expert(e) for e in range(EXPERTS))
    owners = reference.default_owners(EXPERTS, SIZE)
    mine = nn.ModuleList(copy.deepcopy(everyone[e]) for e in range(EXPERTS) if owners[e] == me.rank)
    buffer = Buffer(dist.group.WORLD, 1 << 20)

    def parallel(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        found = functional.dispatch(buffer, x, idx, weights, EXPERTS)
        answers = answer(mine, found.rows, found.topk_idx, found.topk_weights)
        return functional.combine(buffer, answers, found.handle)

    whole = Model(lambda *given: all_in_one(everyone, *given))
    model: Any = Model(parallel)
    if dense == "ddp":
        model = DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(devices.kind(), (SIZE,))
        for layer in (model.dense, model.router):
            fully_shard(layer, mesh=mesh)
    rows = slice(me.rank * TOKENS, (me.rank + 1) * TOKENS)
    for batch in batches(4):
        loss = step(model, [*model.parameters(), *mine.parameters()], batch, rows)
        descend(model.parameters())
        # An expert's gradient is the sum over all ranks' losses, and theirs is the mean.
        descend(mine.parameters(), 1 / SIZE)
        expected = step(whole, [*whole.parameters(), *everyone.parameters()], batch, slice(None))
        descend(whole.parameters())
        descend(everyone.parameters())
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(loss, expected, rtol=2e-3, atol=2e-3)
    wanted = [
        one for e in range(EXPERTS) if owners[e] == me.rank for one in everyone[e].parameters()
    ]
    torch.testing.assert_close(list(mine.parameters()), wanted, rtol=2e-2, atol=2e-3)
    found = [getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()]
    torch.testing.assert_close(
        [one.detach() for one in found], [one.detach() for one in whole.parameters()],
        rtol=2e-2, atol=2e-3,
    )  # fmt: skip


@pytest.mark.parametrize("dense", ["ddp", "fsdp"])
@pytest.mark.parametrize("way", ["cpu", "device", "kernels"])
def test_training_has_the_loss_of_one_process(way, dense):
    options: dict[str, Any] = {"backend": "mooncake"}
    if way != "cpu":
        devices.prepare(DEVICE)
        kernels = str(int(way == "kernels"))
        options["env"] = {devices.VARIABLE: DEVICE, "MOONCAKE_EP_KERNELS": kernels}
    harness.run_ranks(SIZE, trains, dense, **options)


def gradients(me: harness.Rank, **how: Any) -> None:
    """Each is the other's backward, number by number."""
    buffer = Buffer(dist.group.WORLD, 1 << 20)
    _, _, idx = batches(1)[0]
    idx = idx[me.rank * TOKENS : (me.rank + 1) * TOKENS].clone()
    idx[0] = -1
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.ones(TOKENS, TOPK, requires_grad=True)
    found = functional.dispatch(buffer, x, idx, weights, EXPERTS, **how)
    rows = found.rows * (me.rank + 1)
    combined = functional.combine(buffer, rows, found.handle)
    (combined.float().sum() * 2 + found.topk_weights.sum() * 3).backward()
    owners = torch.tensor([*reference.default_owners(EXPERTS, SIZE), -1])[idx]
    is_there = torch.stack([(owners == rank).any(dim=1) for rank in range(SIZE)], dim=1)
    scale = (is_there * (torch.arange(SIZE) + 1)).sum(dim=1, keepdim=True)
    assert torch.equal(x.grad, (2 * scale).expand(-1, HIDDEN).bfloat16())
    assert torch.equal(weights.grad, 3.0 * (idx >= 0))


def test_gradients(crews):
    crews.get("shm", SIZE).call(gradients)


def test_gradients_of_results_of_a_fixed_size(crews):
    crews.get("shm", SIZE).call(functools.partial(gradients, num_worst_tokens=SIZE * TOKENS + 3))


def survives(me: harness.Rank, victim: int) -> None:
    """A rank dies between forward and backward: the gradients are those without its rows."""
    buffer = Buffer(dist.group.WORLD, 1 << 20)
    _, _, all_idx = batches(1)[0]
    idx = all_idx[me.rank * TOKENS : (me.rank + 1) * TOKENS]
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    found = functional.dispatch(buffer, x, idx, torch.ones(TOKENS, TOPK), EXPERTS)
    rows = found.rows.detach().requires_grad_()
    combined = functional.combine(buffer, rows, found.handle)
    me.board.set(f"forward-{me.rank}")
    me.board.wait_all("forward", range(SIZE))
    if me.rank == victim:
        signal.raise_signal(signal.SIGKILL)
    combined.float().sum().backward()
    lengths = torch.diff(found.handle[0][:, me.rank].long(), prepend=torch.zeros(1).long())
    sources = torch.repeat_interleave(torch.arange(SIZE), lengths)
    assert torch.equal(rows.grad, (sources != victim).bfloat16().unsqueeze(1).expand_as(rows))
    found.rows.backward(rows.grad)
    owners = torch.tensor(reference.default_owners(EXPERTS, SIZE))[idx]
    ranks = [rank for rank in range(SIZE) if rank != victim]
    copies = torch.stack([(owners == rank).any(dim=1) for rank in ranks]).sum(dim=0)
    assert torch.equal(x.grad, copies.bfloat16().unsqueeze(1).expand_as(x))


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_dies_between_forward_and_backward(victim):
    with harness.starting(SIZE, survives, victim) as ranks:
        ranks.results(dead=[victim])
