"""`from deep_ep.buffers.legacy import Buffer`."""

from mooncake_backend.ep import Buffer

__all__ = ["Buffer"]
