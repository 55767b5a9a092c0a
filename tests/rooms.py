"""Which tests a change reaches: for tests/run.sh --changed [BASE] and tests/turns.py.

C++ tests are found by `#include`, Python tests by `import`. No include leads from a Python test to
the C++ that its processes run, so EXERCISES says it: a module has the rooms of all modules that it
imports.

Prints three lines, each of which may be empty: a regular expression for names of files in
tests/cpp, files of Python tests, and `kernels` if the suites of tests/simt are reached."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A room is all files whose paths begin with its name and with no longer name of a room.
ENGINE = "csrc/base csrc/engine csrc/wires csrc/bindings/module csrc/CMakeLists.txt "
ENGINE += "csrc/build_backend.py setup.py"
CARDS = "csrc/wires/nic csrc/wires/packets csrc/wires/cards csrc/wires/fabric csrc/wires/sim"
GROUP = f"{ENGINE} csrc/membership csrc/group csrc/collectives csrc/backend csrc/bindings/futures"
WINDOWS = "csrc/collectives/one_sided csrc/collectives/rma_window csrc/backend/torch_window"
DEVICE = "csrc/device csrc/device/fake csrc/backend/device csrc/bindings/capture "
DEVICE += "csrc/bindings/for_tests tests/fake_device"
PEERS = f"{DEVICE} csrc/peers csrc/backend/device/symmetric kernels tests/simt "
PEERS += "tests/fake_device/kernels tests/fake_device/launch"
HOSTS = f"{PEERS} csrc/proxy kernels/proxy kernels/remote"
EP = f"{GROUP} csrc/ep csrc/backend/experts/ep_ csrc/bindings/ep kernels/common"
EP_KERNELS = f"{EP} {PEERS} kernels/ep csrc/backend/experts/ep_kernel csrc/backend/experts/token_"
TRANSFER = f"{ENGINE} csrc/transfer csrc/bindings/transfer"

# What processes of tests run beyond their imports: by a test, a module that tests import, a module
# of Python's, or a name of tests/conftest.py.
EXERCISES = {
    "torch.distributed": GROUP,
    "conftest.BLOCKING_DEVICE_LAYOUT": DEVICE,
    "conftest.DEVICE_LAYOUT": DEVICE,
    "conftest.ep": f"{EP_KERNELS} {HOSTS}",
    "deep_ep": f"{EP} ep",
    "mooncake.ep": EP,
    "mooncake_backend.ep": EP,
    "mooncake_backend/engine.py": TRANSFER,
    "mooncake_backend/first_submit_probe.py": f"{TRANSFER} {CARDS}",
    "mooncake_backend/transfer_bench.py": TRANSFER,
    "tests/cards.py": CARDS,
    "tests/devices.py": DEVICE,
    "tests/engines.py": TRANSFER,
    "tests/ep_kernel_ranks.py": EP_KERNELS,
    "tests/fabric_crew.py": CARDS,
    "tests/fake_device/__init__.py": "tests/fake_device csrc/device/fake",
    "tests/launchers.py": "mooncake_backend/launcher mooncake_backend/run",
    "tests/peer_ranks.py": PEERS,
    "tests/test_builds.py": f"{ENGINE} csrc/device csrc/device/cuda pyproject.toml",
    "tests/test_checkpoint_docs.py": f"{GROUP} docs/checkpoints.md mooncake_backend",
    "tests/test_demo.py": f"{EP} mooncake_backend/demo mooncake_backend",
    "tests/test_docs.py": ".",  # reads every file
    "tests/test_ep_deepep.py": f"{EP} ep",
    "tests/test_ep_docs.py": f"{EP} docs/expert-parallelism ep",
    "tests/test_ep_hosts.py": HOSTS,
    "tests/test_ep_kernels_late.py": HOSTS,
    "tests/test_ep_token_hosts.py": HOSTS,
    "tests/test_ep_token_kernels.py": EP_KERNELS,
    "tests/test_ep_words.py": EP_KERNELS,
    "tests/test_fake_device.py": PEERS,
    "tests/test_first_submit_probe.py": f"{TRANSFER} {CARDS} mooncake_backend/first_submit_probe",
    "tests/test_gpu_first.py": "tests/gpu kernels",
    "tests/test_gpu_parts.py": "tests/gpu",
    "tests/test_kernels.py": "kernels kernels/common kernels/ep kernels/proxy kernels/remote",
    "tests/test_packaging.py": f"{ENGINE} csrc/transfer/c_api pyproject.toml mooncake_backend "
    "mooncake_backend/compat mooncake_backend/_C.pyi ep ep/on_path",
    "tests/test_peer_hosts.py": HOSTS,
    "tests/test_readme.py": f"{GROUP} README.md mooncake_backend",
    "tests/test_rooms.py": ".",
    "tests/test_scale.py": "csrc/membership csrc/group benchmarks/scale_bench",
    "tests/test_supported.py": "README.md",
    "tests/test_transfer_docs.py": f"{TRANSFER} docs/transfer-engine.md docs/fabric.md",
    "tests/test_window.py": WINDOWS,
}
# Rooms that no Python test runs.
OTHERS = ".ci .clang-format .gitignore CHANGELOG.md LICENSE benchmarks csrc/wires/inproc "
OTHERS += "docs tests/c/ tests/conformance tests/cpp tests/fuzz tests/headers.sh tests/lint.sh "
OTHERS += "tests/locks.py tests/run.sh tests/simt/tests"
# Modules that many tests import for a part of them: the rooms of their own imports are not each
# test's.
LENDERS = ("tests/cards.py", "tests/conftest.py", "tests/harness.py")

SUFFIXES = (".c", ".cc", ".cu", ".cuh", ".h", ".inc")
SOURCES = (
    "csrc",
    "kernels",
    "tests/c",
    "tests/cpp",
    "tests/fake_device",
    "tests/fuzz",
    "tests/simt",
)
INCLUDED_FROM = ("csrc", "", "tests", "tests/cpp", "csrc/transfer/c_api")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
# Packages by the folders that hold them.
PACKAGES = {
    "deep_ep": "ep/on_path/deep_ep",
    "mooncake.ep": "ep",
    "mooncake_backend.ep": "ep",
    "mooncake": "mooncake_backend/compat",
    "mooncake_backend": "mooncake_backend",
}
# Also in the programs that tests hold as text.
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)|import[ \t]+([^\n#(]+))",
    re.MULTILINE,
)

Graph = Mapping[str, Iterable[str]]


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def below(folder: str, *suffixes: str) -> list[str]:
    found = (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return sorted(str(path.relative_to(ROOT)) for path in found)


def reached(start: Iterable[str], graph: Graph) -> set[str]:
    found, left = set(start), list(start)
    while left:
        new = set(graph.get(left.pop(), ())) - found
        found |= new
        left += new
    return found


def turned(graph: Graph) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for file, others in graph.items():
        for other in others:
            found[other].add(file)
    return found


# ---- C++


@functools.cache
def includes() -> dict[str, list[str]]:
    """What each file includes of this tree."""
    files = {file for folder in SOURCES for file in below(folder, *SUFFIXES)}

    def named(file: str, name: str) -> Iterable[str]:
        places = (str(Path(file).parent), *INCLUDED_FROM)
        return [path for path in (str(Path(place, name)) for place in places) if path in files][:1]

    return {
        file: [o for n in INCLUDE.findall(text_of(file)) for o in named(file, n)] for file in files
    }


@functools.cache
def links() -> dict[str, set[str]]:
    """What each file includes; for a header also the files that implement it: the one of its name
    in any folder, and files of its folder that include it, where it or they have no namesake."""
    files = includes()
    found = {file: set(others) for file, others in files.items()}
    for file, others in files.items():
        if not file.startswith("csrc/") or not file.endswith(".cc"):
            continue
        own = file[:-3] + ".h"
        if own in files:
            found[own].add(file)
        for header in others:
            namesake = header.removesuffix(".h") + ".cc"
            is_near = (
                Path(header).parent == Path(file).parent or Path(header).stem == Path(file).stem
            )
            if is_near and not (own in files and namesake in files):
                found[header].add(file)
    return found


@functools.cache
def includers() -> dict[str, set[str]]:
    return turned(includes())


@functools.cache
def dependents() -> dict[str, set[str]]:
    return turned(links())


def cpp_tests(files: Iterable[str]) -> set[str]:
    """Names of files in tests/cpp, without their ends."""
    files = set(files)
    tests = set(below("tests/cpp", ".cc"))
    if "csrc/CMakeLists.txt" in files:
        return {Path(test).stem for test in tests}
    chosen = reached(files, dependents()) & tests
    for file in files:  # data that tests read
        if file.startswith("tests/cpp/") and not file.endswith(SUFFIXES):
            chosen |= {test for test in tests if Path(test).is_relative_to(Path(file).parent)}
    return {Path(test).stem for test in chosen}


def reaches_kernels(files: Iterable[str]) -> bool:
    """Whether the suites of tests/simt are reached."""
    found = reached(files, dependents())
    return any(file.startswith("tests/simt/") for file in found)


# ---- Python


def home(folder: str, name: str) -> str | None:
    """The module of a package that a name of the package belongs to."""
    for path in (f"{folder}/{name}.py", f"{folder}/{name}/__init__.py"):
        if (ROOT / path).is_file():
            return path
    init = f"{folder}/__init__.py"
    if not (ROOT / init).is_file():
        return None
    text = text_of(init)
    for module, names, _ in IMPORT.findall(text):
        if module.startswith(".") and name in re.findall(r"\w+", names):
            return home(folder, module.strip("."))
    lazy = re.search(rf'^    "{name}": "(\w+)",$', text, re.MULTILINE)
    return home(folder, lazy[1]) if lazy else init


def folder_of(module: str) -> tuple[str, list[str]] | None:
    """The folder of the longest package in the name of a module, and what is left of the name."""
    for package in sorted(PACKAGES, key=len, reverse=True):
        if module == package or module.startswith(f"{package}."):
            return PACKAGES[package], module[len(package) :].split(".")[1:]
    return None


def imported(file: str, module: str, names: Iterable[str]) -> set[str]:
    """What `from module import names` in the file stands for: files of this tree, names of
    tests/conftest.py, and the module itself for EXERCISES."""
    if module.startswith("."):
        above = len(module) - len(module.lstrip("."))
        found: tuple[str, list[str]] | None = (str(Path(file).parents[above - 1]), [])
        rest = [part for part in module.strip(".").split(".") if part]
    else:
        found = folder_of(module) or ("tests", module.split("."))
        rest = found[1]
    assert found is not None
    folder = found[0]
    for part in rest[:-1]:
        folder = f"{folder}/{part}"
    end = home(folder, rest[-1]) if rest else None
    if rest and end is None:
        return {module}
    if rest and end and not end.endswith("/__init__.py"):
        if end == "tests/conftest.py":
            return {end, *(f"conftest.{name}" for name in names)}
        return {module, end}
    folder = folder if not rest else str(Path(end or folder).parent)
    there = {home(folder, name) for name in names} - {None}
    return (
        {module, *(path for path in there if path)} if there else {module, f"{folder}/__init__.py"}
    )


@functools.cache
def imports() -> dict[str, set[str]]:
    """What each Python file imports, as `imported` names it."""
    found: dict[str, set[str]] = {}
    folders = ("tests", "ep", "mooncake_backend", "benchmarks")
    for file in sorted({file for folder in folders for file in below(folder, ".py")}):
        text = text_of(file)
        all_names: set[str] = set()
        # Names of a package come from its modules: a package's own imports are not its users'.
        if file.endswith("/__init__.py") and not file.startswith("tests/"):
            found[file] = set()
            continue
        for module, names, plain in IMPORT.findall(text):
            if module:
                words = re.findall(r"(\w+)(?: as \w+)?", names)
                all_names |= imported(file, module, words)
                continue
            for name, alias in re.findall(r"([\w.]+)(?: as (\w+))?", plain):
                used = set(re.findall(rf"\b{re.escape(alias or name)}\.(\w+)", text))
                all_names |= imported(file, name, used if folder_of(name) else ())
        if re.search(r"^def test_\w+\((?:[^)]*\b)?ep\b", text, re.MULTILINE):
            all_names.add("conftest.ep")
        # A program that imports a package does not run all that the package can.
        kept = all_names if file.startswith("tests/") else {n for n in all_names if "/" in n}
        found[file] = kept
    return found


@functools.cache
def importers() -> dict[str, set[str]]:
    return turned({**imports(), "tests/conftest.py": ()})  # a change of it reaches every test


@functools.cache
def rooms_of() -> dict[str, set[str]]:
    """The rooms that each Python test exercises."""
    lent = {file: () if file in LENDERS else names for file, names in imports().items()}
    return {
        test: {room for name in reached([test], lent) for room in EXERCISES.get(name, "").split()}
        for test in imports()
        if Path(test).match("tests/test_*.py")
    }


@functools.cache
def all_rooms() -> list[str]:
    """Longest names first."""
    named = {room for rooms in EXERCISES.values() for room in rooms.split()}
    return sorted({*named, *OTHERS.split()} - {"."}, key=len, reverse=True)


@functools.cache
def room_of(file: str) -> str | None:
    return next((room for room in all_rooms() if file.startswith(room)), None)


def python_tests(files: Iterable[str]) -> set[str]:
    """Names of files in tests/."""
    files = set(files)
    # A header is part of each file that includes it.
    native = {file for file in files if file.endswith(SUFFIXES)}
    rooms = {room_of(file) for file in files | reached(native, includers())}
    unknown = {file for file in files if room_of(file) is None and file not in imports()}
    if unknown or "tests/conftest.py" in files:
        return {Path(test).name for test in rooms_of()}
    users = reached(files, importers())
    return {
        Path(test).name
        for test, exercised in rooms_of().items()
        if test in users or exercised & rooms or "." in exercised
    }


# ---- what has changed


def git(*arguments: str) -> list[str]:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.split("\n") if run.returncode == 0 else []


def changed_files(base: str) -> list[str]:
    """Also what is not committed yet."""
    since = (git("merge-base", base, "HEAD") or ["HEAD"])[0]
    files = git("diff", "--name-only", since) + git("ls-files", "--others", "--exclude-standard")
    return sorted({file for file in files if file})


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else "main"
    files = changed_files(base)
    print("|".join(f"{stem}\\." for stem in sorted(cpp_tests(files))))
    print(" ".join(f"tests/{name}" for name in sorted(python_tests(files))))
    print("kernels" if reaches_kernels(files) else "")


if __name__ == "__main__":
    main()
