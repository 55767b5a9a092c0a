"""Makes the backend of a group, and finds it again later."""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing.util
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, DebugLevel, get_debug_level

from mooncake_backend import distribution, extension
from mooncake_backend.launcher import notices
from mooncake_backend.options import MooncakeBackendOptions, env_flag
from mooncake_backend.registration import BACKENDS
from mooncake_backend.token import token_in

if TYPE_CHECKING:
    from mooncake_backend._C import MooncakeBackend


def create_group(
    backend_name: str, dist_opts: Any, options: Any = None
) -> MooncakeBackend | dist.ProcessGroup:
    """Called by torch.distributed for each group of ours that has this rank. If the group has no
    backends but ours, one serves all its devices, and gives the group its name; c10d would call it
    "custom"."""
    backends, bound_device = _asked_for()
    is_only = backends.keys() <= BACKENDS.keys()
    devices = [device for of_backend in backends.values() for device in of_backend]
    if is_only and "mooncake" in backends:
        backend_name = "mooncake"  # it has the devices of "mooncake-cpu", too
    backend = create_backend(backend_name, dist_opts, options)
    world = _world()
    if dist.distributed_c10d._is_barrier_after_init() and world is not None:
        _stand_in_for_the_lost(world, dist_opts)
    # Otherwise torch makes its own group, to which it adds other backends or a wrapper of this one.
    if not devices or not is_only or get_debug_level() == DebugLevel.DETAIL:
        return backend
    group: dist.ProcessGroup = extension.load().group_of(dist_opts.store, backend, devices)
    if bound_device is not None:
        group.bound_device_id = bound_device
    return group


def _asked_for() -> tuple[dict[str, list[str]], torch.device | None]:
    """The backends of the group that torch is making, with their devices, and the device that it is
    bound to. torch accepts a whole group from the function that makes a backend, but does not tell
    that function about other backends. Only a frame of torch's has them."""
    local = _locals_of("_new_process_group_helper")
    backends: dict[str, list[str]] = {}
    if (config := local.get("backend_config")) is not None:
        for device, name in config.get_device_backend_map().items():
            backends.setdefault(name, []).append(device)
    return backends, local.get("device_id")


def _locals_of(caller: str) -> dict[str, Any]:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != caller:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _stand_in_for_the_lost(world: MooncakeBackend, dist_opts: Any) -> None:
    """With TORCH_DIST_INIT_BARRIER=1, new_group() ends in torch's own barrier, which counts all
    ranks in the store, lost ones included. Before the members enter it, they count for the lost
    ranks, one member for each."""
    is_local = _locals_of("_new_group_with_tag").get("use_local_synchronization")
    if is_local is None:  # new_group() is not the caller: there is no barrier
        return
    store = dist_opts.store.underlying_store  # without the device's prefix
    ranks = dist_opts.global_ranks_in_group
    if not is_local:
        store, ranks = store.underlying_store, range(world.size())
    key = f"{dist.distributed_c10d.STORE_BASED_BARRIER_PREFIX}:{dist_opts.group_id}"
    active, me = world.active_ranks.tolist(), f"rank {world.rank()}"
    for rank in ranks:
        if not active[rank]:
            first = store.compare_set(f"{key}:instead_of:{rank}", "", me)
            if first.decode() == me:
                store.add(key, 1)


def create_backend(backend_name: str, dist_opts: Any, options: Any = None) -> MooncakeBackend:
    distribution.check()
    native = extension.load()
    world = _world()
    chosen = _options(options)
    given = chosen.for_group(dist_opts.group_size)
    # A process that has come to replace a rank makes its groups before the members know of it.
    comes = env_flag("MOONCAKE_REJOIN", "0") if world is None else world.is_newcomer
    token = token_in(dist_opts.store) if world is None else None
    given["join_token"] = token
    given["is_newcomer"] = chosen.is_extension or comes or token is not None
    # Its predecessor may have died before the job began: then the others still wait for this rank.
    given["may_begin"] = not chosen.is_extension and token is None
    if world is None and not given["is_newcomer"]:
        given["launcher_key"] = notices.key_for(dist_opts.group_rank, dist_opts.group_size)
    backend: MooncakeBackend = native.create_backend(
        dist_opts.store,
        dist_opts.group_rank,
        dist_opts.group_size,
        list(dist_opts.global_ranks_in_group),
        dist_opts.group_id,
        dist_opts.timeout,
        backend_name,
        given,
        world,
    )
    _leave_at_exit()
    return backend


@functools.cache
def _leave_at_exit() -> None:
    """Makes a process that ends without destroy_process_group() finish its calls and say goodbye,
    while Python still runs. Otherwise its peers would take it for dead."""
    atexit.register(_leave)
    # Children of multiprocessing end without atexit.
    multiprocessing.util.Finalize(None, _leave, exitpriority=0)


def _leave() -> None:
    groups = list(dist.distributed_c10d._world.pg_map)
    backends = [backend for group in groups if (backend := find_backend(group)) is not None]
    failure = _failure()
    for backend in backends:
        backend.leave_group(failure)
    for backend in backends:
        backend.leave_job(failure)
    _await_callbacks()


def _await_callbacks() -> None:
    """Waits for callbacks of futures, which run on our threads, also callbacks of destroyed groups.
    Later Python ends every thread that asks for its lock, and the process with it. So the end of
    the program waits for callbacks as it does for threads of `threading`. Ctrl-C ends the wait."""
    native = extension.load()
    if native.drain_completions(seconds=3):
        return
    logging.getLogger(__name__).warning(
        "the end of the program waits for a callback of a future that still runs"
    )
    while not native.drain_completions(seconds=0.2):
        pass


def _failure() -> str | None:
    """The uncaught error that ends this program, or None."""
    # In a child of multiprocessing the exception is still being handled.
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else f"it ended by {error!r}"
    # In an interactive session the last error did not end anything.
    if error is None and not hasattr(sys, "ps1") and not sys.flags.interactive:
        error = getattr(sys, "last_value", None)
    if error is None:
        return None
    text = next(iter(str(error).splitlines()), "")[:200]
    return f"it ended by an uncaught {type(error).__name__}" + (f": {text}" if text else "")


def backend_of(group_or_backend: Any) -> MooncakeBackend:
    """The backend of a process group, or the given backend itself: callers pass both."""
    found = find_backend(group_or_backend)
    if found is None:
        raise ValueError(f"{group_or_backend!r} is neither a mooncake group nor its backend")
    return found


def _options(options: Any) -> MooncakeBackendOptions:
    if options is None:
        return MooncakeBackendOptions.from_environment()
    if isinstance(options, MooncakeBackendOptions):
        return options
    # For a group of several backends, torch passes the options of one of them to all.
    if isinstance(options, Backend.Options):
        return MooncakeBackendOptions.from_environment()
    raise TypeError(f"pg_options must be MooncakeBackendOptions, not {type(options).__name__}")


def _world() -> MooncakeBackend | None:
    """The default group's backend; later groups share its engine."""
    return find_backend(dist.group.WORLD) if dist.is_initialized() else None


def find_backend(group_or_backend: Any) -> MooncakeBackend | None:
    """Like backend_of(), but None for a group of another backend."""
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
