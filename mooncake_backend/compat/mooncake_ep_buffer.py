"""`from mooncake.mooncake_ep_buffer import Buffer`."""

from mooncake.ep.mooncake_buffer import Buffer, get_ep_buffer_size_hint
from mooncake_backend import __version__ as __version__

__all__ = ["Buffer", "get_ep_buffer_size_hint"]
