"""`from mooncake.mooncake_ep_buffer import Buffer`."""

from mooncake.ep import Buffer
from mooncake_backend import __version__ as __version__

__all__ = ["Buffer"]
