"""Tests the limits and the small helpers on made-up numbers. No rank is started."""

from __future__ import annotations

import mmap
import os

import losses
import pytest
from common import format_size, geomean, parse_size, percentiles, short, size_steps
from gates import exit_code, judge
from memory import shared_memory


def cell(backend, us, ranks=2, mode="auto", op="all_reduce", size=1024, error=None):
    row = {
        "kind": "cell",
        "mode": mode,
        "ranks": ranks,
        "op": op,
        "bytes": size,
        "backend": backend,
        "error": error,
    }
    return row if us is None else {**row, "p50_us": us}


def findings(cells):
    return {finding.name: finding for finding in judge(cells, "mooncake-cpu")}


def test_sizes_read_back():
    assert [parse_size(text) for text in ("512", "1K", "4m", "2GiB")] == [
        512,
        1024,
        4 << 20,
        2 << 30,
    ]
    assert [format_size(size) for size in (512, 1024, 1536, 4 << 20)] == ["512", "1K", "1536", "4M"]
    assert size_steps(1 << 10, 4 << 20, 4) == [1 << k for k in range(10, 23, 2)]
    with pytest.raises(ValueError, match="not a size"):
        parse_size("4X")


def test_short_numbers_keep_three_digits():
    shown = {None: "-", 0: "0", 0.01234: "0.0123", 1.2345: "1.23", 12.345: "12.3", 12345.6: "12346"}
    assert {value: short(value) for value in shown} == shown


def test_ours_is_held_against_mpi_plus_the_floor():
    found = findings([cell("mooncake-cpu", 10), cell("mpi", 3), cell("fake", 5), cell("gloo", 500)])
    assert found["2 ranks: geometric mean, ours / (mpi + floor)"].value == pytest.approx(1.25)
    assert all(finding.ok for finding in found.values())


def test_one_slow_cell_breaks_its_limit_but_not_the_mean():
    fast = [
        cell("mooncake-cpu", 1, size=1024),
        cell("mpi", 1, size=1024),
        cell("fake", 1, size=1024),
    ]
    slow = [
        cell("mooncake-cpu", 5, size=4096),
        cell("mpi", 1, size=4096),
        cell("fake", 1, size=4096),
    ]
    found = findings(fast + slow)
    assert found["2 ranks: geometric mean, ours / (mpi + floor)"].value == pytest.approx(
        geomean([0.5, 2.5])
    )
    worst = found["2 ranks: worst cell, ours / (mpi + floor)"]
    assert (worst.ok, worst.detail) == (False, "all_reduce 4K; 1 of 2 above")
    assert found["2 ranks: worst cell, ours / gloo"].ok is None  # Gloo was not measured


def test_large_sizes_and_eight_ranks_against_mpi_are_information():
    assert findings(
        [cell("mooncake-cpu", 99, size=64 << 20), cell("gloo", 1, size=64 << 20)]
    ) == findings([cell("mooncake-cpu", 1, size=64 << 20), cell("gloo", 1, size=64 << 20)])
    found = findings(
        [cell(name, us, ranks=8) for name, us in (("mooncake-cpu", 99), ("mpi", 1), ("fake", 1))]
    )
    assert {finding.ok for finding in found.values()} == {None}


def test_eight_ranks_against_four_of_them():
    rows = [
        cell("mooncake-cpu", 31, ranks=8),
        cell("mooncake-cpu/4", 10, ranks=8),
        cell("gloo", 900, ranks=8),
    ]
    assert findings(rows)["8 ranks: ours / ours on 4 of them"].ok is False
    rows[0]["p50_us"] = 30
    assert findings(rows)["8 ranks: ours / ours on 4 of them"].ok is True


def test_tcp_only_must_be_twice_as_fast_as_gloo():
    found = findings([cell("mooncake-cpu", 4, mode="tcp"), cell("gloo", 6, mode="tcp")])
    mean = found["2 ranks TCP only: geometric mean, gloo / ours"]
    assert (mean.value, mean.ok) == (pytest.approx(1.5), False)
    assert found["2 ranks TCP only: worst cell, ours / gloo"].ok is True


def test_exit_code_counts_limits_only_with_the_gate_and_wrong_results_always():
    slow = [cell("mooncake-cpu", 9), cell("gloo", 3)]
    broken = judge(slow, "mooncake-cpu")
    assert (exit_code(slow, broken, gate=False), exit_code(slow, broken, gate=True)) == (0, 1)
    assert exit_code([], [], gate=True) == 1  # nothing measured is nothing passed
    wrong = [cell("mooncake-cpu", None, error="rank 0: wrong result")]
    assert exit_code(wrong, [], gate=False) == 1


def test_shared_memory_counts_a_page_once_and_unmapped_pages_too():
    pid, before = os.getpid(), shared_memory([os.getpid()])
    pages = os.memfd_create("benchmark-test")
    try:
        os.ftruncate(pages, 64 << 20)
        with mmap.mmap(pages, 64 << 20) as first, mmap.mmap(pages, 64 << 20) as second:
            first[: 1 << 20] = second[: 1 << 20] = b"x" * (1 << 20)
            assert shared_memory([pid])["mapped"] - before["mapped"] == 1 << 20
        os.pwrite(pages, b"x" * (1 << 20), 32 << 20)
        after = shared_memory([pid])
        assert (after["mapped"], after["allocated"] - before["allocated"]) == (
            before["mapped"],
            2 << 20,
        )
    finally:
        os.close(pages)


def lost(resumed_ms, mode="shm", action="kill", evidence="exited", outcome="resumed", error=None):
    row = {"kind": "failure_kill", "mode": mode, "ranks": 2, "bytes": 1024, "action": action}
    row |= {"backend": "mooncake-cpu", "victim": 0, "beyond_ms": 0.0, "evidence": evidence}
    row |= {"known_first_ms": 1.0, "known_ms": 1.0, "view_ms": 2.0, "resumed_ms": resumed_ms}
    return {**row, "outcome": outcome, "error": error}


def failure_findings(kills):
    found = losses.judge([losses.summarize(kills), *kills], "mooncake-cpu")
    return {finding.name: (finding.value, finding.ok) for finding in found}


def test_percentiles_are_values_that_were_measured():
    found = percentiles("x", [float(value) for value in range(200, 0, -1)])
    assert found == {"x_p50_ms": 100.5, "x_p90_ms": 180, "x_p99_ms": 198, "x_max_ms": 200}
    assert set(percentiles("x", []).values()) == {None}


def test_a_slow_loss_breaks_the_limit_that_it_reaches():
    fast, slow = [lost(9.0)] * 98, [lost(101.0)] * 2
    assert failure_findings(fast + slow) == {
        "kill: resumed, p50, ms": (9.0, True),
        "kill: resumed, p99, ms": (101.0, False),
        "kill: known to all (shm), p99, ms": (1.0, True),
    }


def test_over_tcp_a_large_process_is_information_and_a_minority_is_not_timed():
    assert {ok for _, ok in failure_findings([lost(999.0, "tcp", "big")]).values()} == {None}
    minority = lost(999.0, "tcp", evidence="refused", outcome="minority")
    found = failure_findings([minority, lost(9.0, "tcp", evidence="refused")])
    assert found["kill: resumed, p99, ms"] == (9.0, True)


def test_a_survivor_that_hangs_is_an_error_of_its_cell():
    row = losses.summarize([lost(9.0), lost(None, error="nothing after the kill")])
    assert row["error"] == "1 of 2 kills: nothing after the kill"
    assert exit_code([row], [], gate=False) == 1
