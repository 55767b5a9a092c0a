"""Checks that the top-level package `mooncake` is ours, unless the build left that name alone.

The wheel `mooncake-transfer-engine` installs files under the same name. For each file the later
installation wins, and against an editable install the other wheel always wins. A mixture would fail
in obscure ways.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

DISTRIBUTION = "mooncake-backend"
PACKAGE = "mooncake"
MODULES = ("ep", "engine", "mooncake_ep_buffer", "pg")


def leaves_the_name() -> bool:
    """Whether we were built with MOONCAKE_BUILD_BESIDE_UPSTREAM=1, without a package `mooncake`."""
    try:
        packages = distribution(DISTRIBUTION).read_text("top_level.txt")
    except PackageNotFoundError:
        return False
    return packages is not None and PACKAGE not in packages.split()


class DistributionConflictError(ImportError):
    """Modules of `mooncake` come from another distribution."""


def other_owners() -> list[str]:
    """Other installed distributions that have files in the package `mooncake`."""
    return sorted(set(packages_distributions().get(PACKAGE, [])) - {DISTRIBUTION})


def foreign_modules() -> dict[str, str]:
    """Our modules that `import` would load from another place, and that place. Imports nothing."""
    package = _find_package()
    if package is None:
        return {}
    places = list(package.submodule_search_locations or [])
    specs: dict[str, ModuleSpec | None] = {PACKAGE: package}
    for module in MODULES:
        name = f"{PACKAGE}.{module}"
        specs[name] = PathFinder.find_spec(name, places)
    return {
        name: spec.origin or ", ".join(spec.submodule_search_locations or [])
        for name, spec in specs.items()
        if spec is not None and not _is_ours(spec)
    }


@cache
def check() -> None:
    """Raises DistributionConflictError if another distribution provides one of our modules."""
    if leaves_the_name():
        return
    foreign = foreign_modules()
    if not foreign:
        return
    owners = other_owners()
    listing = ", ".join(f"{name} ({place})" for name, place in foreign.items())
    if owners:
        found = f"from the distribution {' and '.join(owners)}"
        remedy = f"pip uninstall {' '.join(owners)}"
    else:
        found = "from files that no installed distribution owns"
        remedy = "remove or rename them"
    raise DistributionConflictError(
        f"these modules come {found}, not from {DISTRIBUTION}: {listing}. Both use the package "
        f"name `{PACKAGE}`: {remedy}, then install {DISTRIBUTION} again "
        f"(pip install --force-reinstall --no-deps), or build it with "
        f"MOONCAKE_BUILD_BESIDE_UPSTREAM=1, which leaves them the name"
    )


def _find_package() -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        return None


def _is_ours(spec: ModuleSpec) -> bool:
    """Each of our modules is a thin source file that imports mooncake_backend."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return False
    try:
        return "mooncake_backend" in Path(spec.origin).read_text(encoding="utf-8")
    except OSError:
        return False
