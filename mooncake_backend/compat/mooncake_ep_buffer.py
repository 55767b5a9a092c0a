"""`from mooncake.mooncake_ep_buffer import Buffer`. Mooncake's M2NBuffer takes EventOverlap."""

from mooncake_backend import __version__ as __version__
from mooncake_backend.ep.events import EventOverlap
from mooncake_backend.ep.mooncake_buffer import Buffer, get_ep_buffer_size_hint

__all__ = ["Buffer", "EventOverlap", "get_ep_buffer_size_hint"]
