"""`from mooncake.engine import TransferEngine`."""

from mooncake_backend.transfer import *  # noqa: F403
from mooncake_backend.transfer import __all__ as __all__
