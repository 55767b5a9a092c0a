"""A training loop that takes in new processes between two steps."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mooncake_backend.gradients import mean_over_contributors
from mooncake_backend.group import backend_of
from mooncake_backend.replacing import admit, join_group


class ElasticJob:
    """What elastic() returns: `model`, wrapped, and `step`, the number of steps that are done."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        wrap: Callable[..., torch.nn.Module] | None,
        group: Any,
    ) -> None:
        self.group: Any = dist.group.WORLD if group is None else group
        self.step = 0
        self._plain, self._optimizer, self._wrap = model, optimizer, wrap
        backend = backend_of(self.group)
        has_state = not backend.is_newcomer
        if not has_state:
            join_group(self.group)
        self._share_state(has_state)
        self.model = self._wrapped()

    @property
    def ranks(self) -> list[int]:
        """The ranks of the group that take part now."""
        found: list[int] = backend_of(self.group).survivors
        return found

    def steps(self, count: int) -> Iterator[int]:
        """Yields the number of each step that is to be done, from `step` on, up to count. Before a
        step it lets in new processes and gives them the state. Every rank calls it."""
        is_first = True
        while self.step < count:
            # A newcomer comes behind this place, with which its first step begins.
            if not is_first and admit(self.group):
                self._share_state(has_state=True)
                del self.model  # its hooks on the parameters go before new ones come
                self.model = self._wrapped()
            is_first = False
            yield self.step
            self.step += 1

    def _wrapped(self) -> torch.nn.Module:
        if self._wrap is None:
            return self._plain
        # All ranks have the same parameters, and the constructor's exchange of them would be the
        # only call that a rank makes beside the others.
        wrapped = self._wrap(self._plain, process_group=self.group, init_sync=False)
        if isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
            wrapped.register_comm_hook(None, mean_over_contributors)
        return wrapped

    def _share_state(self, has_state: bool) -> None:
        """The lowest rank that has the state gives it to the ranks that have none; in the first
        call, to all. If that rank dies meanwhile, the next one does."""
        is_first = self.step == 0
        while True:
            backend = backend_of(self.group)
            size = backend.size()
            sender = torch.tensor(backend.rank() if has_state else size)
            dist.all_reduce(sender, op=dist.ReduceOp.MIN, group=self.group)
            if sender == size:
                raise RuntimeError(
                    f"rank {backend.rank()}: no rank has the state of the training any more: all "
                    "that had it are lost. Start again from a checkpoint"
                )
            mine = int(sender) == backend.rank()
            state = _packed(self._state()) if mine else torch.empty(0, dtype=torch.uint8)
            root = dist.get_global_rank(self.group, int(sender))
            count = torch.tensor(state.numel())
            try:
                dist.broadcast(count, root, group=self.group)
                if not mine:
                    state = torch.empty(int(count), dtype=torch.uint8)
                dist.broadcast(state, root, group=self.group)
            except RuntimeError:
                if _lives(backend, int(sender)):
                    raise
                continue
            if not mine and (is_first or not has_state):
                self._load(_unpacked(state))
            return

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self._plain.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": torch.get_rng_state(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self._plain.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["generator"])


def _lives(backend: Any, rank: int) -> bool:
    return rank in backend.survivors


def _packed(state: dict[str, Any]) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    return found


def elastic(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    wrap: Callable[..., torch.nn.Module] | None = None,
    group: Any = None,
) -> ElasticJob:
    """Makes a training loop that goes on when ranks die and when new processes take their places.

    model, optimizer: of this rank, plain; a new process gets parameters, the optimizer's state, the
        number of the step and the state of torch's generator from the lowest rank that has them
    wrap: DistributedDataParallel, or a class with its arguments; gradients are the mean over the
        ranks that took part. None: the program reduces gradients itself
    group: the process group; None is the default one. mode on_failure="continue"

    Collective. A new process (MOONCAKE_REJOIN=1) waits here until the others come to a step.

        job = elastic(model, optimizer, wrap=DistributedDataParallel)
        for step in job.steps(1000):
            optimizer.zero_grad()
            loss_of(job.model(batch(step, job.ranks))).backward()
            optimizer.step()
    """
    return ElasticJob(model, optimizer, wrap, group)
