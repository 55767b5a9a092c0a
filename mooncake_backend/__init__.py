"""A fault-tolerant PyTorch c10d backend: `torch.distributed.init_process_group("mooncake")`.

`import torch` imports this file through the `torch.backends` entry point, so it stays light: all
other modules are imported on first use. With TORCH_DEVICE_BACKEND_AUTOLOAD=0 torch does not import
it; then the program's own import registers the backends.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names that __getattr__ resolves
    from mooncake_backend.distribution import DistributionConflictError
    from mooncake_backend.errors import (
        EvictedError,
        InputsLostError,
        MinorityError,
        PeerLostError,
    )
    from mooncake_backend.gradients import bf16_mean_over_contributors, mean_over_contributors
    from mooncake_backend.membership import (
        Evidence,
        acknowledge_loss,
        get_active_ranks,
        get_current_epoch,
        get_evidence,
        get_failed_ranks_hint,
        get_local_success,
    )
    from mooncake_backend.options import (
        MooncakeBackendOptions,
        set_device_filter,
        set_host_ip,
        set_transfer_engine,
    )
    from mooncake_backend.registration import register
    from mooncake_backend.replacing import admit, join_token
    from mooncake_backend.training import elastic

__version__ = "0.1.0"

_HOMES = {
    "DistributionConflictError": "distribution",
    "EvictedError": "errors",
    "Evidence": "membership",
    "InputsLostError": "errors",
    "MinorityError": "errors",
    "MooncakeBackendOptions": "options",
    "PeerLostError": "errors",
    "acknowledge_loss": "membership",
    "admit": "replacing",
    "bf16_mean_over_contributors": "gradients",
    "dump_state": "state",
    "dump_state_on_signal": "state",
    "elastic": "training",
    "get_active_ranks": "membership",
    "get_current_epoch": "membership",
    "get_evidence": "membership",
    "get_failed_ranks_hint": "membership",
    "get_local_success": "membership",
    "join_token": "replacing",
    "mean_over_contributors": "gradients",
    "register": "registration",
    "set_device_filter": "options",
    "set_host_ip": "options",
    "set_transfer_engine": "options",
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
    "acknowledge_loss",
    "admit",
    "bf16_mean_over_contributors",
    "dump_state",
    "dump_state_on_signal",
    "elastic",
    "get_active_ranks",
    "get_current_epoch",
    "get_evidence",
    "get_failed_ranks_hint",
    "get_local_success",
    "join_token",
    "mean_over_contributors",
    "register",
    "register_at_import",
    "set_device_filter",
    "set_host_ip",
    "set_transfer_engine",
]


def register_at_import() -> None:
    """The entry point. It never raises, because an exception would break `import torch`."""
    try:
        importlib.import_module("mooncake_backend.registration").register()
    except Exception as error:
        logging.getLogger(__name__).warning("the mooncake backends are not registered: %r", error)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = found
        return found


# If torch loads no backends by itself, this import registers ours. It stands at the end, because
# importing torch may come back to this file.
if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
    register_at_import()
