"""tests/gpu/first.sh: a step that hangs costs no other step, and the archive has every log. The
scripts that it runs work without a GPU as far as they can."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import kernel_resources
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
GPU = ROOT / "tests/gpu"
sys.path.insert(0, str(GPU))

import first  # noqa: E402

PATIENCE_S = 1.0


def python(name, text, seconds=30.0, **options):
    return first.Step(name, seconds, [sys.executable, "-c", text], **options)


def run_steps(tmp_path, steps, seconds=60.0, **options):
    run = first.Run(
        tmp_path / "logs", tmp_path / "out", {}, seconds, patience=PATIENCE_S, **options
    )
    shown = []
    is_well = first.run_all(run, steps, shown.append)
    return is_well, {row.step: row for row in run.rows}, "\n".join(shown)


def archived(tmp_path):
    with tarfile.open(tmp_path / "out/first.tgz") as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name.removeprefix("first/"): file.read().decode() for name, file in files.items()}


# ---- the steps


def test_a_step_that_hangs_costs_no_other_step(tmp_path):
    child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    hangs = "import subprocess, sys; print('begun', flush=True);"
    hangs += f"subprocess.run([sys.executable, '-c', {child!r}])"
    steps = [
        python("hangs", hangs, seconds=3.0),
        python("fails", "import sys; print('the cause'); sys.exit(3)"),
        first.Step("missing", 30.0, ["no-such-program"]),
        python(
            "works",
            "import os; print('one'); print(os.environ.pop('COLOUR'))",
            env={"COLOUR": "red"},
        ),
    ]
    begin = time.monotonic()
    is_well, rows, shown = run_steps(tmp_path, steps)
    assert time.monotonic() - begin < 30
    assert not is_well
    assert rows["hangs"].status == "stopped"
    assert "over its 3 s" in rows["hangs"].last
    assert (rows["fails"].status, rows["fails"].last) == ("3", "the cause")
    assert rows["missing"].status == "127"
    assert "no-such-program" in rows["missing"].last
    assert (rows["works"].status, rows["works"].last) == ("0", "red")
    files = archived(tmp_path)
    assert set(files) == {"summary.txt", *(f"{step.name}.log" for step in steps)}
    assert "begun" in files["hangs.log"]
    assert files["summary.txt"] in shown
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["first.tgz"]


def test_a_step_that_cannot_begin_in_time_says_so(tmp_path):
    steps = [python("long", "import time; time.sleep(600)"), python("late", "print('not run')")]
    is_well, rows, _ = run_steps(tmp_path, steps, seconds=first.LEAST_S + 1 + 2 * PATIENCE_S)
    assert not is_well
    assert rows["long"].status == "stopped"
    assert (rows["late"].status, rows["late"].last) == ("not run", "no time left")
    assert "late.log" in archived(tmp_path)


def test_a_step_runs_beside_others(tmp_path):
    waits = "import os, time\n"
    waits += f"while not os.path.exists({str(tmp_path / 'flag')!r}): time.sleep(0.01)"
    steps = [
        python("beside", waits, is_beside=True),
        python("meanwhile", f"open({str(tmp_path / 'flag')!r}, 'w')"),
        python("after", "print('last')", after="beside"),
    ]
    is_well, rows, _ = run_steps(tmp_path, steps)
    assert is_well
    assert list(rows)[-1] == "after"


def test_a_limit_for_every_step(tmp_path):
    _, rows, _ = run_steps(tmp_path, [python("long", "import time; time.sleep(600)")], most=1.0)
    assert rows["long"].status == "stopped"
    assert rows["long"].seconds < 10


def test_what_the_steps_name_exists():
    steps = first.steps_on("cuda")
    assert len({step.name for step in steps}) == len(steps)
    words = {word for step in steps for word in step.command}
    scripts = {word for word in words if word.endswith((".py", ".sh"))}
    assert not [word for word in scripts if not (ROOT / word).is_file()]
    for step in steps:
        assert step.after in (None, "install")
    assert all(step.env.get("CUDA_DEVICE_MAX_CONNECTIONS", "1") == "1" for step in steps)
    assert first.environment("cuda")["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    # The rest of the ten minutes is for the start of the machine and for the archive.
    assert first.SECONDS <= 565


def test_git_ignores_what_is_carried():
    subprocess.run(["git", "check-ignore", "-q", ".gpu/probe"], cwd=ROOT, check=True)


def test_the_list():
    listed = subprocess.run(
        [GPU / "first.sh", "--list"], capture_output=True, text=True, timeout=60, check=True
    )
    assert [line.split(" ")[0] for line in listed.stdout.splitlines()] == [
        step.name for step in first.steps_on("cuda")
    ]


# ---- the scripts


def path_with(folder):
    return os.pathsep.join([str(folder), *os.get_exec_path()])


def test_a_venv_of_a_venv_sees_the_outer_packages(tmp_path):
    """The outer one stands for a machine that brings torch in a venv. The inner one needs no pip
    of its own, and no network."""
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", outer], check=True)
    [packages] = outer.glob("lib/python3*/site-packages")
    ours = Path(torch.__file__).parents[1]
    (packages / "ours.pth").write_text(f"{ours}\n")
    env = {**os.environ, "PATH": path_with(outer / "bin")}
    for _ in range(2):  # the second time it is there already
        made = subprocess.run(
            [GPU / "venv.sh", inner], env=env, capture_output=True, text=True, timeout=120
        )
        assert made.returncode == 0, made.stderr
        assert str(ours / "torch") in made.stdout
    asks = "import sys, setuptools, torch, pytest; print(sys.prefix);"
    asks += "setuptools.Distribution().get_command_class('bdist_wheel')"  # a build needs it
    asked = subprocess.run([inner / "bin/python", "-c", asks], capture_output=True, text=True)
    assert asked.stdout.strip() == str(inner), asked.stderr
    pip = subprocess.run(
        [inner / "bin/python", "-m", "pip", "--version"], capture_output=True, text=True
    )
    assert pip.returncode == 0, pip.stderr


def test_without_mps_nothing_is_run(tmp_path):
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}")
    ran = subprocess.run(
        ["bash", GPU / "mps.sh", "echo", "run"], env={"PATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert ran.stdout == "no nvidia-cuda-mps-control on this machine: not run with MPS\n"


def test_a_server_of_mps_is_ended(tmp_path):
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(
        f'#!/bin/sh\n[ "$1" = -d ] && echo begun >>{tmp_path}/log || cat >>{tmp_path}/log\n'
    )
    control.chmod(0o755)
    ran = subprocess.run(
        [GPU / "mps.sh", "sh", "-c", "echo $CUDA_MPS_PIPE_DIRECTORY; exit 7"],
        env={**os.environ, "PATH": path_with(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 7
    assert (tmp_path / "log").read_text() == "begun\nquit\n"
    assert not Path(ran.stdout.strip()).exists()


def test_facts_come_without_a_gpu():
    facts = subprocess.run(
        [GPU / "facts.sh"], capture_output=True, text=True, timeout=120, check=False
    )
    for heading in ("GPU", "kernel", "tools", "headers", "packages"):
        assert f"== {heading}\n" in facts.stdout, facts.stdout + facts.stderr


# ---- the probe

needs_nvcc = pytest.mark.skipif(kernel_resources.NVCC is None, reason="no nvcc")


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """The program and the file of its kernels, as tests/gpu/carry.sh builds them."""
    clone = tmp_path_factory.mktemp("clone")
    (clone / "tests/gpu").mkdir(parents=True)
    for name in ("kernels", "tests/gpu/probe"):
        (clone / name).symlink_to(ROOT / name)
    script = clone / "tests/gpu/carry.sh"
    script.write_text((GPU / "carry.sh").read_text())
    built = subprocess.run(
        ["bash", script, "probe"], capture_output=True, text=True, timeout=300, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return [str(clone / ".gpu/probe"), str(clone / ".gpu/probe.fatbin")]


def run_probe(probe, **env):
    return subprocess.run(
        probe, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


@needs_nvcc
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_probe_without_a_driver(probe):
    ran = run_probe(probe)
    assert ran.returncode == 2
    assert ran.stdout.startswith("probe: this machine has no driver of CUDA: libcuda.so.1")


STUB = Path("/usr/local/cuda/lib64/stubs/libcuda.so")


@needs_nvcc
@pytest.mark.skipif(not STUB.exists(), reason="no stub of the driver")
def test_the_probe_with_a_driver_that_does_nothing(probe, tmp_path):
    """The toolkit's stub has all names of the driver, and each function fails."""
    (tmp_path / "libcuda.so.1").symlink_to(STUB)
    ran = run_probe(probe, LD_LIBRARY_PATH=str(tmp_path))
    assert ran.returncode == 2
    assert "FAILED device.cc" in ran.stdout
    assert "cuInit(0)" in ran.stdout
    assert "nothing else is asked" in ran.stdout


