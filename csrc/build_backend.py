"""PEP 517 backend: setuptools' backend, plus the search for the torch to build against.

The extension fits one torch minor, so it is built for the torch that will import it. An isolated
build does not see that torch on its path; `find_torch` asks the interpreters that started the
build. The isolated environment gets a torch of its own only if none of them has one.

scikit-build-core would run CMake for us, but its list of build requirements is fixed. So every
isolated build would fetch a torch of its own, and fit that one instead of the target's.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

OLDEST_TORCH = "torch>=2.8"


@dataclass(frozen=True)
class Torch:
    """A torch that was found by its files. No part of it is imported."""

    path: Path
    version: str

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])

    @property
    def include_dirs(self) -> list[Path]:
        include = self.path / "include"
        return [include, include / "torch/csrc/api/include"]

    @property
    def cuda_include_dirs(self) -> list[Path]:
        """Where the wheels that torch needs for CUDA have cuda.h; none for a torch without CUDA."""
        return sorted(path.parent for path in self.path.parent.glob("nvidia/*/include/cuda.h"))

    @property
    def lib_dir(self) -> Path:
        return self.path / "lib"

    @property
    def cxx11_abi(self) -> str:
        config = self.path / "share/cmake/Torch/TorchConfig.cmake"
        found = (
            re.search(r"_GLIBCXX_USE_CXX11_ABI=(\d)", config.read_text())
            if config.exists()
            else None
        )
        return found.group(1) if found else "1"

    @property
    def pybind11_definitions(self) -> list[str]:
        """Definitions that give our code the pybind11 tag of this torch. The pybind11 of torch 2.8
        shares torch's classes only with code of the same tag, and by default the tag names the
        compiler. In newer torches the tag is the same for all compilers: then the list is empty."""
        library = (self.lib_dir / "libtorch_python.so").read_bytes()
        tag = re.search(rb"__pybind11_internals_v\d+(_[a-z]+)(_[a-z]+)(_cxxabi\d+)__", library)
        if tag is None:
            return []
        names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
        parts = [part.decode() for part in tag.groups()]
        return [f'PYBIND11_{name}="{part}"' for name, part in zip(names, parts, strict=True)]


def find_torch() -> Torch | None:
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        return _torch_at(Path(spec.origin).parent)
    for interpreter in _interpreters():
        path = _ask_for_torch(interpreter)
        torch = _torch_at(path) if path else None
        if torch:
            return torch
    return None


def _torch_at(path: Path) -> Torch | None:
    version_file = path / "version.py"
    if not version_file.exists() or not (path / "include/torch/csrc").exists():
        return None
    version = re.search(r"^__version__ = '([^'+]+)", version_file.read_text(), re.MULTILINE)
    return Torch(path, version.group(1)) if version else None


def _interpreters() -> list[str]:
    """Interpreters that may belong to the target environment. pip isolates by PYTHONPATH and keeps
    the target's interpreter. `build` makes a new environment: then the target's interpreter is that
    of the active environment, or of a parent process."""
    found = [sys.executable]
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if active:
        found.append(str(Path(active) / "bin/python"))
    pid = os.getppid()
    for _ in range(4):
        process = Path(f"/proc/{pid}")
        try:
            program = _program(process)
            pid = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            break
        if program and Path(program).name.startswith("python"):
            found.append(program)
    return list(dict.fromkeys(found))


def _program(process: Path) -> str | None:
    """The path by which the process was called. /proc/PID/exe would name the target of a virtual
    environment's link. A bare name is searched in the process's own PATH: in our PATH, `build` has
    put its environment first."""
    name = os.fsdecode((process / "cmdline").read_bytes()).split("\0")[0]
    if "/" in name:
        return str((process / "cwd").readlink() / name)
    variables = os.fsdecode((process / "environ").read_bytes()).split("\0")
    paths = [value for key, _, value in (v.partition("=") for v in variables) if key == "PATH"]
    return shutil.which(name, path=paths[0]) if paths else None


def _ask_for_torch(interpreter: str) -> Path | None:
    """Returns the folder of the interpreter's torch, or None. `-I` undoes pip's isolation. Only a
    torch of the same Python version has the right libtorch_python."""
    question = (
        "import importlib.util as u, sys; s = u.find_spec('torch');"
        f"print(s.origin if s and sys.version_info[:2] == {tuple(sys.version_info[:2])} else '')"
    )
    try:
        answer = subprocess.run(
            [interpreter, "-I", "-c", question], capture_output=True, text=True, timeout=60, cwd="/"
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return Path(answer).parent if answer else None


def _torch_requirement() -> list[str]:
    return [] if find_torch() else [OLDEST_TORCH]


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_requirement()
