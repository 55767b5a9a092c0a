"""A small version of every benchmark: prints its table and asserts correct results; with --gate,
the limits too.

If our backend is not installed, the comparison runs with the others alone, so that the runner
itself is still tested.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import bench_collectives
import bench_ddp
import bench_failure
import bench_idle
import bench_rejoin
import bench_spares
import bench_startup
import gates
import losses
import operations
import pytest
from common import print_table
from gates import Finding
from ranks import is_registered, mpi_missing

OURS = "mooncake-cpu"
SIZES = [1 << 10, 64 << 10, 4 << 20]  # bytes per rank

pytestmark = pytest.mark.perf


@pytest.fixture
def out(capsys):
    """Runs a function with its output shown, also without -s."""

    def shown(function, *args):
        with capsys.disabled():
            print()
            return function(*args)

    return shown


@pytest.fixture(scope="module")
def ours() -> str | None:
    return OURS if is_registered(OURS) else None


def need(ours: str | None) -> str:
    if ours is None:
        pytest.skip(f"{OURS} is not installed")
    return ours


def hold(findings: list[Finding], gate: bool) -> None:
    """With gate, fails if a limit is broken."""
    broken = [
        f"{f.name} = {f.value:.3g}, limit {f.limit} ({f.detail})" for f in findings if f.ok is False
    ]
    assert not (gate and broken), "\n".join(broken)


def collectives(backends: list[str], ranks: int, out, gate: bool, **how) -> None:
    ours = gates.find_ours(backends)
    settings = {
        "sizes": SIZES,
        "ops": operations.CORE,
        "rounds": 5,
        "turn_s": 0.01,
        "deadline_s": 400,
    }
    cells = bench_collectives.run(backends, ranks, ours=ours, **{**settings, **how})
    findings = gates.judge(cells, ours)
    out(bench_collectives.show, cells, ours)
    out(gates.show, findings)
    wrong = [
        f"{row['op']} {row['bytes']} {row['backend']}: {row['error']}"
        for row in cells
        if row["error"]
    ]
    assert cells, "nothing was measured"
    assert not wrong, "\n".join(wrong)
    hold(findings, gate)


def peers(ours: str | None) -> list[str]:
    return [ours] * bool(ours) + ["gloo"] + ["mpi"] * (mpi_missing() is None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives(ranks, ours, out, gate):
    collectives(peers(ours), ranks, out, gate)


def test_collectives_of_more_ranks_than_cores(ours, out, gate):
    collectives(peers(ours), 8, out, gate, sizes=[1 << 10, 1 << 20])


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_over_tcp_only(ranks, ours, out, gate):
    collectives([need(ours), "gloo"], ranks, out, gate, mode="tcp")


def test_ring_objects_and_coalesced_calls(ours, out, gate):
    coalesced = ["all_reduce", "all_gather", "reduce_scatter"]
    ops = ["ring", "all_gather_object"]
    ops += [f"{op}_{how}" for op in coalesced for how in ("8_calls", "coalesced")]
    backends = [ours or "gloo"] + ["gloo"] * bool(ours)
    collectives(backends, 8, out, gate, ops=ops, sizes=[1 << 10, 64 << 10])


def test_init_and_new_group(ours, out, gate):
    rows = bench_startup.run_times([need(ours), "gloo"], 8, rounds=5)
    findings = bench_startup.judge(rows, ours)
    out(bench_startup.show, rows)
    out(gates.show, findings)
    hold(findings, gate)


def test_memory_of_64_groups(ours, out, gate):
    rows = bench_startup.run_memory(
        [need(ours)], 8, 64, [1 << 10, 4 << 20, 32 << 20], [1 << 10, 1 << 20]
    )
    rows += bench_startup.run_memory(["gloo"], 8, 0, [1 << 10, 4 << 20, 32 << 20], [])
    findings = bench_startup.judge(rows, ours)
    out(bench_startup.show, rows)
    out(gates.show, findings)
    hold(findings, gate)


def test_cpu_time_of_a_waiting_rank(ours, out, gate):
    rows = bench_idle.run(peers(ours), 2, seconds=10 if gate else 2, ops=["all_reduce"])
    findings = bench_idle.judge(rows, ours)
    out(bench_idle.show, rows)
    out(gates.show, findings)
    assert all(row["correct"] for row in rows)
    hold(findings, gate)


def test_ddp_step(ours, out, gate):
    rows = bench_ddp.run([need(ours), "gloo"], 4, rounds=5, layers=24 if gate else 4)
    findings = bench_ddp.judge(rows, ours)
    out(bench_ddp.show, rows)
    out(gates.show, findings)
    assert not [row for row in rows if row["error"]]
    hold(findings, gate)


def test_time_of_a_loss(ours, out, gate):
    backends, kills = [need(ours), "gloo"], 20 if gate else 2
    how = {"sizes": [1 << 10], "modes": ["shm", "tcp"], "kills": kills}
    rows = bench_failure.run(backends, [2, 4], actions=["kill"], **how)
    light = bench_failure.How(failure_timeout_s=0.5, memory=64 << 20)
    rows += bench_failure.run(backends, [3], actions=["stop", "big", "segv"], how=light, **how)
    findings = losses.judge(rows, ours)
    out(losses.show, rows)
    out(gates.show, findings)
    assert not [row["error"] for row in rows if row["error"]]
    mine = [row for row in rows if row["kind"] == "failure_kill" and row["backend"] == ours]
    assert len(mine) == (4 + 6) * kills
    for row in mine:
        if row["outcome"] == "resumed":
            assert row["known_first_ms"] <= row["known_ms"]
            assert row["view_ms"] <= row["resumed_ms"]
    assert {row["evidence"] for row in mine if row["action"] == "stop"} == {"silent"}
    hold(findings, gate)


def test_time_of_a_replacement(ours, out, gate):
    need(ours)
    cells = bench_rejoin.cells_of([4], ["shm", "tcp"], list(bench_rejoin.HITS), True)
    times = 20 if gate else 2
    found = bench_rejoin.run(cells, times)
    summaries = [bench_rejoin.summarize(cell, rows) for cell, rows in found.items()]
    findings = bench_rejoin.judge(summaries)
    out(bench_rejoin.show, summaries)
    out(gates.show, findings)
    assert not [row["error"] for row in summaries if row["error"]]
    for cell, rows in found.items():
        replaced = [row for row in rows if row["outcome"] == "replaced"]
        assert len(replaced) == times
        assert len(rows) == times * (2 if cell.hit else 1)
        for row in replaced:
            assert row["init_ms"] <= row["joined_ms"] <= row["first_ms"]
    hold(findings, gate)


def test_time_to_all_ranks_with_a_spare(ours, out):
    need(ours)
    ranks = 3
    rows = bench_spares.one_job(ranks, 1)
    out(bench_spares.show, [bench_spares.summarize(rows, 1)])
    assert [row["victim"] for row in rows] == list(range(ranks))
    for row in rows:
        assert row["replaced_ms"] <= row["whole_ms"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_an_interrupted_run(ours, tmp_path, number):
    script = str(Path(bench_failure.__file__))
    command = [sys.executable, script, "--ranks", "3", "--kills", "1000", "--actions", "stop"]
    command += ["--backends", need(ours)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )

    def ranks() -> list[Path]:
        """Finds the ranks by their working folder, which is in their job's."""
        found = []
        for cwd in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):  # another user's process, or it has ended
                found += [cwd] * cwd.resolve(strict=True).is_relative_to(tmp_path)
        return found

    try:
        end = time.monotonic() + 60
        while len(ranks()) < 3 and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert (process.returncode, b"stopped" in said) == (130, True), said.decode()
    assert (ranks(), list(tmp_path.iterdir())) == ([], [])


def test_cuda_collectives_beside_nccl(ours, out):
    import torch
    import torch.distributed as dist

    if torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL comparison needs two GPUs; this machine has {torch.cuda.device_count()}")
    if not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    if not is_registered("mooncake"):
        pytest.skip("mooncake is not installed")
    how = {
        "sizes": SIZES,
        "ops": operations.CORE,
        "rounds": 5,
        "turn_s": 0.01,
        "device": "cuda",
        "ours": "mooncake",
    }
    cells = bench_collectives.run(["mooncake", "nccl"], 2, **how)
    refused = [
        row
        for row in cells
        if row["backend"] == "mooncake" and row["error"] and "wrong" not in row["error"]
    ]
    if len(refused) == len(SIZES) * len(operations.CORE):
        pytest.skip(f"mooncake takes no CUDA tensors yet: {refused[0]['error']}")
    out(bench_collectives.show, cells, "mooncake")
    assert not [row for row in cells if row["error"]]


def test_table_of_findings_is_plain_without_rich(monkeypatch, capsys):
    monkeypatch.setattr("common.util.find_spec", lambda name: None)
    print_table("title", ["what", "value"], [["first", "1"], ["second", "22"]])
    assert "second     22" in capsys.readouterr().out
