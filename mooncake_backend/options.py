"""What a group can be told: MooncakeBackendOptions and process-wide settings.

The environment is read by one table, csrc/base/env.cc, when a group is made. Only the two variables
that programs written for another backend set are read here: they are checked and change nothing, so
the native part does not know them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, overload

import torch

ON_FAILURE = ("continue", "raise")

_settings: dict[str, Any] = {"host_ip": None, "device_filter": []}


def set_host_ip(host: str) -> None:
    """The address that later groups listen on and publish. Overrides MOONCAKE_HOST_IP."""
    if not isinstance(host, str) or not host:
        raise ValueError(f"set_host_ip takes an address as a non-empty string, not {host!r}")
    _settings["host_ip"] = host


def set_device_filter(filters: Iterable[str]) -> None:
    """NICs that groups made from now on may use; names that do not exist here are ignored."""
    names = [filters] if isinstance(filters, str) else list(filters)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"set_device_filter takes device names, not {names!r}")
    _settings["device_filter"] = names


@dataclass(init=False)
class MooncakeBackendOptions:
    """`pg_options` of init_process_group and new_group.

    active_ranks: int32 tensor in which the group shows who is alive, 1 or 0 per rank
    is_extension: this rank joins an existing group
    max_group_size: how many ranks the group may grow to; None is its first size
    auto_deactivate_on_failure, auto_sync_on_failure: whether a failure changes the view by itself
    transports: names in order of preference; None allows all
    failure_timeout: seconds after which a silent rank counts as lost; None is the default
    on_failure: "continue": operations complete over the survivors; "raise": the one that a loss
    interrupts raises PeerLostError on all of them. The same on all ranks; None is the default
    """

    active_ranks: torch.Tensor | None = None
    is_extension: bool = False
    max_group_size: int | None = None
    auto_deactivate_on_failure: bool = True
    auto_sync_on_failure: bool = True
    transports: tuple[str, ...] | None = None
    failure_timeout: float | None = None
    on_failure: Literal["continue", "raise"] | None = None

    @overload
    def __init__(
        self,
        active_ranks: torch.Tensor | None = None,
        is_extension: bool = False,
        max_group_size: int | None = None,
        *,
        max_world_size: int | None = None,
        auto_deactivate_on_failure: bool = True,
        auto_sync_on_failure: bool = True,
        transports: Sequence[str] | None = None,
        failure_timeout: float | timedelta | None = None,
        on_failure: Literal["continue", "raise"] | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        max_group_size: int,
        is_extension: bool = False,
        auto_deactivate_on_failure: bool = True,
        auto_sync_on_failure: bool = True,
        *,
        transports: Sequence[str] | None = None,
        failure_timeout: float | timedelta | None = None,
        on_failure: Literal["continue", "raise"] | None = None,
    ) -> None: ...

    def __init__(self, *positional: Any, **named: Any) -> None:
        # Both forms are in use; the type of the first argument tells which one is meant.
        if positional and _is_int(positional[0]):
            order = [
                "max_group_size",
                "is_extension",
                "auto_deactivate_on_failure",
                "auto_sync_on_failure",
            ]
        else:
            order = ["active_ranks", "is_extension", "max_group_size"]
        if len(positional) > len(order):
            raise TypeError(
                f"MooncakeBackendOptions takes at most ({', '.join(order)}) by position"
            )
        values = dict(zip(order, positional, strict=False))
        if "max_world_size" in named:
            if "max_group_size" in named:
                raise TypeError("max_world_size and max_group_size are the same thing: give one")
            named["max_group_size"] = named.pop("max_world_size")
        for name, value in named.items():
            if name not in self.__dataclass_fields__:
                known = ", ".join(self.__dataclass_fields__)
                raise TypeError(f"MooncakeBackendOptions has no {name!r}; it has {known}")
            if name in values:
                raise TypeError(f"MooncakeBackendOptions got {name!r} twice")
            values[name] = value
        for name, value in values.items():
            setattr(self, name, value)
        self._validate()

    def _validate(self) -> None:
        ranks = self.active_ranks
        if ranks is not None:
            if not isinstance(ranks, torch.Tensor):
                raise TypeError(f"active_ranks must be a tensor, not {type(ranks).__name__}")
            if ranks.dtype != torch.int32:
                raise ValueError(f"active_ranks must be an int32 tensor, not {ranks.dtype}")
            if ranks.dim() != 1 or not ranks.is_contiguous():
                raise ValueError("active_ranks must be contiguous and have one dimension")
        for name in ("is_extension", "auto_deactivate_on_failure", "auto_sync_on_failure"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.max_group_size == -1:
            self.max_group_size = None
        if self.max_group_size is not None:
            if not _is_int(self.max_group_size):
                raise TypeError(f"max_group_size must be an int, not {self.max_group_size!r}")
            if self.max_group_size < 1:
                raise ValueError(f"max_group_size must be positive, not {self.max_group_size}")
        if self.auto_sync_on_failure and not self.auto_deactivate_on_failure:
            raise ValueError("auto_sync_on_failure needs auto_deactivate_on_failure")
        if self.transports is not None:
            if isinstance(self.transports, str):
                raise TypeError(f"transports must be a tuple of names: ({self.transports!r},)")
            self.transports = tuple(self.transports)
            if not self.transports or not all(isinstance(name, str) for name in self.transports):
                raise ValueError(f"transports must be names, at least one: {self.transports!r}")
        if isinstance(self.failure_timeout, timedelta):
            self.failure_timeout = self.failure_timeout.total_seconds()
        if self.failure_timeout is not None and not self.failure_timeout > 0:
            raise ValueError(f"failure_timeout must be positive, not {self.failure_timeout}")
        if self.on_failure not in (None, *ON_FAILURE):
            raise ValueError(f"on_failure must be one of {ON_FAILURE}, not {self.on_failure!r}")

    @classmethod
    def from_environment(cls) -> MooncakeBackendOptions:
        """The options of a group that was given none."""
        return cls(
            auto_deactivate_on_failure=_flag("MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE"),
            auto_sync_on_failure=_flag("MOONCAKE_PG_AUTO_SYNC_ON_FAILURE"),
        )

    def for_group(self, size: int) -> dict[str, Any]:
        """What the extension gets for a group of `size` ranks; checks what depends on the size."""
        capacity = self.max_group_size or size
        if capacity < size:
            raise ValueError(f"max_group_size is {capacity}, but the group has {size} ranks")
        ranks = self.active_ranks
        if ranks is None:
            ranks = torch.ones(capacity, dtype=torch.int32)
        elif ranks.numel() < capacity:
            raise ValueError(
                f"active_ranks has {ranks.numel()} elements, the group may have {capacity} ranks"
            )
        return {
            "active_ranks": ranks,
            "is_extension": self.is_extension,
            "max_group_size": capacity,
            "auto_deactivate_on_failure": self.auto_deactivate_on_failure,
            "auto_sync_on_failure": self.auto_sync_on_failure,
            "transports": None if self.transports is None else list(self.transports),
            "failure_timeout": self.failure_timeout,
            "on_failure": self.on_failure,
            "host_ip": _settings["host_ip"],
            "device_filter": list(_settings["device_filter"]),
        }


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _flag(name: str) -> bool:
    value = os.environ.get(name, "1").strip().lower()
    if value not in ("0", "1", "false", "true", "off", "on", "no", "yes"):
        raise ValueError(f"{name} is {value!r}; it must be 0 or 1")
    return value in ("1", "true", "on", "yes")
