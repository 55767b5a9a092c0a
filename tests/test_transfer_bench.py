"""transfer_engine_bench: a target and an initiator, as a user starts them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mooncake_backend import transfer_bench

BUFFER = 1 << 20
SMALL = ["--block_size=4096", "--batch_size=4", "--threads=2", "--duration=1"]
COMMON = ["--metadata_server=P2PHANDSHAKE", "--protocol=tcp", "--local_server_name=127.0.0.1"]
COMMON += [f"--buffer_size={BUFFER}"]
TOOL = [sys.executable, "-m", "mooncake_backend.transfer_bench"]


@contextlib.contextmanager
def target() -> Iterator[str]:
    """Its name."""
    process = subprocess.Popen(
        [*TOOL, "--mode=target", *COMMON], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("target: "), line
        yield line.removeprefix("target: ").partition(",")[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def initiate(*flags: str, wire: bool = False) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **({"MC_FORCE_TCP": "1"} if wire else {})}
    return subprocess.run(
        [*TOOL, *COMMON, *flags], capture_output=True, text=True, timeout=120, env=env, check=False
    )


def test_writes_and_reads(tmp_path):
    with target() as name:
        for operation, wire, transport in (("write", False, "shm"), ("read", True, "tcp")):
            path = tmp_path / f"{operation}.json"
            ended = initiate(
                f"--segment_id={name}", *SMALL, f"--operation={operation}", f"--json={path}",
                "--report_unit=MiB", "--report_precision=1", wire=wire,
            )  # fmt: skip
            assert ended.returncode == 0, ended.stderr
            (row,) = map(json.loads, path.read_text().splitlines())
            assert (row["load"]["operation"], row["transport"]) == (operation, transport)
            assert row["batches"] > 0
            assert row["bytes_per_second"] > 0
            shown = f"throughput {row['bytes_per_second'] / 2**20:.1f} MiB/s over {transport}"
            assert shown in ended.stdout


def test_a_sweep_is_a_table_and_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(transfer_bench, "BLOCKS", (4096, BUFFER, 2 * BUFFER))
    monkeypatch.setattr(transfer_bench, "PARALLEL", ((1, 1), (2, 2)))
    picture = tmp_path / "sweep.png"
    with target() as name:
        flags = [*COMMON, f"--segment_id={name}", "--sweep", "--duration=1", f"--plot={picture}"]
        assert transfer_bench.main(flags) == 0
    shown = capsys.readouterr().out
    # What does not fit in the buffer is left out.
    assert [line.split("  ")[0] for line in shown.splitlines()[1:-1]] == [
        "block=4KB, threads=1, batch=1",
        "block=1MB, threads=1, batch=1",
        "block=4KB, threads=2, batch=2",
    ]
    assert shown.count("GB/s") == 6
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--segment_id=127.0.0.1:9"], "127.0.0.1:9 cannot be reached"),
        (["--protocol=efa"], "the engine does not start"),
        (["--backend=tent"], "there is no backend tent"),
        (["--use_vram=true"], "no GPU memory"),
        (["--sweep", "--buffer_size=1"], "no load of the sweep fits"),
    ],
)
def test_what_cannot_be_measured_is_said(flags, says, capsys):
    assert transfer_bench.main([*COMMON, *flags]) == transfer_bench.FAILED
    assert says in capsys.readouterr().err
