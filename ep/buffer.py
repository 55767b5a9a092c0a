"""Buffer: dispatch and combine."""

from __future__ import annotations

from typing import Any

from mooncake_backend.membership import not_yet

_MISSING = "expert parallelism (dispatch and combine)"


class Buffer:
    """Not available yet: importing it works, using it says what is missing."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        not_yet("Buffer", _MISSING)()

    get_ep_buffer_size_hint = staticmethod(not_yet("Buffer.get_ep_buffer_size_hint", _MISSING))
