"""`from deep_ep.buffers.legacy import Buffer`."""

from mooncake.ep import Buffer

__all__ = ["Buffer"]
