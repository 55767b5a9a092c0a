"""Process groups, seeds and output of DeepEP's programs."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class _State:
    local_rank: int = 0
    global_seed: int = 0


_state = _State()


def init_seed(global_seed: int) -> None:
    """The seed of this rank is global_seed + rank."""
    _state.global_seed = global_seed
    torch.manual_seed(get_local_seed())
    random.seed(get_local_seed())


def get_global_seed() -> int:
    return _state.global_seed


def get_local_seed() -> int:
    return _state.global_seed + dist.get_rank()


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints on all ranks, or on the first rank of each host; then a barrier."""
    if _state.local_rank == 0 or not once_in_node:
        print(f"{s}\n", end="", flush=True)  # one write, so lines of ranks do not mix
    dist.barrier()


def init_dist(
    local_rank: int, num_local_ranks: int, seed: int = 0
) -> tuple[int, int, dist.ProcessGroup | None]:
    """Returns the rank, the size and a group of all ranks. WORLD_SIZE is the number of hosts, 1 if
    it is not set, and RANK the number of this host. Makes bfloat16 the default dtype."""
    hosts, host = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = os.environ.get("MASTER_PORT", "8361")
    size = hosts * num_local_ranks
    dist.init_process_group(
        "mooncake",
        init_method=f"tcp://{address}:{port}",
        world_size=size,
        rank=host * num_local_ranks + local_rank,
    )
    torch.set_default_dtype(torch.bfloat16)
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        torch.set_default_device("cuda")
    _state.local_rank = local_rank
    init_seed(seed)
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(size)))
