"""Settings of a group: MooncakeBackendOptions, and settings for the whole process.

Native code reads our variables when a group is made (docs/environment.md). Only two are read here,
which programs for upstream's backend set. If they ask for a feature that this version lacks, making
a group raises an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, overload

import torch

ON_FAILURE = ("continue", "raise")
LOST_MESSAGES = ("raise", "return")
# The largest group in the tests (tests/cpp/collectives/large_group_test.cc).
TESTED_RANKS = 64

# Values of the set_ functions: defaults of later groups whose options do not set them.
_settings: dict[str, Any] = {
    "engine": None,
    "host_ip": None,
    "devices": [],
    "failure_timeout": None,
    "message_timeout": None,
}
# Lower bound, in seconds, of set_collective_timeout_us(). Upstream's default was once a tenth of
# it, and callers still set that. A healthy rank may be silent for so short a time.
_LEAST_TIMEOUT = 1.0
# Bounds of a failure timeout in seconds, as for MOONCAKE_FAILURE_TIMEOUT_MS.
_FAILURE_TIMEOUTS = (0.01, 86400.0)
# Largest timeout in microseconds: 31 years.
_MOST_MICROSECONDS = 10**15

_FLAGS = ("auto_deactivate_on_failure", "auto_sync_on_failure")


def set_host_ip(host: str) -> None:
    """The address that later groups listen on and publish. Overrides MOONCAKE_HOST_IP."""
    if not isinstance(host, str) or not host:
        raise ValueError(f"set_host_ip takes an address as a non-empty string, not {host!r}")
    _settings["host_ip"] = host


def set_transfer_engine(engine: Any) -> None:
    """Makes later default groups, and later Buffers over groups of other backends, run on this
    engine. `engine`: an initialized mooncake.engine.TransferEngine with a key (MOONCAKE_JOB_KEY,
    the same on all ranks), or the result of its get_engine(). One group or Buffer at a time may use
    it. All ranks must set one, or none. None: each group makes its own engine again."""
    if engine is not None:
        engine = engine.get_engine() if hasattr(engine, "get_engine") else engine
        if not hasattr(engine, "has_key"):
            raise TypeError(f"set_transfer_engine takes a TransferEngine, not {engine!r}")
        if not engine.has_key:
            raise ValueError(
                "set_transfer_engine: the engine has no key, and ranks of a job always have one. "
                "Set MOONCAKE_JOB_KEY, the same on all ranks, before the engine is initialized"
            )
    _settings["engine"] = engine


def transfer_engine() -> Any:
    """The engine of set_transfer_engine(), as returned by its get_engine(), or None."""
    return _settings["engine"]


def set_device_filter(filters: Iterable[str]) -> None:
    """The network cards that later groups and Buffers use, by name or address. Overrides
    MC_TE_FILTERS; an empty list leaves it to MC_TE_FILTERS. Transports without cards do not read
    it."""
    names = [filters] if isinstance(filters, str) else list(filters)
    if not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"set_device_filter takes device names, not {names!r}")
    _settings["devices"] = names


def device_filter() -> list[str]:
    """The names that set_device_filter() has set."""
    return list(_settings["devices"])


def set_collective_timeout_us(us: int) -> None:
    """Failure timeout, in microseconds, of later groups whose options have none; at least a second.
    A rank that other ranks wait for, and that gives no sign of life for this time, counts as lost.
    A rank that lives is waited for until the group's timeout."""
    seconds = max(microseconds("set_collective_timeout_us", us), _LEAST_TIMEOUT)
    _check_failure_timeout(seconds)
    _settings["failure_timeout"] = seconds


def set_p2p_timeout_us(us: int) -> None:
    """Timeout, in microseconds, after which a send or a receive of later groups raises. Without it,
    or with 0, the group's timeout applies."""
    _settings["message_timeout"] = microseconds("set_p2p_timeout_us", us) or None


def microseconds(function: str, us: int) -> float:
    """Checks microseconds, and returns them in seconds. `function` is named in the errors."""
    if not _is_int(us):
        raise TypeError(f"{function} takes microseconds as an int, not {us!r}")
    if us < 0:
        raise ValueError(f"{function} takes microseconds, not the negative number {us}")
    if us > _MOST_MICROSECONDS:
        raise ValueError(f"{function} takes at most {_MOST_MICROSECONDS} microseconds, not {us}")
    return int(us) / 1e6


