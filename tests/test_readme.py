"""The program that the README begins with does what the README says, and its commands are there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import harness

README = Path(__file__).resolve().parents[1] / "README.md"


def block(language, behind="<!-- survive.py"):
    text = README.read_text(encoding="utf-8").split(behind)[1]
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found
    return found.group(1)


def test_the_first_program_survives_a_kill(tmp_path):
    (tmp_path / "survive.py").write_text(block("python"))
    (command,) = block("bash").splitlines()
    name, *arguments = shlex.split(command)
    assert name == "mooncake-run"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOONCAKE_")}
    done = subprocess.run(
        [sys.executable, "-m", "mooncake_backend.run", *arguments],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=harness.DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    shown = block("text").splitlines()
    lines = [line for line in shown if line.startswith("rank ")]
    # Ranks print at once: the end of a line may stand behind the next line.
    assert sorted(re.findall(r"rank \d.*? sum", done.stdout)) == sorted(lines)
    for line in (line for line in shown if line.startswith("mooncake-run: ")):
        assert line in done.stderr
    # The evidence in brackets depends on how a rank hears of the loss first.
    warning = re.compile(r"^\S+Z (mooncake W rank \d: rank 2 lost) \(.*\)(; .*)$", re.MULTILINE)
    assert sorted(warning.findall("\n".join(shown))) == sorted(warning.findall(done.stderr)) != []
    assert re.search(r"^  2 .* killed by SIGKILL  went on", done.stderr, re.MULTILINE)


def test_the_three_commands_are_there():
    """Tests of packaging and of the demo run them."""
    install, *scripts = [
        line.split("#")[0].split() for line in block("bash", "## Install it").splitlines()
    ]
    assert install == ["pip", "install", "."]
    assert len(scripts) == 2
    for (script,) in scripts:
        assert os.access(README.parent / script, os.X_OK), script


def test_the_doctor_of_the_readme_answers():
    (module,) = re.findall(r"`python -m (mooncake_backend) doctor`", README.read_text("utf-8"))
    done = subprocess.run(
        [sys.executable, "-m", module, "doctor"],
        capture_output=True,
        text=True,
        timeout=harness.DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ +ok +two-rank trial", done.stdout, re.MULTILINE)
