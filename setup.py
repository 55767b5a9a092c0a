"""Builds the extension mooncake_backend._C, and the transfer engine for C, by CMake.

Everything else is in pyproject.toml."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))

from build_backend import OLDEST_TORCH, find_torch  # noqa: E402

TORCH = find_torch()
# Beside _C, and read before it is loaded: a library that does not fit only names a missing symbol.
BUILD_RECORD = "_C.json"
# The transfer engine for C, in the package: not in an editable install, where a clone builds it.
C_HEADER = ROOT / "csrc/transfer/c_api/transfer_engine_c.h"
C_LIBRARY = "libtransfer_engine.so"


def tool(name: str) -> str | None:
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def parallel_jobs() -> int:
    """A file with torch's headers needs up to 2 GiB to compile."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // 2**31))


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if TORCH is None:
            sys.exit(
                "mooncake-backend: no torch to build against: install torch first, "
                "or build without --no-build-isolation"
            )
        cmake = tool("cmake")
        if cmake is None:
            sys.exit("mooncake-backend: cmake is missing: pip install cmake ninja")
        version = self.distribution.get_version()
        # Not in pip's temporary folder: a second build then compiles only what changed.
        build_dir = ROOT / "build" / f"{sys.implementation.cache_tag}-torch{TORCH.version}"
        definitions = {
            "CMAKE_BUILD_TYPE": "Release",
            "MOONCAKE_BUILD_EXTENSION": "ON",
            "MOONCAKE_VERSION": version,
            "MOONCAKE_TORCH_VERSION": TORCH.version,
            "MOONCAKE_TORCH_INCLUDE_DIRS": ";".join(map(str, TORCH.include_dirs)),
            "MOONCAKE_TORCH_LIB_DIR": TORCH.lib_dir,
            "MOONCAKE_CUDA_INCLUDE_HINTS": ";".join(map(str, TORCH.cuda_include_dirs)),
            "MOONCAKE_TORCH_CXX11_ABI": TORCH.cxx11_abi,
            "MOONCAKE_PYBIND11_DEFINITIONS": ";".join(TORCH.pybind11_definitions),
            "MOONCAKE_PYTHON_INCLUDE_DIR": sysconfig.get_path("include"),
            "MOONCAKE_EXTENSION_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
        }
        # Transport sim is for tests: in an editable install, or where it is asked for.
        with_sim = self.editable_mode or os.environ.get("MOONCAKE_BUILD_SIM") == "1"
        definitions["MOONCAKE_WITH_SIM"] = "ON" if with_sim else "OFF"
        with_c_api = not self.editable_mode
        definitions["MOONCAKE_BUILD_C_API"] = "ON" if with_c_api else "OFF"
        command = [cmake, "-S", ROOT / "csrc", "-B", build_dir]
        ninja = tool("ninja")
        if ninja:
            command += ["-G", "Ninja"]
            definitions["CMAKE_MAKE_PROGRAM"] = ninja
        subprocess.check_call(
            command + [f"-D{name}={value}" for name, value in definitions.items()]
        )
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(parallel_jobs())
        targets = ["_C", "transfer_engine"] if with_c_api else ["_C"]
        subprocess.check_call([cmake, "--build", build_dir, "--target", *targets, "-j", jobs])

        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build_dir / target.name, target)
        record = {"version": version, "torch": TORCH.version}
        (target.parent / BUILD_RECORD).write_text(json.dumps(record) + "\n")
        if with_c_api:
            for source, folder in ((build_dir / C_LIBRARY, "lib"), (C_HEADER, "include")):
                (target.parent / folder).mkdir(exist_ok=True)
                shutil.copy2(source, target.parent / folder / source.name)

    def copy_extensions_to_source(self) -> None:
        """An editable install: the record goes where the extension goes."""
        super().copy_extensions_to_source()
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            built = Path(self.build_lib, *ext.name.split(".")[:-1], BUILD_RECORD)
            package_dir = build_py.get_package_dir(ext.name.rpartition(".")[0])
            shutil.copy2(built, Path(package_dir, BUILD_RECORD))


# No MANIFEST.in: what is named as a source here is what a source distribution carries.
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for room in ("csrc", "kernels")
    for path in (ROOT / room).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
)

# 1: the wheel mooncake-transfer-engine keeps the package `mooncake`, and the commands that it has.
BESIDE_UPSTREAM = os.environ.get("MOONCAKE_BUILD_BESIDE_UPSTREAM") == "1"
OURS = {
    "mooncake-run": "mooncake_backend.run",
    "efa_first_submit_probe": "mooncake_backend.first_submit_probe",
}
SHARED = {
    "mooncake_http_metadata_server": "mooncake_backend.metadata_server",
    "transfer_engine_bench": "mooncake_backend.transfer_bench",
    "transfer_engine_topology_dump": "mooncake_backend.topology_dump",
}
COMMANDS = OURS if BESIDE_UPSTREAM else OURS | SHARED

setup(
    license="Apache-2.0",
    license_files=["LICENSE"],
    install_requires=[f"torch=={TORCH.minor}.*" if TORCH else OLDEST_TORCH],
    packages=[
        "mooncake_backend",
        "mooncake_backend.demo",
        "mooncake_backend.launcher",
        "mooncake_backend.ep",
        "mooncake_backend.ep.on_path.deep_ep",
        "mooncake_backend.ep.on_path.deep_ep.buffers",
        "mooncake_backend.ep.on_path.deep_ep.utils",
        *([] if BESIDE_UPSTREAM else ["mooncake"]),
    ],
    package_dir={"mooncake": "mooncake_backend/compat", "mooncake_backend.ep": "ep"},
    entry_points={
        "console_scripts": [f"{name} = {module}:main" for name, module in COMMANDS.items()],
        "torch.backends": ["mooncake = mooncake_backend:register_at_import"],
    },
    package_data={"mooncake_backend": ["py.typed", "_C.pyi"]},
    ext_modules=[Extension("mooncake_backend._C", sources=SOURCES)],
    cmdclass={"build_ext": CMakeBuild},
    zip_safe=False,
)
