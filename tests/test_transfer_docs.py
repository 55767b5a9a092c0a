"""The programs of docs/transfer-engine.md, and the quick start of docs/fabric.md, do what the pages
say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import cards
import harness
import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


def block(name, language="python", page="transfer-engine.md"):
    text = (DOCS / page).read_text(encoding="utf-8").split(f"<!-- {name} -->")[1]
    found = re.match(rf"\n```{language}\n(.*?)```", text, re.DOTALL)
    assert found
    return found.group(1)


def test_the_two_programs(tmp_path):
    for name in ("target.py", "initiator.py"):
        (tmp_path / name).write_text(block(name))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MOONCAKE_", "MC_"))}
    pipes = {"stdout": subprocess.PIPE, "text": True, "cwd": tmp_path, "env": environment}
    with subprocess.Popen([sys.executable, "target.py"], stdin=subprocess.PIPE, **pipes) as target:
        try:
            where = target.stdout.readline().split()
            initiator = subprocess.run(
                [sys.executable, "initiator.py", *where], timeout=harness.DEADLINE, **pipes
            )
            assert initiator.returncode == 0
            said, _ = target.communicate("\n", timeout=harness.DEADLINE)
        finally:
            target.kill()
    assert initiator.stdout + said == block("output", "text")


def test_the_quick_start_of_fabric(tmp_path):
    if why := cards.why_none():
        pytest.skip(f"libfabric has no tcp;ofi_rxm here: {why}")
    environment, target_line, initiator_line = (
        block(name, "sh", "fabric.md") for name in ("environment", "target", "initiator")
    )
    exports = "".join(line + "\n" for line in environment.splitlines() if "export" in line)
    # The programs that belong to this Python come first.
    exports += f"export PATH={Path(sys.executable).parent}:$PATH\n"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MOONCAKE_", "MC_"))}
    pipes = {"stdout": subprocess.PIPE, "text": True, "cwd": tmp_path, "env": clean}
    small = " --buffer_size=33554432"  # the page's default is 1 GiB
    line = f"{exports}exec {target_line.rstrip()}{small}"
    with subprocess.Popen(["bash", "-c", line], **pipes) as target:
        try:
            name = re.match(r"target: (\S+:\d+),", target.stdout.readline())
            assert name
            line = initiator_line.replace("127.0.0.1:PORT", name[1]).rstrip()
            initiator = subprocess.run(
                ["bash", "-c", f"{exports}{line}{small}"], timeout=harness.DEADLINE, **pipes
            )
        finally:
            target.terminate()
            target.wait(harness.DEADLINE)
    assert initiator.returncode == 0
    assert initiator.stdout.rstrip().endswith("over fabric")
