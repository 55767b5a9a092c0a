"""`from mooncake.ep import Buffer`: mooncake_backend.ep under another name.

Its modules are the same ones too: `mooncake.ep.events` is `mooncake_backend.ep.events`.
"""

import importlib
import pkgutil
import sys

from mooncake_backend import ep
from mooncake_backend.ep import *  # noqa: F403
from mooncake_backend.ep import __all__ as __all__

for _module in pkgutil.iter_modules(ep.__path__):
    if _module.name != "deepep":  # a program: `python -m mooncake.ep.deepep` loads it as __main__
        sys.modules[f"{__name__}.{_module.name}"] = importlib.import_module(
            f"{ep.__name__}.{_module.name}"
        )
sys.modules[__name__] = ep
