"""`from deep_ep.buffer import Buffer`."""

from mooncake.ep import Buffer

__all__ = ["Buffer"]
