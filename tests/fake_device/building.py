"""Builds the C++ half for the torch of this process, unless build/ has it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

import mooncake_backend._C

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = (
    HERE,
    *(ROOT / name for name in ("tests/simt", "kernels", "kernels/common", "kernels/ep")),
)
SUFFIXES = (".cc", ".cuh", ".h", ".txt")
HEADERS = (
    "base/result.h",
    "device/accelerator.h",
    "device/device_types.h",
    "device/fake/fake_devices.h",
    "device/kernel_launch.h",
    "device/peer_memory.h",
)


def load() -> ModuleType:
    """Returns the extension, joined with the fake devices of mooncake_backend._C."""
    if not hasattr(mooncake_backend._C, "fake_devices"):
        raise ImportError(
            "mooncake_backend._C has no fake devices: build it with MOONCAKE_BUILD_SIM=1, or "
            "install it editable"
        )
    spec = importlib.util.spec_from_file_location("fake_device._fake_device", built())
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    extension.attach(mooncake_backend._C.fake_devices())
    return extension


def built() -> Path:
    """The library, built by the first of the processes that need it."""
    folder = ROOT / "build" / f"fake_device-{sys.implementation.cache_tag}-torch{torch.__version__}"
    library = folder / f"_fake_device.{key()}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                for old in folder.glob("_fake_device.*.so"):
                    old.unlink()
                compile_into(folder, library)
    return library


def key() -> str:
    """Changes with all that the library is made from."""
    digest = hashlib.sha256(torch.__version__.encode())
    sources = [path for folder in FOLDERS for path in folder.iterdir() if path.suffix in SUFFIXES]
    for path in sorted(sources) + [ROOT / "csrc" / name for name in HEADERS]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def tool(name: str) -> str | None:
    """That of this environment, which may not be the active one."""
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def compile_into(folder: Path, library: Path) -> None:
    home = Path(torch.__file__).parent
    include = home / "include"
    definitions = {
        "CMAKE_BUILD_TYPE": "Release",
        "PYTHON_INCLUDE_DIR": sysconfig.get_path("include"),
        "TORCH_INCLUDE_DIRS": f"{include};{include / 'torch/csrc/api/include'}",
        "TORCH_LIB_DIR": str(home / "lib"),
        "TORCH_CXX11_ABI": str(int(torch._C._GLIBCXX_USE_CXX11_ABI)),
    }
    cmake, ninja = tool("cmake"), tool("ninja")
    if cmake is None:
        raise ImportError("the device for tests needs cmake: pip install cmake ninja")
    generator = []
    if ninja:
        generator = ["-G", "Ninja"]
        definitions["CMAKE_MAKE_PROGRAM"] = ninja
    settings = [f"-D{name}={value}" for name, value in definitions.items()]
    run(cmake, "-S", str(HERE), "-B", str(folder), *generator, *settings)
    run(cmake, "--build", str(folder), "-j", str(len(os.sched_getaffinity(0))))
    # Renamed once it is whole: other processes look for the name without the lock.
    draft = library.with_suffix(".draft")
    shutil.copy2(folder / "_fake_device.so", draft)
    draft.rename(library)


def run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise ImportError(f"the device for tests does not build:\n{done.stdout[-20_000:]}")
