"""tests/gpu: its parts end within their bounds with a table, also where a step fails or hangs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

spec = importlib.util.spec_from_file_location("gpu_parts", ROOT / "tests/gpu/parts.py")
assert spec is not None
assert spec.loader is not None
parts = importlib.util.module_from_spec(spec)
sys.modules["gpu_parts"] = parts  # for its dataclasses
spec.loader.exec_module(parts)

STEPS = [step for steps in parts.PARTS.values() for step in steps]


def test_what_the_parts_name_exists():
    named = {word for step in STEPS for word in step.command if word.endswith(".py")}
    assert not [word for word in named if not (ROOT / word).is_file()]
    tests = {word for step in STEPS for word in step.command if "::" in word}
    assert tests
    for test in tests:
        file, name = test.split("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test
    on_devices = {f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*device*.py")}
    of_fake = {"tests/test_fake_device.py"}
    assert on_devices - of_fake <= named
    for steps in parts.PARTS.values():
        assert len({step.name for step in steps}) == len(steps)


def python(name, text, **options):
    return parts.Step(name, [sys.executable, "-c", text], **options)


def test_a_part_that_fails(tmp_path, capsys):
    suite = tmp_path / "test_some.py"
    suite.write_text(
        "import pytest\n"
        "def test_one(): pass\n"
        "def test_two(): pass\n"
        "def test_three(): assert 1 == 2\n"
        "def test_four(): pytest.skip('why')\n"
    )
    report = "{}/some.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    steps = [
        parts.Step("some", [*command, f"--junitxml={report}", str(suite)], report=report),
        python("says", "print('the result')", shows=True),
        python("breaks", "import sys; print('the cause'); sys.exit(3)"),
    ]
    assert not parts.run_part("mixed", steps, tmp_path / "out")
    lines = [line.split() for line in (tmp_path / "out/mixed.txt").read_text().splitlines()]
    assert [line[:4] for line in lines[2:]] == [
        ["some", "2", "1", "1"],
        ["says", "1", "0", "0"],
        ["breaks", "0", "1", "0"],
    ]
    assert lines[-1][-2:] == ["status", "3"]
    shown = capsys.readouterr().out
    assert "the result" in shown
    assert "the cause" in shown
    assert "assert 1 == 2" in (tmp_path / "out/mixed.log").read_text()


def test_a_report_of_googletest(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a" status="run" result="completed"/>'
        '<testcase name="b" status="run" result="skipped"><skipped message="x"/></testcase>'
        '<testcase name="c" status="notrun" result="suppressed"/>'
        '<testcase name="d" status="run" result="completed"><failure message="y"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert parts.counts(report) == (1, 1, 1)


def test_a_step_that_hangs_is_stopped(tmp_path, monkeypatch):
    """So is the process that it has started, which hears no SIGINT."""
    monkeypatch.setattr(parts, "STOPPING_S", 1.0)
    child = "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    child += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    hangs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    steps = [python("hangs", hangs), python("later", "print('not run')")]
    assert not parts.run_part("late", steps, tmp_path, bound=6.0)
    text = (tmp_path / "late.txt").read_text()
    assert "stopped at the part's bound" in text
    assert "not run" in text
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def run_script(*arguments):
    command = [ROOT / "tests/gpu/run.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("says", ["", "No devices were found"])
def test_without_a_gpu(tmp_path, monkeypatch, says):
    """Neither without a driver nor with one that sees no GPU is anything run."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{says}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = run_script()
    assert (found.returncode, found.stdout) == (0, "no GPU on this machine: nothing to run\n")


def test_the_list():
    found = run_script("--list")
    assert found.returncode == 0, found.stderr
    assert [line.split(":")[0] for line in found.stdout.splitlines()] == list(parts.PARTS)


def test_one_systematic_failure_does_not_take_all_the_time():
    suites = [step for step in STEPS if "pytest" in step.command]
    assert suites
    for step in suites:
        assert "--maxfail=4" in step.command, step.name
        assert step.env["RANKS_DEADLINE"] == "20", step.name
    assert not [step.name for step in STEPS if any("NCCL" in name for name in step.env)]


def load_parts(tmp_path, binary=None):
    """The parts of a clone that has nothing but them."""
    copy = tmp_path / "tests/gpu/parts.py"
    copy.parent.mkdir(parents=True, exist_ok=True)
    text = (ROOT / "tests/gpu/parts.py").read_text()
    copy.write_text(text.replace("/usr/include/gtest", str(tmp_path / "nowhere")))
    env = {name: value for name, value in os.environ.items() if name != "GTest_ROOT"}
    if binary:
        env["MOONCAKE_TESTS_BINARY"] = str(binary)
    return subprocess.run(
        [sys.executable, copy, "driver"], env=env, capture_output=True, text=True, timeout=60
    )


def test_tests_of_the_driver_without_googletest(tmp_path):
    ran = load_parts(tmp_path)
    assert ran.returncode == 1
    for part in ("neither GoogleTest nor a binary", "tests/gpu/carry.sh", "MOONCAKE_TESTS_BINARY"):
        assert part in ran.stdout, ran.stdout


def test_tests_of_the_driver_that_were_built_elsewhere(tmp_path):
    binary = tmp_path / "built"
    binary.write_text("#!/bin/sh\necho given $1\n")
    binary.chmod(0o755)
    ran = load_parts(tmp_path, binary)
    assert ran.returncode == 0, ran.stdout
    log = (tmp_path / "build/gpu/driver.log").read_text()
    assert "given --gtest_filter=*Cuda*:-Cuda/PeerMemorySuite/*" in log
    assert "cmake" not in log


# A stand-in for compute-sanitizer: runs the tests, and then says that it found something or not.
SANITIZER = """#!/bin/sh
echo "given $*"
while [ "$1" != {python} ]; do shift; done
"$@"
status=$?
echo "========= {summary}"
exit {exit}
"""


@pytest.mark.parametrize(
    ("summary", "code", "says"),
    [
        ("ERROR SUMMARY: 0 errors", "$status", "racecheck: nothing found"),
        (
            "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
            "$status",
            "racecheck: nothing found",
        ),
        ("ERROR SUMMARY: 2 errors", "86", "racecheck: compute-sanitizer found 2 errors"),
        ("RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", "0", "found 1 errors"),
        ("ERROR SUMMARY: 0 errors", "1", "the tests ended with status 1"),
        ("Target application terminated before first instrumented API call", "0", "no process"),
    ],
)
def test_a_step_under_compute_sanitizer(tmp_path, summary, code, says):
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER.format(python=sys.executable, summary=summary, exit=code))
    tool.chmod(0o755)
    ran = subprocess.run(
        [sys.executable, "tests/gpu/sanitizer.py", "racecheck", "-p", "no:cacheprovider",
         str(tmp_path / "test_one.py")],
        cwd=ROOT, env={**os.environ, "PATH": f"{tmp_path}:{os.defpath}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert says in ran.stdout, ran.stdout + ran.stderr
    assert "given --tool racecheck --target-processes all" in ran.stdout
    assert "1 passed" in ran.stdout
    assert ran.returncode == int("nothing found" not in says)


@pytest.mark.skipif(
    Path("/usr/local/cuda/bin/compute-sanitizer").exists(), reason="compute-sanitizer is there"
)
def test_no_compute_sanitizer(tmp_path):
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/sanitizer.py"), "memcheck", "tests"],
        env={"PATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "compute-sanitizer is missing: nothing was checked" in ran.stdout
