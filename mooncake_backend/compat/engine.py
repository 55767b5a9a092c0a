"""`from mooncake.engine import TransferEngine`."""

from mooncake_backend.engine import *  # noqa: F403
from mooncake_backend.engine import __all__ as __all__
