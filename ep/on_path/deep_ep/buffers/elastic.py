"""`from deep_ep.buffers.elastic import ElasticBuffer, EPHandle`."""

from mooncake.ep import ElasticBuffer, EPHandle

__all__ = ["EPHandle", "ElasticBuffer"]
