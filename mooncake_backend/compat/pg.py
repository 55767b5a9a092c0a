"""`from mooncake import pg`: process groups. Importing it registers the backends."""

from mooncake_backend.pg import *  # noqa: F403
from mooncake_backend.pg import __all__ as __all__
