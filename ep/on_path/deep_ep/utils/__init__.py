"""The names that programs import from deep_ep.utils."""

from mooncake.ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
