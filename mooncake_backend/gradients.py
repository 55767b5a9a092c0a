"""Communication hooks for DistributedDataParallel.

register_comm_hook() compares their annotations, so these are no text: this file does not import
`annotations` from `__future__`."""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket


def mean_over_contributors(
    group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Gives each bucket of gradients the mean over the ranks that contributed to it. DDP itself
    divides by the size of the group, so after a loss its gradients are too small.

    `model.register_comm_hook(group, mean_over_contributors)`; None is the default group."""
    return _mean(group, bucket.buffer())


def bf16_mean_over_contributors(
    group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Like mean_over_contributors(), but the ranks exchange the gradients as bfloat16."""
    gradients = bucket.buffer()
    mean = _mean(group, gradients.to(torch.bfloat16))
    return mean.then(lambda done: gradients.copy_(done.value()))


def _mean(
    group: dist.ProcessGroup | None, gradients: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(gradients, dist.ReduceOp.AVG, group=group, async_op=True)
    mean: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return mean
