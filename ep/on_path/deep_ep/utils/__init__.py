"""The names that programs import from deep_ep.utils."""

from mooncake_backend.ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
