"""The two programs of docs/transfer-engine.md do what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import harness

PAGE = Path(__file__).resolve().parents[1] / "docs/transfer-engine.md"


def block(name, language="python"):
    text = PAGE.read_text(encoding="utf-8").split(f"<!-- {name} -->")[1]
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
