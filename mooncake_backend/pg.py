"""The names of `from mooncake import pg`. Importing it registers the backends."""

from mooncake_backend.membership import *  # noqa: F403
from mooncake_backend.membership import __all__ as __all__
from mooncake_backend.options import UpstreamOptions as MooncakeBackendOptions  # noqa: F401
from mooncake_backend.registration import register

register()
