"""Suites and timings on a GPU, in parts that end within minutes: for tests/gpu/run.sh.

    python tests/gpu/parts.py --list        the parts
    python tests/gpu/parts.py NAME ...      some of them; without names: all

Each part ends with a table of its steps: tests that passed, failed and were skipped, and seconds.
build/gpu/PART.txt has the table, build/gpu/PART.log all output. A step that is not over at the
part's bound is stopped, and the steps after it do not run. Exit status 1: not everything passed.

Part `driver` needs GoogleTest, or a binary of its tests that tests/gpu/carry.sh has built on
another machine: .gpu/mooncake_tests, or the one that MOONCAKE_TESTS_BINARY names.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 480.0
STOPPING_S = 20.0  # of the bound: for a step that is told to end

# One systematic failure must not take all of a part's time: a test ends soon, and so does a suite.
TEST_DEVICE = {"TEST_DEVICE": "cuda", "RANKS_DEADLINE": "20"}
MOST_FAILURES = 4
NO_PROGRAM = 127  # the shell's status of a program that is missing
CARRIED = os.environ.get("MOONCAKE_TESTS_BINARY", ".gpu/mooncake_tests")
BUILT = "build/cpp-gpu/mooncake_tests"
IS_CARRIED = (ROOT / CARRIED).is_file()
BINARY = str(ROOT / CARRIED) if IS_CARRIED else BUILT
# One process each: an error of the driver may end the context of all that follow.
PEER_MEMORY = [
    "TwoMappingsShowOneMemory",
    "KernelsWriteSharedMemory",
    "MemoryOutlivesTheProcessThatIsKilled",
]


@dataclass(frozen=True)
class Step:
    """A command. `report`: the file of its JUnit report, if it writes one; {} is a folder."""

    name: str
    command: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    report: str | None = None
    shows: bool = False  # its output belongs to the result


@dataclass(frozen=True)
class Row:
    step: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    note: str = ""


def suites(name: str, *arguments: str, jobs: int = 1) -> Step:
    """Tests of Python, each with all of its marks."""
    report = f"{{}}/{name}.xml"
    parallel = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    options = ["-q", "-m", "", f"--maxfail={MOST_FAILURES}", f"--junitxml={report}", *parallel]
    return Step(name, ["python", "-m", "pytest", *options, *arguments], TEST_DEVICE, report)


def driver_tests(name: str, pattern: str) -> Step:
    report = f"{{}}/{name}.xml"
    options = [f"--gtest_filter={pattern}", "--gtest_brief=1", f"--gtest_output=xml:{report}"]
    return Step(name, [BINARY, *options], report=report)


def timing(name: str, script: str, *arguments: str, **env: str) -> Step:
    command = ["python", f"benchmarks/{script}", "--device", "cuda", *arguments]
    return Step(name, command, env, shows=True)


def sanitized(name: str, tool: str, *tests: str) -> Step:
    """Tests under a tool of compute-sanitizer, which is no part of a driver: its output tells if it
    is missing."""
    command = ["python", "tests/gpu/sanitizer.py", tool, *tests]
    return Step(name, command, TEST_DEVICE, shows=True)


def files(*names: str) -> list[str]:
    return [f"tests/test_{name}.py" for name in names]


STAGED = ["-k", "(device or cuda) and not kernels"]
KERNELS = ["-k", "device-kernels and not hosts"]
BUILD = """if [ ! -e /usr/include/gtest/gtest.h ] && [ -z "${GTest_ROOT-}" ]; then
  echo "No tests of the driver: this machine has neither GoogleTest nor a binary of the tests."
  echo "Build the binary where GoogleTest is (tests/gpu/carry.sh), and bring .gpu/mooncake_tests,"
  echo "or set MOONCAKE_TESTS_BINARY to it. Or install libgtest-dev, or set GTest_ROOT."
  exit 1
