"""Finds and loads the compiled extension, mooncake_backend._C."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from mooncake_backend import __version__
from mooncake_backend.distribution import DISTRIBUTION

NAME = "mooncake_backend._C"
LIBRARY = "_C" + EXTENSION_SUFFIXES[0]


class Build(NamedTuple):
    """A compiled extension, and the versions that it was built from."""

    path: Path
    version: str
    torch: str

    def mismatch(self, torch_version: str) -> str | None:
        """Why it must not be loaded in this process, or None."""
        if _minor(self.torch) != _minor(torch_version):
            built = _minor(self.torch)
            return (
                f"{self.path} was built for torch {built}, but torch {torch_version} is running: "
                f"build it again in this environment (pip install --force-reinstall --no-deps "
                f"--no-build-isolation, from the sources), or install torch=={built}.*"
            )
        if self.version != __version__:
            return (
                f"{self.path} is of {DISTRIBUTION} {self.version}, but the Python files in "
                f"{Path(__file__).parent} are of {__version__}: install it again"
            )
        return None


def load() -> ModuleType:
    """Returns the extension, and loads it at the first call. ImportError says what is wrong and how
    to mend it."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    import torch.distributed  # loads the libraries that the extension links to

    build = choose(torch.__version__)
    spec = importlib.util.spec_from_file_location(NAME, build.path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    vars(sys.modules["mooncake_backend"])["_C"] = module
    return module


def choose(torch_version: str) -> Build:
    """The first build that fits. It is chosen by the record beside the library: loading a library
    that was built for another torch would only name a missing symbol."""
    found = list(builds())
    if not found:
        raise ImportError(
            f"{DISTRIBUTION} is not built: there is no {LIBRARY} in {Path(__file__).parent} nor "
            f"in an installed {DISTRIBUTION}. In the sources, for this Python: pip install ."
        )
    for build in found:
        if build.mismatch(torch_version) is None:
            return build
    raise ImportError(found[0].mismatch(torch_version))


def builds() -> Iterator[Build]:
    """The builds in this folder, then the builds of the installed distribution. In a clone the
    source folder shadows the installed package."""
    folders = [Path(__file__).parent]
    for installed in distributions(name=DISTRIBUTION):
        folders.append(Path(str(installed.locate_file("mooncake_backend"))))
    for folder in dict.fromkeys(folders):
        record_file = folder / "_C.json"
        if (folder / LIBRARY).exists() and record_file.exists():
            record = json.loads(record_file.read_text(encoding="utf-8"))
            yield Build(folder / LIBRARY, record["version"], record["torch"])


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
