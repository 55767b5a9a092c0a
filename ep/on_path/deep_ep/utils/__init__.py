"""What programs take from deep_ep.utils."""

from mooncake.ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
