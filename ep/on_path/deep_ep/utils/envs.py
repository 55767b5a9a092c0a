"""Starts the process groups of DeepEP's programs."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def init_dist(local_rank: int, num_local_ranks: int) -> tuple[int, int, dist.ProcessGroup | None]:
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
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(size)))
