"""`from deep_ep.utils.event import EventHandle, EventOverlap`."""

from mooncake_backend.ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
