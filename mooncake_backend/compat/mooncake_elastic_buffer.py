"""`from mooncake.mooncake_elastic_buffer import ElasticBuffer, EPHandle`."""

from mooncake.ep.events import EventOverlap
from mooncake.ep.mooncake_elastic import ElasticBuffer, EPHandle

__all__ = ["EPHandle", "ElasticBuffer", "EventOverlap"]
