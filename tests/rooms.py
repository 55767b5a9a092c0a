"""Which tests belong to the rooms that differ from main: for tests/run.sh --changed.

Prints two lines, each of which may be empty: a regular expression for names of files in tests/cpp,
and files of Python tests."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Python tests by what they exercise. A change of any other file of csrc runs all of them.
COLLECTIVES = "async collectives errors failures groups* odd_tensors properties seen_losses surface"
MESSAGES = "point_to_point lifetimes window"
ENGINE = "detection fabric* network partitions restarts sandbox transfer*"
EP = "ep_*"
ROOMS = {
    "csrc/collectives": COLLECTIVES,
    "csrc/group": f"{COLLECTIVES} {MESSAGES} {EP}",
    "csrc/backend": f"{COLLECTIVES} {MESSAGES} {EP} callers device* ecosystem exits hangs "
    "supported",
    "csrc/transfer": "transfer*",
    "csrc/engine": f"{COLLECTIVES} {ENGINE}",
    "csrc/device": "fake_device device* ep_device transfer_device",
    "csrc/ep": EP,
    "kernels": f"kernels {EP}",
    "ep": EP,
    "mooncake_backend/launcher": "launcher demo",
    "mooncake_backend/demo": "demo readme",
    "mooncake_backend/transfer": "transfer*",
    "mooncake_backend": "beginning callers ddp_after_loss errors groups hangs objects_after_loss "
    "packaging readme supported surface",
    "tests/fake_device": "fake_device device* ep_device transfer_device",
    "tests/gpu": "gpu_*",
    "docs": "checkpoint_docs docs readme supported ep_docs transfer_docs",
    "README.md": "docs readme supported",
    "pyproject.toml": "packaging",
}
NOTHING = ("benchmarks", "CHANGELOG.md", "tests/cpp", "tests/fuzz")


def changed_files() -> list[str]:
    """Also what is not committed yet."""

    def git(*arguments: str) -> list[str]:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return run.stdout.split("\n") if run.returncode == 0 else []

    base = (git("merge-base", "main", "HEAD") or ["HEAD"])[0]
    files = git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")
    return sorted({file for file in files if file})


def python_tests(files: Iterable[str]) -> set[str]:
    """Names of files in tests/."""
    everything = {path.name for path in (ROOT / "tests").glob("test_*.py")}
    chosen = {"test_docs.py"}
    for file in files:
        name = Path(file).name
        if file.startswith("tests/test_"):
            chosen.add(name)
            continue
        if file.startswith(NOTHING):
            continue
        rooms = [room for room in ROOMS if file.startswith(room)]
        if not rooms:
            return everything
        for stem in ROOMS[max(rooms, key=len)].split():
            chosen |= {path.name for path in (ROOT / "tests").glob(f"test_{stem}.py")}
    return chosen & everything


def cpp_tests(files: Iterable[str]) -> set[str]:
    """Names of files in tests/cpp, without their ends: those in the folder of a room of csrc that
    has changed, those that include one of its headers, and those that have changed themselves."""
    folder = ROOT / "tests/cpp"
    everything = {path.stem for path in folder.rglob("*.cc")}
    rooms, chosen = set(), set()
    for file in files:
        if match := re.match(r"csrc/(\w+)/", file):
            rooms.add(match[1])
        elif file.startswith("kernels/"):
            rooms.add("kernels")
        elif file == "csrc/CMakeLists.txt" or re.match(r"tests/cpp/.*\.h$", file):
            return everything
        elif file.startswith("tests/cpp/"):
            chosen.add(Path(file).stem)
    if "base" in rooms:
        return everything

    def included(path: Path) -> set[str]:
        """Rooms, also by way of the tests' own headers."""
        names = re.findall(r'#include "([\w./]+)"', path.read_text(encoding="utf-8"))
        own = [folder / name for name in names if (folder / name).exists()]
        return {name.split("/")[0] for name in names}.union(*map(included, own))

    for path in folder.rglob("*.cc"):
        if rooms & {path.relative_to(folder).parts[0], *included(path)}:
            chosen.add(path.stem)
    return chosen & everything


def main() -> None:
    files = changed_files()
    print("|".join(f"{stem}\\." for stem in sorted(cpp_tests(files))))
    print(" ".join(f"tests/{name}" for name in sorted(python_tests(files))))


if __name__ == "__main__":
    main()
