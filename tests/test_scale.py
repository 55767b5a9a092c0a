"""Messages with which many ranks leave a job: forked ranks of a C++ program, without torch. Counts
have limits, times have none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import bench_scale

ROOT = Path(__file__).resolve().parent.parent
RANKS = 32


@pytest.fixture(scope="module")
def build() -> Path:
    """A folder that the C++ tests were built in (tests/run.sh)."""
    programs = sorted(ROOT.glob("build/cpp*/scale_bench"), key=lambda one: one.stat().st_mtime)
    if not programs:
        pytest.skip("scale_bench is not built")
    return programs[-1].parent


def check(row: dict[str, Any], left: int = RANKS) -> None:
    assert row["left"] == left
    broken = [one for one in bench_scale.judge(row) if not one.ok]
    assert not broken, (broken, row)


@pytest.mark.parametrize("how", ["destroy", "end"])
@pytest.mark.parametrize("wire", ["tcp", "shm"])
def test_leaving_together_costs_few_messages(build, wire, how):
    check(bench_scale.leave(build, RANKS, wire, how))


def test_a_rank_that_stays_longer_costs_few_messages(build):
    row = bench_scale.leave(build, RANKS, "tcp", "destroy", late_ms=1000)
    # The others, and later the one: it reports their goodbyes a few times.
    check(row)
    assert row["seconds"] >= 1


def test_a_rank_killed_as_it_leaves_holds_up_no_rank(build):
    row = bench_scale.leave(build, RANKS, "tcp", "destroy", victim=5)
    assert row["left"] == RANKS - 1
    assert row["outvoted"] == 0
    assert row["accused"] <= RANKS - 1, "only the victim is accused"
    assert row["seconds"] < 10, "three times the failure timeout"