fi
cmake -S csrc -B build/cpp-gpu -G Ninja -DCMAKE_BUILD_TYPE=Release \
-DMOONCAKE_BUILD_TESTS=ON -DMOONCAKE_BUILD_EXTENSION=OFF -DMOONCAKE_TEST_FILES=cuda_ &&
cmake --build build/cpp-gpu --target mooncake_tests -j "$(nproc)" """

# The smallest shapes: each access of a kernel takes many times as long.
SANITIZED = {
    "collectives": ["tests/test_peer_verbs.py::test_verbs[2]"],
    "low-latency": ["tests/test_ep_kernels.py::test_nothing_runs_between_the_phases"],
    "normal": ["tests/test_ep_token_kernels.py::test_each_call_is_one_kernel"],
}

# One test at a time where kernels wait for each other: the blocks of all ranks must fit on the GPU,
# or take turns. Elsewhere ranks share the GPU.
PARTS: dict[str, list[Step]] = {
    # The seam to CUDA's driver, function by function; kernels; memory that processes share.
    "driver": [
        *([] if IS_CARRIED else [Step("build", ["bash", "-c", BUILD])]),
        driver_tests("functions", "*Cuda*:-Cuda/PeerMemorySuite/*"),
        *(driver_tests(name, f"Cuda/PeerMemorySuite/*.{name}") for name in PEER_MEMORY),
    ],
    # Collectives by kernels, of one to four processes, which are killed and stopped.
    "kernels": [
        suites("collectives", *files("peer_kernels", "peer_two_shot", "peer_table")),
        suites("verbs", *files("peer_verbs", "peer_all_to_all")),
    ],
    "graphs": [
        suites("kernels", *files("graphs")),
        suites("staged", *files("staged_graphs")),
        suites("symmetric", *files("symmetric_memory")),
    ],
    "experts": [suites("kernels", *files("ep_kernels", "ep_graphs", "ep_token_kernels"))],
    "experts-suites": [
        suites("low-latency", *KERNELS, *files("ep_buffer", "ep_shapes", "ep_callers")),
        suites("losses", *KERNELS, *files("ep_failures", "ep_normal", "ep_elastic")),
    ],
    # Kernels under compute-sanitizer: addresses, hazards of shared memory, barriers.
    **{
        f"sanitizer-{tool}": [sanitized(name, tool, *tests) for name, tests in SANITIZED.items()]
        for tool in ("memcheck", "racecheck", "synccheck")
    },
    # Tensors of the device through host memory: streams, losses, errors, messages.
    "device": [
        suites("streams", *files("device"), jobs=4),
        suites("verdicts", *files("device_verdict", "device_errors", "device_faults"), jobs=4),
        suites("pieces", *files("device_pieces", "device_messages"), jobs=4),
    ],
    "device-others": [
        suites("experts", *files("ep_device"), jobs=4),
        suites("transfers", *files("transfer_device", "transfer_ipc"), jobs=4),
    ],
    "collectives": [
        suites("verbs", *STAGED, *files("collectives", "async"), jobs=4),
        suites("messages", *STAGED, *files("groups", "point_to_point"), jobs=4),
    ],
    "training": [
        suites("torch", *STAGED, *files("ecosystem"), jobs=4),
        suites("experts", *STAGED, *files("ep_buffer", "ep_shapes", "ep_callers"), jobs=4),
    ],
    "conformance": [
        Step(
            "torchs-suite",
            ["python", "tests/conformance", "--device", "cuda", "--every", "8"],
            TEST_DEVICE,
            shows=True,
        )
    ],
    "speed": [
        timing("parts", "bench_device.py", "-b", "1K", "-e", "64M", "-f", "16", "--ranks", "1,2,4"),
        timing(
            "all_reduce", "bench_collectives.py", "-b", "1K", "-e", "16M", "-f", "16",
            "--ranks", "2,4", "--ops", "all_reduce", "--backends", "mooncake,nccl,gloo",
        ),
        timing(
            "all_to_all", "bench_collectives.py", "-b", "1M", "-e", "16M", "-f", "16",
            "--ranks", "2,4", "--ops", "all_to_all", "--backends", "mooncake,nccl",
        ),
        timing("engine", "bench_transfer_device.py"),
    ],
    "speed-pieces": [
        timing(
            "operations", "bench_device.py", "-b", "1M", "-e", "64M", "-f", "4", "--ranks", "2",
            "--ops", "all_reduce,broadcast,all_gather,reduce_scatter,all_to_all,gather,scatter",
        ),
    ],
    "speed-kernels": [
        timing(
            "table", "bench_peer_table.py", "-b", "1K", "-e", "1M", "--ranks", "2,4",
            "--write", "build/peers.txt",
        ),
    ],
    "speed-experts": [
        *(
            timing(f"{n}-tokens", "bench_ep_device.py", "--ranks", "8", "--tokens", str(n))
            for n in (1, 128, 512)
        ),
        timing("normal", "bench_ep_device.py", "--ranks", "8", "--tokens", "4096", "--normal"),
        *(
            timing(
                name, "bench_ep_device.py", "--ranks", "8", "--staged",
                MOONCAKE_EP_STREAM_WORDS=words,
            )
            for name, words in (("staged", "1"), ("staged-host", "0"))
        ),
    ],
}  # fmt: skip


def counts(report: Path) -> tuple[int, int, int]:
    """Tests of a report of pytest or GoogleTest that passed, failed and were skipped."""
    passed = failed = skipped = 0
    for case in ElementTree.parse(report).iter("testcase"):
        if case.get("status") == "notrun":
            continue
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None or case.get("result") == "skipped":
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def stop(process: subprocess.Popen[bytes], patience: float) -> None:
    """Ends the process and all of its group: first by SIGINT, after which pytest still reports."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    # A process that waits in the driver may outlive SIGKILL for some time. No step waits for it.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)


