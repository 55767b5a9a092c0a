"""Runs tests with all their processes under a tool of NVIDIA's compute-sanitizer.

    python tests/gpu/sanitizer.py memcheck PYTEST_ARGUMENTS ...

Exit status 0: the tests passed and the tool found nothing. On a machine without it (a
package of CUDA's toolkit) it says so and runs nothing: that is no failure.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

MISSING = "compute-sanitizer is missing: nothing was checked. The package cuda-sanitizer brings it"
IN_THE_TOOLKIT = "/usr/local/cuda/bin/compute-sanitizer"
FOUND = 86  # the tool's exit status if it found something
# "ERROR SUMMARY: 2 errors", "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
SUMMARY = re.compile(r"^=+ +(?:\w+ )?SUMMARY: (\d+) (?:error|hazard)", re.MULTILINE)


def find() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which(IN_THE_TOOLKIT)


def verdict(status: int, output: str) -> str | None:
    """What is wrong with a run, or None."""
    found = [int(count) for count in SUMMARY.findall(output)]
    if not found:
        return "compute-sanitizer has seen no process with a context of CUDA"
    if any(found) or status == FOUND:
        return f"compute-sanitizer found {sum(found)} errors"
    return f"the tests ended with status {status}" if status else None


def main() -> int:
    tool, *arguments = sys.argv[1:]
    program = find()
    if program is None:
        print(MISSING)
        return 0
    options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", str(FOUND)]
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "", *arguments]
    ran = subprocess.run(
        [program, *options, *tests],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    print(ran.stdout)
    wrong = verdict(ran.returncode, ran.stdout)
    print(f"{tool}: {wrong or 'nothing found'}")
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main())
