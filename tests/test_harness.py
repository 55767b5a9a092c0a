"""tests/harness.py: deadlines on a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest


@pytest.mark.parametrize(
    ("load", "cores", "factor"), [(0, 2, 1), (1.9, 2, 1), (5, 2, 2.5), (50, 2, 4), (50, 64, 1)]
)
def test_slowness_is_the_load_of_a_core(load, cores, factor):
    assert harness.slowness(load, cores) == factor


def deadlines_on_rank(me):
    return harness.SLOWNESS, harness.DEADLINE


def test_ranks_have_the_deadlines_of_the_test():
    found = harness.run_ranks(2, deadlines_on_rank, backend=None)
    assert found == [(harness.SLOWNESS, harness.DEADLINE)] * 2


def told(**variables):
    program = "import harness; print(harness.SLOWNESS, harness.DEADLINE, harness.scaled(2))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RANKS_")}
    run = subprocess.run(
        [sys.executable, "-c", program], env={**kept, **variables}, capture_output=True, text=True,
        cwd=Path(__file__).parent, timeout=harness.DEADLINE, check=True,
    )  # fmt: skip
    return [float(word) for word in run.stdout.split()]


def test_deadlines_are_scaled_unless_they_are_given():
    assert told(RANKS_SLOWNESS="3") == [3, 360, 6]
    assert told(RANKS_SLOWNESS="3", RANKS_DEADLINE="20") == [3, 20, 6]
    found = told()
    assert 1 <= found[0] <= harness.MOST_SLOWNESS
    assert found[1] == pytest.approx(120 * found[0])
