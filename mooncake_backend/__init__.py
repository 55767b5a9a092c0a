"""A fault-tolerant PyTorch c10d backend: `torch.distributed.init_process_group("mooncake")`.

`import torch` imports this file through the `torch.backends` entry point, so it stays light:
everything else is imported when it is asked for.
"""

from __future__ import annotations

import importlib
import logging

__version__ = "0.1.0"

_HOMES = {
    "DistributionConflictError": "distribution",
    "EvictedError": "errors",
    "Evidence": "membership",
    "InputsLostError": "errors",
    "MinorityError": "errors",
    "MooncakeBackendOptions": "options",
    "PeerLostError": "errors",
    "get_active_ranks": "membership",
    "get_current_epoch": "membership",
    "get_evidence": "membership",
    "get_failed_ranks_hint": "membership",
    "get_local_success": "membership",
    "register": "registration",
    "set_device_filter": "options",
    "set_host_ip": "options",
}

__all__ = [
    "DistributionConflictError",
    "EvictedError",
    "Evidence",
    "InputsLostError",
    "MinorityError",
    "MooncakeBackendOptions",
    "PeerLostError",
    "__version__",
    "get_active_ranks",
    "get_current_epoch",
    "get_evidence",
    "get_failed_ranks_hint",
    "get_local_success",
    "register",
    "register_at_import",
    "set_device_filter",
    "set_host_ip",
]


def register_at_import() -> None:
    """The entry point. An exception here would break `import torch` for everyone: none leaves."""
    try:
        importlib.import_module("mooncake_backend.registration").register()
    except Exception as error:
        logging.getLogger(__name__).warning("the mooncake backends are not registered: %r", error)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
