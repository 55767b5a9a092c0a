"""The parts of a build: no library of CUDA is linked, the seam to accelerators knows base only,
and the extension works with kernels for GPUs in it and without."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mooncake_backend

ROOT = Path(__file__).resolve().parents[1]
SEAM = ["device/accelerator.h", "device/kernel_launch.h", "device/peer_memory.h"]
LEAST_NVCC = (12, 8)

needs_readelf = pytest.mark.skipif(not shutil.which("readelf"), reason="there is no readelf")


def extension() -> Path:
    found = importlib.util.find_spec("mooncake_backend._C")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin)


@needs_readelf
def test_no_library_of_cuda_is_linked():
    """The driver is opened at run time, so the package loads on machines without it."""
    folders = [Path(mooncake_backend.__file__).parent, *ROOT.glob("build/cpp-*")]
    libraries = {extension(), *(path for folder in folders for path in folder.glob("*.so"))}
    assert extension() in libraries
    for library in libraries:
        text = subprocess.run(
            ["readelf", "-d", library], capture_output=True, text=True, check=True
        ).stdout
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", text)
        assert needed, f"readelf found nothing in {library}"
        assert not [name for name in needed if re.match(r"lib(cu|nv|nccl)", name)], library


def included(header: str) -> set[str]:
    """The files of csrc and kernels that the header of csrc includes, directly or not."""
    found, rest = set(), [header]
    while rest:
        name = rest.pop()
        if name not in found:
            found.add(name)
            path = next(
                folder / name for folder in (ROOT / "csrc", ROOT) if (folder / name).exists()
            )
            rest += re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
    return found


@pytest.mark.parametrize("header", SEAM)
def test_the_seam_knows_base_only(header):
    names = included(header)
    assert {name.split("/")[0] for name in names} <= {"device", "base"}, names
    of_device = [name for name in names if name.startswith("device/")]
    assert of_device
    for name in of_device:
        assert len((ROOT / "csrc" / name).read_text().splitlines()) <= 100, name


# ---- with and without kernels


def build_folder() -> Path:
    """That of the installed extension, which is the newest one."""
    tag = sys.implementation.cache_tag
    folders = [path.parent for path in ROOT.glob(f"build/{tag}-torch*/build.ninja")]
    if not folders:
        pytest.skip("the extension was not built in this clone")
    return max(folders, key=lambda folder: (folder / "build.ninja").stat().st_mtime)


def settings(folder: Path) -> dict[str, str]:
    text = (folder / "CMakeCache.txt").read_text()
    return dict(re.findall(r"^(MOONCAKE_\w+):\w+=(.*)$", text, re.MULTILINE))


def carries_kernels() -> bool:
    from mooncake_backend import _C

    return not _C.build_info()["kernels"].startswith("none")


def test_the_extension_has_kernels_where_nvcc_is():
    """A build that quietly leaves them out would still pass all tests that have no GPU."""
    how = settings(build_folder())
    nvcc = how.get("MOONCAKE_NVCC", "")
    if not os.access(nvcc, os.X_OK):
        assert not carries_kernels()
        return
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", said)
    assert release is not None, said
    if (int(release[1]), int(release[2])) < LEAST_NVCC:
        assert not carries_kernels()
        return
    if how["MOONCAKE_WITH_KERNELS"] == "OFF" and "CI" not in os.environ:
        pytest.skip("this build was told to leave the kernels out")
    assert carries_kernels()


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


IMPORT = """
import importlib.util, json, sys, torch
spec = importlib.util.spec_from_file_location("mooncake_backend._C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
works, _, text = module.describe_accelerators("cuda")[0]
print(json.dumps([module.build_info()["kernels"], text]))
"""


@pytest.mark.ci
@pytest.mark.parametrize("kernels", [False, True], ids=["without-kernels", "with-kernels"])
def test_both_builds_link_and_import(tmp_path, kernels):
    """Configures the build, and links the extension from the objects of the installed one, of which
    only the kernels' image differs. Where nvcc has made none, other bytes stand for it."""
    folder, switch = build_folder(), "ON" if kernels else "OFF"
    defined = [f"-D{name}={value}" for name, value in settings(folder).items() if value]
    defined += [f"-DMOONCAKE_WITH_KERNELS={switch}", "-DCMAKE_BUILD_TYPE=Release"]
    other = tmp_path / "build"
    run(["cmake", "-S", "csrc", "-B", str(other), "-G", "Ninja", *defined], ROOT)
    commands = run(["ninja", "-t", "commands", "mooncake_core"], other).splitlines()
    source = "kernel_image.cc" if kernels else "kernel_image_absent.cc"
    compiles = [line for line in commands if line.endswith(f"/{source}")]
    assert len(compiles) == 1
    assert any("kernels.cu" in line for line in commands) == kernels

    if kernels:
        made = folder / "kernels.fatbin"
        image = made.read_bytes() if made.exists() else b"no kernels, but bytes" * 100
        (other / "kernels.fatbin").write_bytes(image)
    run(["bash", "-c", compiles[0]], other)
    built = next(other.glob(f"**/{source}.o"))
    archive = tmp_path / "libmooncake_core.a"
    shutil.copy2(folder / archive.name, archive)
    members = run(["ar", "t", str(archive)], tmp_path).split()
    run(["ar", "d", str(archive), *(m for m in members if m.startswith("kernel_image"))], tmp_path)
    run(["ar", "qs", str(archive), str(built)], tmp_path)

    link = run(["ninja", "-t", "commands", "_C"], folder).splitlines()[-1]
    library = tmp_path / extension().name
    for old, new in ((archive.name, str(archive)), (f"-o {library.name}", f"-o {library}")):
        assert old in link
        link = link.replace(old, new)
    run(["bash", "-c", link], folder)
    answer = run([sys.executable, "-c", IMPORT, str(library)], tmp_path)
    found, driver = json.loads(answer.splitlines()[-1])
    assert found.startswith("none, as nvcc was not found") != kernels, found
    assert driver
