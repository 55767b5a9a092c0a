"""Expert parallelism, installed as `mooncake.ep`. Has the names of `mooncake.pg` too."""

from mooncake_backend import distribution

distribution.check()

from mooncake.pg import *  # noqa: E402, F403

from .buffer import Buffer  # noqa: E402

__all__ = ["Buffer"]
