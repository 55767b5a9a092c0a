"""Locks: tests/lint.sh locks. Compiles the rooms below with clang, which checks the annotations of
csrc/base/mutex.h: each field that names its mutex, and each function that needs one held.

Also fails if a mutex of these rooms is one of std, or if no field and no function names it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "base",
    "collectives",
    "device",
    "engine",
    "ep",
    "group",
    "membership",
    "peers",
    "proxy",
    "transfer",
    "wires",
)
# They include torch's headers, and Python's.
TORCH_ROOMS = ("backend", "bindings")

# Mutexes that no annotation names, and why.
EXCEPTIONS = {
    "csrc/backend/experts/ep_buffer.h orderMutex_": "keeps marks and calls in one order",
    "csrc/backend/job.h enteringMutex_": "one enterAgain() at a time",
    "csrc/backend/leaving.h mutex_": "one leaveGroup() at a time",
    "csrc/backend/replacing.h enteringMutex_": "one enterAgain() at a time",
    "csrc/collectives/progress_lock.h mutex_": "inside a lock that is checked itself",
    "csrc/engine/connections.h callMutex_": "one callAll() at a time",
    "csrc/engine/peers/outbox.h sendingMutex_": "one flush() at a time",
    "csrc/group/group_line.h readiness_": "a rank is not said to be ready once it gives up",
    "csrc/group/state_signal.cc one": "one describeStatesOnSignal() at a time",
    "csrc/wires/cards/fabric_channel.h fenceMutex_": "one fence() at a time",
    "csrc/wires/cards/message_parts.h sendMutex_": "the parts of two messages are not mixed",
    "csrc/wires/local/local_channel.h pullMutex_": "a fence waits for the pieces that are pulled",
    "csrc/wires/sim/sim_transport.cc mutex": "guards a variable that a lambda captures",
    "csrc/wires/nic/libfabric/libfabric_nic.cc std::unique_lock": "only if not serialised",
}

# Folders whose files need a header of the system: only checked where it is.
NEEDS = {"csrc/device/cuda": "cuda.h", "csrc/wires/nic/libfabric": "rdma/fabric.h"}
OWN = "csrc/base/mutex.h"
STD = re.compile(
    r"std::(\w*mutex|condition_variable\w*|lock_guard|unique_lock|scoped_lock|shared_lock)\b"
)
DECLARED = re.compile(
    r"\b(?:Shared|Recursive)?Mutex&? (\w+)(?:;| = )|(\w+) = std::make_shared<Mutex>"
)
FLAGS = (
    "-std=c++20",
    "-Icsrc",
    "-I.",
    "-I/usr/local/cuda/include",
    "-I/opt/amazon/efa/include",
)
CHECK = ("-fsyntax-only", "-Wno-everything", "-Wthread-safety", "-Werror=thread-safety")
# Compiled once for all files: most of the time goes into headers of std, and of torch.
HEADERS = """
    algorithm array atomic chrono condition_variable deque functional list map memory mutex optional
    random set shared_mutex span sstream string thread unordered_map variant vector
"""
TORCH_HEADERS = "torch/csrc/distributed/c10d/Backend.hpp" + HEADERS
# Number of files of a folder of TORCH_ROOMS that are compiled as one, as in csrc/CMakeLists.txt.
# APART: another file of the folder uses the same names, in a namespace without a name.
BATCH = 8
APART = ("csrc/backend/calls/coalesced.cc", "csrc/bindings/ep_normal.cc")


def files_of(room: str) -> list[Path]:
    return sorted(
        path for path in (ROOT / "csrc" / room).rglob("*") if path.suffix in (".cc", ".h")
    )


def unnamed() -> list[str]:
    """Mutexes that are not checked, and are no exception."""
    wrong = []
    used = set()
    for path in (path for room in ROOMS + TORCH_ROOMS for path in files_of(room)):
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8")
        if name == OWN:
            continue
        for found in STD.finditer(text):
            key = f"{name} {found[0]}"
            if key not in EXCEPTIONS:
                wrong.append(f"{key}: use {OWN}, or see EXCEPTIONS")
            used.add(key)
        for mutex in (one or other for one, other in DECLARED.findall(text)):
            key = f"{name} {mutex}"
            if re.search(rf"\b((?:PT_)?GUARDED_BY|REQUIRES)\({mutex}\)", text):
                continue
            if key not in EXCEPTIONS:
                wrong.append(f"{key}: no field and no function names it: see EXCEPTIONS")
            used.add(key)
    return wrong + [f"{key}: is no exception" for key in EXCEPTIONS if key not in used]


def batches_of(room: str) -> list[list[Path]]:
    batches = []
    for folder in sorted({path.parent for path in files_of(room)}):
        files = sorted(folder.glob("*.cc"))
        alone = [file for file in files if str(file.relative_to(ROOT)) in APART]
        joined = [file for file in files if file not in alone]
        batches += [joined[i : i + BATCH] for i in range(0, len(joined), BATCH)]
        batches += [[file] for file in alone]
    return batches


def torch_flags(torch: Path) -> list[str]:
    include = torch.parent / "include"
    folders = (include, include / "torch/csrc/api/include", sysconfig.get_path("include"))
    strings = ("MOONCAKE_TORCH_VERSION", "MOONCAKE_VERSION")
    return [f"-isystem{folder}" for folder in folders] + [f'-D{name}=""' for name in strings]


def including(headers: Iterable[object]) -> str:
    return "".join(f"#include <{header}>\n" for header in headers)


def precompiled(command: list[str], headers: str, place: Path) -> Path:
    source, made = place.with_suffix(".h"), place.with_suffix(".pch")
    source.write_text(including(headers.split()), encoding="utf-8")
    subprocess.run([*command, "-x", "c++-header", str(source), "-o", str(made)], check=True)
    return made


def compiles(command: list[str], headers: Future[Path], files: list[Path]) -> str:
    """What clang finds in the files, as one; empty: nothing."""
    done = subprocess.run(
        [*command, *CHECK, "-include-pch", str(headers.result()), "-x", "c++", "-"],
        cwd=ROOT,
        input=including(files),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr if done.returncode else ""


def has(command: list[str], header: str) -> bool:
    command = [*command, "-fsyntax-only", "-x", "c++", "-include", header, os.devnull]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def main() -> int:
    clang = shutil.which("clang++-14") or shutil.which("clang++")
    torch = importlib.util.find_spec("torch")
    if clang is None or torch is None or torch.origin is None:
        print("no clang++, or no torch: tests/lint.sh locks installs both")
        return 2
    wrong = unnamed()
    plain = [clang, *FLAGS]
    with_torch = plain + torch_flags(Path(torch.origin))
    lacking = [folder for folder, header in NEEDS.items() if not has(plain, header)]
    files = [
        path
        for room in ROOMS
        for path in files_of(room)
        if path.suffix == ".cc"
        and not any(path.is_relative_to(ROOT / folder) for folder in lacking)
    ]
    batches = [batch for room in TORCH_ROOMS for batch in batches_of(room)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        torchs = pool.submit(precompiled, with_torch, TORCH_HEADERS, Path(folder, "torch"))
        stds = pool.submit(precompiled, plain, HEADERS, Path(folder, "std"))
        found = [pool.submit(compiles, plain, stds, [path]) for path in files]
        found += [pool.submit(compiles, with_torch, torchs, batch) for batch in batches]
        wrong += filter(None, (one.result() for one in found))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
