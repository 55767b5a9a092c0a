"""`from deep_ep.buffers.elastic import ElasticBuffer, EPHandle`."""

from mooncake_backend.ep import ElasticBuffer, EPHandle

__all__ = ["EPHandle", "ElasticBuffer"]