@dataclass(init=False)
class MooncakeBackendOptions:
    """`pg_options` of init_process_group and new_group.

    active_ranks: int32 tensor in which the group marks each rank, 1 = alive, 0 = lost
    max_group_size: number of ranks that the group may grow to; None is its first size.
    Memory is laid out for as many, on all ranks. At most 64: the largest tested group
    is_extension: this process comes to a running job, in place of a lost rank or behind the last
    one, as MOONCAKE_REJOIN=1 says for the default group. The group has it alone until join_group()
    auto_sync_on_failure: False: get_active_ranks() shows a lost rank as active, and
    get_local_success() is False for each operation that lacks it, until sync_after_failure()
    auto_deactivate_on_failure: False, only with auto_sync_on_failure=False: until
    deactivate_ranks(), or another change of the group. Operations go on without the rank all the
    same. Both the same on all ranks
    transports: names in order of preference; None allows all
    failure_timeout: seconds after which a silent rank counts as lost, from 0.01 to a day; None is
    the default
    on_failure: "continue": operations complete over the survivors; "raise": an operation that a
    loss interrupts raises PeerLostError on all survivors. The same on all ranks; None is the
    default
    lost_messages: behavior of wait() of a send or a receive whose other side is lost. "raise": it
    raises PeerLostError. "return": it returns, a receive's tensor is zeros, and
    get_local_success(work) is False; a send ends when it has been received; only with on_failure
    "continue". None is "raise", and "return" in the class of this name in mooncake.pg
    """

    active_ranks: torch.Tensor | None = None
    is_extension: bool = False
    max_group_size: int | None = None
    auto_deactivate_on_failure: bool = True
    auto_sync_on_failure: bool = True
    transports: tuple[str, ...] | None = None
    failure_timeout: float | None = None
    on_failure: Literal["continue", "raise"] | None = None
    lost_messages: Literal["raise", "return"] | None = None
    _LOST_MESSAGES: ClassVar[str] = "raise"

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
        lost_messages: Literal["raise", "return"] | None = None,
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
        lost_messages: Literal["raise", "return"] | None = None,
    ) -> None: ...

    def __init__(self, *positional: Any, **named: Any) -> None:
        # Callers use both forms; the type of the first argument tells them apart.
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
        for name in ("is_extension", *_FLAGS):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.max_group_size == -1:
            self.max_group_size = None
        if self.max_group_size is not None:
            if not _is_int(self.max_group_size):
                raise TypeError(f"max_group_size must be an int, not {self.max_group_size!r}")
            if self.max_group_size < 1:
                raise ValueError(f"max_group_size must be positive, not {self.max_group_size}")
            self.max_group_size = int(self.max_group_size)
        if self.auto_sync_on_failure and not self.auto_deactivate_on_failure:
            raise ValueError(
                "auto_deactivate_on_failure=False needs auto_sync_on_failure=False: a lost rank "
                "that stays until deactivate_ranks() cannot be taken out before"
            )
        if self.transports is not None:
            if isinstance(self.transports, str):
                raise TypeError(f"transports must be a tuple of names: ({self.transports!r},)")
            self.transports = tuple(self.transports)
            if not self.transports or not all(isinstance(name, str) for name in self.transports):
                raise ValueError(f"transports must be names, at least one: {self.transports!r}")
        if isinstance(self.failure_timeout, timedelta):
            self.failure_timeout = self.failure_timeout.total_seconds()
        _check_failure_timeout(self.failure_timeout)
        if self.failure_timeout is not None:
            self.failure_timeout = float(self.failure_timeout)
        if self.on_failure not in (None, *ON_FAILURE):
            raise ValueError(f"on_failure must be one of {ON_FAILURE}, not {self.on_failure!r}")
        if self.lost_messages not in (None, *LOST_MESSAGES):
            raise ValueError(
                f"lost_messages must be one of {LOST_MESSAGES}, not {self.lost_messages!r}"
            )

    @classmethod
    def from_environment(cls) -> MooncakeBackendOptions:
        """Default options, from the environment, for a group without options."""
        return cls(
            auto_deactivate_on_failure=env_flag("MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE"),
            auto_sync_on_failure=env_flag("MOONCAKE_PG_AUTO_SYNC_ON_FAILURE"),
        )

    def for_group(self, size: int) -> dict[str, Any]:
        """The options as a dict, for the extension and a group of `size` ranks. Checks the options
        that depend on the size, and options that were changed since __init__."""
        self._validate()
        capacity = self.max_group_size or size
        if capacity < size:
            raise ValueError(f"max_group_size is {capacity}, but the group has {size} ranks")
        if capacity > max(size, TESTED_RANKS):
            raise ValueError(
                f"max_group_size is {capacity}, but no group that may grow was tested beyond "
                f"{TESTED_RANKS} ranks: give at most {TESTED_RANKS}, or leave it out"
            )
        ranks = self.active_ranks
        if ranks is None:
            ranks = torch.zeros(capacity, dtype=torch.int32, device="cpu")
            ranks[:size] = 1
        elif ranks.numel() < capacity:
            raise ValueError(
                f"active_ranks has {ranks.numel()} elements, the group may have {capacity} ranks"
            )
        stays_until = None if self.auto_sync_on_failure else "synced"
        if not self.auto_deactivate_on_failure:
            stays_until = "deactivated"
        return {
            "active_ranks": ranks,
            "lost_ranks_stay_until": stays_until,
            "reads_active_ranks": self.active_ranks is not None,
            "max_group_size": capacity,
            "transports": None if self.transports is None else list(self.transports),
            "failure_timeout": self.failure_timeout or _settings["failure_timeout"],
            "message_timeout": _settings["message_timeout"],
            "on_failure": self.on_failure,
            "lost_messages": self.lost_messages or self._LOST_MESSAGES,
            "host_ip": _settings["host_ip"],
            "devices": device_filter(),
            "engine": transfer_engine(),
        }


def _check_failure_timeout(seconds: object) -> None:
    """Not even "never" is allowed: a silent rank would block all other ranks for ever."""
    if seconds is None:
        return
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        raise TypeError(f"failure_timeout takes seconds or a timedelta, not {seconds!r}")
    least, most = _FAILURE_TIMEOUTS
    if not least <= float(seconds) <= most:  # nor NaN
        raise ValueError(
            f"failure_timeout is {seconds} seconds; it must be at least {least} and at most "
            f"{most:.0f}, a day"
        )


class UpstreamOptions(MooncakeBackendOptions):
    """`mooncake.pg.MooncakeBackendOptions`. Programs for upstream wait for messages without an
    exception handler, and then call get_local_success(work). So lost_messages is "return" unless it
    is given."""

    _LOST_MESSAGES = "return"


def _is_int(value: object) -> bool:
    """Also for NumPy's integers."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def env_flag(name: str, default: str = "1") -> bool:
    value = os.environ.get(name, default).strip().lower()
    if value not in ("0", "1", "false", "true", "off", "on", "no", "yes"):
        raise ValueError(f"{name} is {value!r}; it must be 0 or 1")
    return value in ("1", "true", "on", "yes")
