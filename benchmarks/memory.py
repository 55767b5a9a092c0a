"""The memory of processes, read from /proc. All values in bytes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path

SHARED_PATHS = ("/memfd:", "/dev/shm/", "/dev/zero", "/SYSV")
MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)$")


def shared_memory(pids: list[int]) -> dict[str, int]:
    """Shared memory of a set of processes, each page counted once.

    mapped: sum of Pss over their shared mappings. Pss divides a page by its number of users, so the
    sum counts it once. allocated: pages of every shared file that one of them holds open, mapped or
    not. total: the larger of both.
    """
    mapped, files = 0, {}
    for pid in pids:
        counts = False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            header = MAPPING.match(line)
            if header:
                counts = header[1].startswith(SHARED_PATHS)
            elif counts and line.startswith("Pss:"):
                mapped += int(line.split()[1]) * 1024
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed while we look
                if os.readlink(entry).startswith(SHARED_PATHS):
                    found = os.stat(entry)
                    files[found.st_dev, found.st_ino] = found.st_blocks * 512
    allocated = sum(files.values())
    return {"mapped": mapped, "allocated": allocated, "total": max(mapped, allocated)}


def resident_memory() -> int:
    """Resident memory of this process (private and shared pages), after malloc has returned free
    memory."""
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s*(\d+) kB", status)[1]) * 1024