@needs_nvcc
def test_the_probe_needs_nothing_but_glibc(probe):
    needed = subprocess.run(
        ["readelf", "-d", probe[0]], capture_output=True, text=True, check=True
    ).stdout
    libraries = [line.split("[")[1].rstrip("]") for line in needed.splitlines() if "NEEDED" in line]
    assert libraries
    assert not [name for name in libraries if not name.startswith(("libc.", "libm.", "ld-linux"))]


def test_each_part_of_the_probe_has_its_answers():
    """answers.md has a section for each name in brackets that the probe prints."""
    answers = (GPU / "answers.md").read_text()
    main = (GPU / "probe/main.cc").read_text()
    names = {
        line.split('"')[1]
        for line in main.splitlines()
        if line.strip().startswith(('{"', 'parts.push_back({"'))
    }
    assert len(names) >= 7
    assert not [name for name in names if f"[{name}]" not in answers]


# ---- the benchmarks


@pytest.mark.parametrize(
    ("gpus", "ranks", "can"), [(0, 2, False), (1, 2, False), (2, 2, True), (2, 4, False)]
)
def test_nccl_needs_a_gpu_for_each_rank(monkeypatch, gpus, ranks, can):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from ranks import nccl_missing

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    why = nccl_missing(ranks)
    assert (why is None) == can
    assert can or f"{ranks} ranks, {gpus} GPUs" in why
