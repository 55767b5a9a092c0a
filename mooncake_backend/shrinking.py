"""torch.distributed.shrink_group() for groups of ours: the backend makes the smaller group, and
torch puts it in the place of the old one. Two of torch's functions for that are replaced."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from mooncake_backend import extension
from mooncake_backend.registration import BACKENDS
from mooncake_backend.replacing import note_growth


@functools.cache
def correct_shrunk_groups() -> None:
    torch_parts: Any = dist.distributed_c10d
    if not hasattr(torch_parts, "_finalize_shrunk_group"):  # since torch 2.10
        return
    create = torch_parts._create_shrunk_process_group
    finalize = torch_parts._finalize_shrunk_group

    @functools.wraps(create)
    def create_named(
        new_backend: Any, remaining_ranks: list[int], metadata: dict[str, Any], is_default: bool
    ) -> Any:
        """torch's group would serve one device only, and have a clone of the store. For that torch
        connects to the store's server again, when the old group is gone already. If the server was
        in a lost rank, no group would be left. new_group() shares the connection, too."""
        native = extension.load()
        if not isinstance(new_backend, native.MooncakeBackend):
            return create(new_backend, remaining_ranks, metadata, is_default)
        backends = torch_parts.BackendConfig(dist.Backend(metadata["backend_config"]))
        served = backends.get_device_backend_map().items()
        name = metadata["new_group_name"]
        group = native.group_of(
            PrefixStore(f"{name}/", metadata["store"]),
            new_backend,
            [device for device, backend in served if backend in BACKENDS],
        )
        if metadata["bound_device_id"] is not None:
            group.bound_device_id = metadata["bound_device_id"]
        group._set_group_name(name)
        group._set_group_desc(
            "default:shrunken" if is_default else f"{metadata['original_group_name']}:shrunk"
        )
        return group

    @functools.wraps(finalize)
    def finalize_with_right_ranks(
        group_info: dict[str, Any], excluded: set[int], new_backend: Any
    ) -> Any:
        """torch notes the ranks that are left as if the excluded ones were global ranks."""
        note_growth()
        ranks = dist.get_process_group_ranks(group_info["process_group"])
        group = finalize(group_info, excluded, new_backend)
        left = [name for rank, name in enumerate(ranks) if rank not in excluded]
        torch_parts._world.pg_group_ranks[group] = {name: rank for rank, name in enumerate(left)}
        return group

    torch_parts._create_shrunk_process_group = create_named
    torch_parts._finalize_shrunk_group = finalize_with_right_ranks
