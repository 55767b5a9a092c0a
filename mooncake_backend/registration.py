"""Registers the backends' names with torch.distributed. A group's first use loads all other
code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from mooncake_backend._C import MooncakeBackend

BACKENDS = {"mooncake": ("cpu", "cuda"), "mooncake-cpu": ("cpu",)}


def register() -> None:
    """Registers "mooncake" and "mooncake-cpu". Repeating it changes nothing."""
    if not dist.is_available():
        return
    for name, devices in BACKENDS.items():
        if name.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(
                name, partial(_create, name), extended_api=True, devices=list(devices)
            )
            from torch.distributed.rendezvous import register_rendezvous_handler

            with suppress(RuntimeError):  # it is there already
                register_rendezvous_handler("mooncake", _rendezvous)


def _create(
    backend_name: str, dist_opts: Any, options: Any = None
) -> MooncakeBackend | dist.ProcessGroup:
    from mooncake_backend import objects, shrinking
    from mooncake_backend.group import create_group

    objects.read_lost_parts_as_none()
    shrinking.correct_shrunk_groups()
    return create_group(backend_name, dist_opts, options)


def _rendezvous(url: str, **given: Any) -> Iterator[tuple[Store, int, int]]:
    from mooncake_backend import token

    return token.rendezvous(url, **given)
