"""torch's calls for objects (all_gather_object() and its like) after a loss."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from mooncake_backend.group import find_backend


@functools.cache
def read_lost_parts_as_none() -> None:
    """Makes torch's calls for objects return None as the part of a lost rank, in groups of ours.

    These calls gather the sizes of pickled objects, then their bytes, and unpickle each part. The
    parts of lost ranks are zeros, which is no pickle, so torch would raise. The backend cannot
    tell these calls from other calls: it gets plain tensors. Therefore the function with which
    torch unpickles a part is replaced."""
    unpickle = dist.distributed_c10d._tensor_to_object

    @functools.wraps(unpickle)
    def unpickle_unless_lost(
        tensor: torch.Tensor, tensor_size: Any, group: Any, *weights_only: bool
    ) -> Any:
        # Neither a pickle nor a file of torch.save(), which later versions of torch send for
        # weights_only, is ever empty or begins with a zero byte. If the rank was lost between the
        # two calls, its size is there and its bytes are zeros.
        is_pickle = int(tensor_size) != 0 and int(tensor[0]) != 0
        if not is_pickle and find_backend(group or dist.group.WORLD) is not None:
            return None
        return unpickle(tensor, tensor_size, group, *weights_only)

    dist.distributed_c10d._tensor_to_object = unpickle_unless_lost
