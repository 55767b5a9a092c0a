"""Registers, stack and shared memory of each kernel on each architecture, as nvcc reports them.

`python tests/kernel_resources.py` writes the report to kernels/resources.txt.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "kernels/resources.txt"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


class Resources(NamedTuple):
    kernel: str
    architecture: str
    registers: int
    spilled: int  # bytes, stored and loaded
    stack: int
    shared: int


def compiler() -> str:
    """Other releases of nvcc may give other numbers."""
    said = subprocess.run([str(NVCC), "--version"], capture_output=True, text=True, check=True)
    release = re.search(r"release ([\d.]+)", said.stdout)
    assert release, said.stdout
    return f"nvcc {release[1]}"


def compile_kernels(source: Path = ROOT / "kernels/kernels.cu") -> str:
    """Returns what nvcc says of all kernels. The flags are those of the build."""
    flags = (ROOT / "kernels/nvcc.txt").read_text().split()
    with tempfile.TemporaryDirectory() as folder:
        flags += [f"-I{ROOT}", "-allow-unsupported-compiler", "-Xptxas", "-v"]
        done = subprocess.run(
            [str(NVCC), *flags, "-fatbin", str(source), "-o", f"{folder}/kernels.fatbin"],
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def parse(said: str) -> list[Resources]:
    """Functions that are called and not inlined count towards their kernel."""
    found = []
    for part in said.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)' for '(\w+)'", part)
        used = re.search(r"Used (\d+) registers", part)
        assert name, part
        assert used, part
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", part)
        shared = re.search(r"(\d+) bytes smem", part)
        found.append(
            Resources(
                name[1],
                name[2],
                int(used[1]),
                sum(int(stores) + int(loads) for _, stores, loads in frames),
                sum(int(stack) for stack, _, _ in frames),
                int(shared[1]) if shared else 0,
            )
        )
    return sorted(found)


def text(version: str, resources: list[Resources]) -> str:
    head = Resources._fields
    rows = [head, *(tuple(map(str, row)) for row in resources)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([f"{version}; written by tests/kernel_resources.py", *lines]) + "\n"


if __name__ == "__main__":
    if NVCC is None:
        sys.exit("no nvcc")
    TARGET.write_text(text(compiler(), parse(compile_kernels())))
