"""Expert parallelism, installed as `mooncake_backend.ep`; `mooncake.ep` is the same package.

It also has the names of `mooncake.pg`.

Buffer has DeepEP's signatures; mooncake.mooncake_ep_buffer.Buffer has Mooncake's.
"""

from mooncake_backend import distribution

distribution.check()

from mooncake_backend.pg import *  # noqa: E402, F403
from mooncake_backend.pg import __all__ as _pg_names  # noqa: E402

from .buffer import Buffer  # noqa: E402
from .config import Config  # noqa: E402
from .elastic import (  # noqa: E402
    ElasticBuffer,
    get_logical_domain_size,
    get_physical_domain_size,
)
from .elastic_handle import EPHandle  # noqa: E402
from .events import EventHandle, EventOverlap  # noqa: E402
from .mooncake_buffer import get_ep_buffer_size_hint  # noqa: E402

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_ep_buffer_size_hint",
    "get_logical_domain_size",
    "get_physical_domain_size",
]
__all__ += _pg_names
