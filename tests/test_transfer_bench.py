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

from mooncake_backend import topology_dump, transfer_bench
from mooncake_backend.command_line import parse_flags

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


def test_flags_may_have_one_dash_as_with_the_original():
    flags = [
        "-mode=target",
        "-threads",
        "3",
        "-use_vram=false",
        "--block_size=8",
        "-batch_size",
        "2",
    ]
    options = parse_flags(transfer_bench.parser(), flags)
    assert (options.mode, options.threads, options.use_vram) == ("target", 3, False)
    assert (options.block_size, options.batch_size) == (8, 2)
    # A value keeps its dash, and what is no flag is named as it was given.
    assert parse_flags(transfer_bench.parser(), ["--segment_id=-x"]).segment_id == "-x"


def test_a_flag_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse_flags(transfer_bench.parser(), ["-mod=target"])
    assert "-mod=target" in capsys.readouterr().err


# ---- transfer_engine_topology_dump


def test_the_topology_is_printed_as_by_the_original(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MC_CUSTOM_TOPO_JSON", "")  # to be put back at the end
    custom = tmp_path / "topology.json"
    custom.write_text('{"cpu:0": [["card0"], ["card1"]]}')

    def dumped(*flags: str) -> tuple[str, dict[str, list[list[str]]]]:
        assert topology_dump.main(flags) == 0
        kind, _, topology = capsys.readouterr().out.partition(": ")
        return kind, json.loads(topology)

    kind, topology = dumped("--custom-topo-json", str(custom))
    assert kind == f"Local topology [te/custom ({custom})]"
    assert topology["cpu:0"] == [["card0"], ["card1"]]
    assert dumped("-use-custom-topo", "--backend=te") == (kind, topology)
    kind, topology = dumped("--device-name=no_such_card")
    assert kind == "Local topology [te/discover]"
    assert topology["cpu:0"] == [["no_such_card"], []]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--backend=tent"], "there is no backend tent"),
        (["--use-custom-topo"], "MC_CUSTOM_TOPO_JSON, which is not set"),
        (["--custom-topo-json=/no/such/file"], "/no/such/file cannot be read"),
    ],
)
def test_a_topology_that_cannot_be_printed_is_said(flags, says, monkeypatch, capsys):
    monkeypatch.delenv("MC_CUSTOM_TOPO_JSON", raising=False)
    assert topology_dump.main(flags) == topology_dump.FAILED
    assert says in capsys.readouterr().err


def test_programs_are_installed_under_the_originals_names():
    import importlib.metadata

    names = {point.name for point in importlib.metadata.entry_points(group="console_scripts")}
    expected = {"mooncake_http_metadata_server", "transfer_engine_bench"}
    expected |= {"transfer_engine_topology_dump", "efa_first_submit_probe"}
    assert expected <= names
    from mooncake import transfer_engine_topology_dump

    assert transfer_engine_topology_dump.main is topology_dump.main
