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
    "Evidence": "membership",
    "MooncakeBackendOptions": "options",
    "get_active_ranks": "membership",
    "get_evidence": "membership",
    "register": "registration",
    "set_device_filter": "options",
    "set_host_ip": "options",
}

__all__ = [
    "DistributionConflictError",
    "Evidence",
    "MooncakeBackendOptions",
    "__version__",
    "get_active_ranks",
    "get_evidence",
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
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
