"""`from deep_ep.buffer import Buffer`."""

from mooncake_backend.ep import Buffer

__all__ = ["Buffer"]
