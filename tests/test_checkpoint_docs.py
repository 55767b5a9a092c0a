"""The programs of docs/checkpoints.md."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import harness
import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs/checkpoints.md"


def block(language, behind):
    text = PAGE.read_text(encoding="utf-8").split(behind)[1]
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found
    return found.group(1)


def run(folder, *arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOONCAKE_")}
    done = subprocess.run(
        [sys.executable, "-m", "mooncake_backend.run", *arguments],
        env=environment | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=harness.DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("mode", ["continue", "raise"])
def test_a_checkpoint_of_the_survivors(tmp_path, mode):
    (tmp_path / "save.py").write_text(block("python", "<!-- save.py"))
    (command,) = block("bash", "<!-- save.py").splitlines()
    name, *arguments = shlex.split(command)
    assert name == "mooncake-run"
    printed = run(tmp_path, *arguments, MOONCAKE_ON_FAILURE=mode)
    # Ranks print at once: the end of a line may stand behind the next line.
    lines = re.findall(r"rank \d loaded .*? ranks", printed)
    assert sorted(lines) == block("text", "<!-- save.py").splitlines()


def lines_of_training(folder, program, ranks):
    (folder / "shards.py").write_text(program)
    printed = run(folder, "--standalone", "--nproc-per-node", str(ranks), "shards.py")
    # Ranks print at once: the end of a line may stand behind the next line.
    return re.findall(r"rank \d, step \d: loss .*? ranks", printed)


def test_shards_are_loaded_by_the_survivors(tmp_path):
    lines = lines_of_training(tmp_path, block("python", "<!-- shards.py"), 3)
    shown = block("text", "<!-- shards.py").splitlines()
    assert [line for line in lines if line in shown] == shown
    assert sorted(line for line in lines if "on 2 ranks" in line and line[5] == "0") == shown[1:]
    assert not [line for line in lines if line.startswith("rank 1, step 3")]


def test_shards_survive_a_second_loss(tmp_path):
    program = block("python", "<!-- shards.py").replace("{1: 3}", "{1: 3, 2: 5}")
    lines = lines_of_training(tmp_path, program, 4)
    ends = [line for line in lines if ", step 5: " in line]
    assert sorted(re.sub("loss .*? on", "on", line) for line in ends) == [
        f"rank {rank}, step 5: on 2 ranks" for rank in (0, 3)
    ]
