"""Locks: tests/lint.sh locks. Compiles the rooms below with clang, which checks the annotations of
csrc/base/mutex.h: each field that names its mutex, and each function that needs one held.

Also fails if a mutex of these rooms is one of std, or if no field and no function names it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# To come: backend and bindings.
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

# Mutexes that no annotation names, and why.
EXCEPTIONS = {
    "csrc/collectives/progress_lock.h mutex_": "inside a lock that is checked itself",
    "csrc/engine/connections.h callMutex_": "one callAll() at a time",
    "csrc/engine/peers/outbox.h sendingMutex_": "one flush() at a time",
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
    "-fsyntax-only",
    "-Wthread-safety",
    "-Werror=thread-safety",
)
# Compiled once for all files: most of the time goes into headers of std.
HEADERS = """
    algorithm array atomic chrono condition_variable deque functional list map memory mutex optional
    random set shared_mutex span sstream string thread unordered_map variant vector
"""


def files_of(room: str) -> list[Path]:
    return sorted(
        path for path in (ROOT / "csrc" / room).rglob("*") if path.suffix in (".cc", ".h")
    )


def unnamed() -> list[str]:
    """Mutexes that are not checked, and are no exception."""
    wrong = []
    used = set()
    for path in (path for room in ROOMS for path in files_of(room)):
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
            if re.search(rf"\b(GUARDED_BY|REQUIRES)\({mutex}\)", text):
                continue
            if key not in EXCEPTIONS:
                wrong.append(f"{key}: no field and no function names it: see EXCEPTIONS")
            used.add(key)
    return wrong + [f"{key}: is no exception" for key in EXCEPTIONS if key not in used]


def compiles(clang: str, headers: Path, path: Path) -> str:
    """What clang finds in the file; empty: nothing."""
    command = [clang, *FLAGS, "-include-pch", str(headers), str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def has(clang: str, header: str) -> bool:
    command = [clang, *FLAGS, "-x", "c++", "-include", header, os.devnull]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def main() -> int:
    clang = shutil.which("clang++-14") or shutil.which("clang++")
    if clang is None:
        print("no clang++: install clang-14")
        return 2
    wrong = unnamed()
    lacking = [folder for folder, header in NEEDS.items() if not has(clang, header)]
    files = [
        path
        for room in ROOMS
        for path in files_of(room)
        if path.suffix == ".cc"
        and not any(path.is_relative_to(ROOT / folder) for folder in lacking)
    ]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        text, headers = Path(folder, "std.h"), Path(folder, "std.pch")
        text.write_text(
            "".join(f"#include <{header}>\n" for header in HEADERS.split()), encoding="utf-8"
        )
        make = [clang, "-std=c++20", "-x", "c++-header", str(text), "-o", str(headers)]
        subprocess.run(make, check=True)
        wrong += filter(None, pool.map(lambda path: compiles(clang, headers, path), files))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
