"""`from mooncake.mooncake_elastic_buffer import ElasticBuffer, EPHandle`."""

from mooncake_backend.ep.events import EventOverlap
from mooncake_backend.ep.mooncake_elastic import ElasticBuffer, EPHandle

__all__ = ["EPHandle", "ElasticBuffer", "EventOverlap"]
