"""Makes the backend of a group, and finds it again."""

from __future__ import annotations

import atexit
import functools
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from mooncake_backend import distribution, extension
from mooncake_backend.options import MooncakeBackendOptions

if TYPE_CHECKING:
    from mooncake_backend._C import MooncakeBackend


def create_backend(backend_name: str, dist_opts: Any, options: Any = None) -> MooncakeBackend:
    """What torch.distributed calls for each group of ours that this rank is in."""
    distribution.check()
    native = extension.load()
    backend: MooncakeBackend = native.create_backend(
        dist_opts.store,
        dist_opts.group_rank,
        dist_opts.group_size,
        list(dist_opts.global_ranks_in_group),
        dist_opts.group_id,
        dist_opts.timeout,
        backend_name,
        _options(options).for_group(dist_opts.group_size),
        _world(),
    )
    _leave_at_exit()
    return backend


@functools.cache
def _leave_at_exit() -> None:
    """A process that ends without destroy_process_group() ends what it called and says goodbye,
    while Python still runs; its peers would take it for dead otherwise."""
    atexit.register(_leave)


def _leave() -> None:
    groups = list(dist.distributed_c10d._world.pg_map)
    backends = [backend for group in groups if (backend := _find(group)) is not None]
    for backend in backends:
        backend.leave_group()
    for backend in backends:
        backend.leave_job()


def backend_of(group_or_backend: Any) -> MooncakeBackend:
    """The backend of a process group, or the given backend itself; both are passed by callers."""
    found = _find(group_or_backend)
    if found is None:
        raise ValueError(f"{group_or_backend!r} is neither a mooncake group nor its backend")
    return found


def _options(options: Any) -> MooncakeBackendOptions:
    if options is None:
        return MooncakeBackendOptions.from_environment()
    if isinstance(options, MooncakeBackendOptions):
        return options
    # In a group of several backends, torch hands the options of one of them to all.
    if isinstance(options, Backend.Options):
        return MooncakeBackendOptions.from_environment()
    raise TypeError(f"pg_options must be MooncakeBackendOptions, not {type(options).__name__}")


def _world() -> MooncakeBackend | None:
    """The default group's backend, whose engine the groups made after it share."""
    return _find(dist.group.WORLD) if dist.is_initialized() else None


def _find(group_or_backend: Any) -> MooncakeBackend | None:
    candidates = [group_or_backend]
    if isinstance(group_or_backend, dist.ProcessGroup):
        candidates = [
            group_or_backend._get_backend(device) for device in group_or_backend._device_types
        ]
    native = extension.load()
    for candidate in candidates:
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every backend.
        backend = getattr(candidate, "wrapped_pg", candidate)
        if isinstance(backend, native.MooncakeBackend):
            return cast("MooncakeBackend", backend)
    return None