def execute(
    command: Sequence[str], env: dict[str, str], log: Path, seconds: float, patience: float
) -> int | None:
    """Runs the command, and appends its output to the log. Returns its exit status, or None if it
    was stopped after the seconds. Then it has twice `patience` to end, with all that it started."""
    with log.open("ab") as out:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **env},
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            out.write(f"cannot start {command[0]}: {error.strerror}\n".encode())
            return NO_PROGRAM
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            stop(process, patience)  # also processes that it has left


def run_step(step: Step, folder: Path, log: Path, seconds: float) -> Row:
    begin = time.monotonic()
    report = Path(step.report.format(folder)) if step.report else None
    if report:
        report.unlink(missing_ok=True)
    command = [word.format(folder) if step.report else word for word in step.command]
    with log.open("ab") as out:
        out.write(f"\n[gpu] {step.name}: {' '.join(command)}\n".encode())
    start = log.stat().st_size
    status = execute(command, step.env, log, seconds, STOPPING_S / 2)
    note = f"status {status}" if status else ""
    if status is None:
        status, note = 1, "stopped at the part's bound"
    if step.shows or status:
        with log.open("rb") as output:
            output.seek(start)
            text = output.read().decode(errors="replace")
        sys.stdout.write(text if step.shows else text[-6000:])
    found = counts(report) if report and report.exists() else (int(not status), 0, 0)
    passed, failed, skipped = found
    if status and not failed:
        failed = 1
    return Row(step.name, passed, failed, skipped, time.monotonic() - begin, note)


def table(part: str, rows: Sequence[Row]) -> str:
    lines = [["step", "passed", "failed", "skipped", "seconds", ""]]
    for row in rows:
        numbers = [str(row.passed), str(row.failed), str(row.skipped), f"{row.seconds:.0f}"]
        lines.append([row.step, *numbers, row.note])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [f"part {part}"]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:5], widths[1:5], strict=True)]
        text.append("  ".join([*cells, line[5]]).rstrip())
    return "\n".join(text) + "\n"


def run_part(name: str, steps: Sequence[Step], folder: Path, bound: float = BOUND_S) -> bool:
    """Returns whether everything passed."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    log.unlink(missing_ok=True)
    end = time.monotonic() + bound - STOPPING_S
    rows = []
    for step in steps:
        left = end - time.monotonic()
        if left <= 0:
            rows.append(Row(step.name, 0, 1, 0, 0.0, "not run: the part's bound"))
            continue
        print(f"\n[gpu] {name}: {step.name}", flush=True)
        rows.append(run_step(step, folder, log, left))
    text = table(name, rows)
    (folder / f"{name}.txt").write_text(text)
    print("\n" + text, flush=True)
    return not any(row.failed for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--list", action="store_true", help="print the parts, run nothing")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    chosen = options.parts or list(PARTS)
    if options.list:
        for name in chosen:
            print(f"{name}: {', '.join(step.name for step in PARTS[name])}")
        return 0
    results = [run_part(name, PARTS[name], ROOT / "build/gpu") for name in chosen]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
