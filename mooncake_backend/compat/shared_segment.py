"""`from mooncake.shared_segment import ...`: memory that ranks share by GPU handles."""

from mooncake_backend.engine import SharedSegment
from mooncake_backend.membership import not_yet

shared_segment_supported = SharedSegment.supported
create_shared_segment = not_yet("create_shared_segment", "memory shared by GPU handles")


class SharedSegmentError(RuntimeError):
    """Raised by the functions of this module when they fail."""


__all__ = [
    "SharedSegment",
    "SharedSegmentError",
    "create_shared_segment",
    "shared_segment_supported",
]
