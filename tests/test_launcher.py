"""mooncake-run: what becomes of a job whose ranks, hosts and launchers die."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import pytest
import torch.distributed as dist
from launchers import Site, needs_hosts, start_on

from mooncake_backend import run
from mooncake_backend.launcher import notices, waits
from mooncake_backend.launcher.endings import Ending, failures, table

# ---- survivors

TRAIN = """
import torch
import torch.distributed as dist

dist.init_process_group("mooncake")
sums = []
for step, victim in enumerate([None, 2, None, 0, None]):
    if RANK == victim:
        die()
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    sums.append(tensor[0].item())
# The store is there, though rank 0 is not.
store = dist.distributed_c10d._get_default_store()
store.set(f"survivor-{RANK}", "")
store.wait(["survivor-1", "survivor-3"])
dist.destroy_process_group()
say("sums", sums)
"""


def test_the_others_finish_when_ranks_die(site: Site):
    code, output = site.run(TRAIN, ranks=4)
    assert code == 0, output
    for rank in (1, 3):
        assert site.heard("sums", rank) == [4, 3, 3, 2, 2]
    lines = output[output.index("mooncake-run: 2 of 4 ranks finished") :].splitlines()
    assert lines[0].endswith("2 died and the others went on")
    for line in lines[2:4]:
        assert re.search(r"  went on after [\d.]+ m?s, the last finished", line), line
    words = [line.split() for line in lines[2:]]
    assert sorted(line[0] for line in words[:2] if "SIGKILL" in line) == ["0", "2"]
    assert words[2][:2] == ["1,", "3"]
    assert words[2][-1] == "finished"


def test_the_store_is_never_in_a_rank(site: Site):
    script = """
import socket
if RANK == 0:
    die()
until_seen_dead(0)
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 10).close()
"""
    # Under torchrun, the variable leaves the store to rank 0.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    code, output = site.run(script, env=env)
    assert code == 0, output


# ---- a rank that dies before init

BEFORE_INIT = """
from datetime import timedelta
import torch.distributed as dist

if RANK == 1:
    raise ValueError("no such file")
try:
    dist.init_process_group("mooncake", timeout=timedelta(minutes=10))
except dist.DistBackendError as error:
    say("error", str(error))
"""


def test_a_rank_that_dies_before_init_is_named_and_not_waited_for(site: Site):
    """The test is over before the ten minutes that init may take."""
    code, output = site.run(BEFORE_INIT, "--run-path", ranks=3)
    assert code == 0, output
    for rank in (0, 2):
        error = site.heard("error", rank)
        assert "the job cannot begin with all of its ranks" in error
        assert "rank 1: exit code 1: ValueError: no such file" in error
        assert error.count("rank 1: exit code 1") == 1, error


def test_a_rank_that_dies_between_two_jobs_is_not_waited_for(site: Site):
    """The store still holds what all ranks said for the first job."""
    script = """
from datetime import timedelta
import torch.distributed as dist

dist.init_process_group("mooncake")
dist.destroy_process_group()
if RANK == 0:
    die()
try:
    dist.init_process_group("mooncake", timeout=timedelta(minutes=10))
except dist.DistBackendError as error:
    say("error", str(error))
"""
    code, output = site.run(script, ranks=3)
    assert code == 0, output
    for rank in (1, 2):
        assert "rank 0: killed by SIGKILL" in site.heard("error", rank)


def test_ranks_that_are_started_again_begin_though_one_died_before_init(site: Site):
    script = """
import torch
import torch.distributed as dist

if RANK == 1 and ATTEMPT == 0:
    die()
dist.init_process_group("mooncake")
tensor = torch.ones(1)
dist.all_reduce(tensor)
time.sleep(1)
dist.destroy_process_group()
say("sum", tensor.item())
"""
    code, output = site.run(script, "--on-death", "restart", "--max-restarts", "1", ranks=3)
    assert code == 0, output
    assert [site.heard("sum", rank) for rank in range(3)] == [3.0] * 3


@needs_hosts
@pytest.mark.netns
@pytest.mark.parametrize("how", ["c10d", "static"])
def test_a_rank_that_dies_before_init_is_named_on_other_hosts_too(site: Site, two_hosts, how):
    script = BEFORE_INIT.replace("RANK == 1", "RANK == 3")  # on the host without the store
    launchers = [start_on(site, two_hosts(), node, script, 2, how) for node in range(2)]
    ended = [launcher.wait() for launcher in launchers]
    assert [code for code, _ in ended] == [0, 0], ended
    for rank in range(3):
        assert "rank 3: exit code 1" in site.heard("error", rank)


LOOKS_AT = """
from mooncake_backend.launcher import notices
say("keys", [notices.key_for(RANK, 2), notices.key_for(RANK, 3), notices.key_for(1 - RANK, 2)])
"""


def test_only_ranks_of_mooncake_run_look_at_notices(tmp_path: Path):
    keys = []
    for name, main in (("ours", run.main), ("torchrun", _torchrun)):
        folder = tmp_path / name
        folder.mkdir()
        site = Site(folder)
        try:
            code, output = site.run(LOOKS_AT, main=main)
            assert code == 0, output
            keys.append([site.heard("keys", rank) for rank in range(2)])
        finally:
            assert not site.close()
    (ours, *others), again = keys[0]
    assert notices.KEY.fullmatch(ours)
    assert others == [None, None], "a group of other ranks"
    assert again[0] == ours
    assert keys[1] == [[None] * 3] * 2


def test_notices_of_an_earlier_start_are_not_read(tmp_path: Path, monkeypatch):
    """Over one store that outlives both."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    seen = []
    for start in range(2):
        launchers = []
        for node in (1, 0):  # the one that draws the number comes last
            folder = tmp_path / f"{start}-{node}"
            folder.mkdir()
            of_this_start = dist.PrefixStore(f"start-{start}", store)
            launchers.append(
                notices.Notices(
                    of_this_start, node, 2, "127.0.0.1", store.port, [str(folder / "error.json")]
                )
            )
        keys = set()
        for node in range(2):
            monkeypatch.setenv(
                "TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{start}-{node}/error.json")
            )
            keys.add(harness.until(lambda: notices.key_for(0, 4), "the key"))
        (key,) = keys
        assert not store.check([key])
        launchers[0].died(3, "exit code 1:\n" + "\N{SNOWMAN}" * 200)
        launchers[1].died(0, "killed by SIGKILL")
        harness.until(
            lambda key=key: store.check([key]) and store.get(key).count(b"\n") == 2, "two lines"
        )
        lines = sorted(store.get(key).decode().splitlines())
        assert lines[0] == "rank 0: killed by SIGKILL"
        assert lines[1].startswith("rank 3: exit code 1: \N{SNOWMAN}")
        assert len(lines[1].encode()) <= notices.MOST_BYTES
        for launcher in launchers:
            launcher.close()
        seen.append(key)
    assert seen[0] != seen[1]


# ---- how long the others waited


def waited(output: str, victim: int) -> float | None:
    """Seconds, as the table says; None: it says nothing of it."""
    table = output[output.index("mooncake-run: ") :]
    (line,) = [line for line in table.splitlines() if line.startswith(f"  {victim} ")]
    found = re.search(r"  went on after ([\d.]+) (m?s)", line)
    return float(found[1]) / (1000 if found[2] == "ms" else 1) if found else None


LOSE_ONE = """
import torch
import torch.distributed as dist

dist.init_process_group("mooncake")
dist.barrier()
"""


def test_what_the_others_waited_for_a_rank_that_lived_does_not_count(site: Site):
    script = """
if RANK == 0:
    heard("called", 1)
    heard("called", 2)
    time.sleep(2)
    die()
say("called", 1)
dist.barrier()
"""
    code, output = site.run(LOSE_ONE + script, ranks=3)
    assert code == 0, output
    assert 0 < waited(output, 0) < 1.5, output


def test_silence_counts_from_the_last_sign_of_life(site: Site):
    script = """
if RANK == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.barrier()
if RANK == 1:
    os.kill(heard("pid", 0), signal.SIGKILL)
"""
    code, output = site.run(LOSE_ONE + script, ranks=3, env={"MOONCAKE_FAILURE_TIMEOUT_MS": "700"})
    assert code == 0, output
    assert 0.5 < waited(output, 0) < 5, output


def test_who_calls_nothing_waits_for_nobody(site: Site):
    script = """
if RANK == 0:
    die()
until_seen_dead(0)
"""
    code, output = site.run(LOSE_ONE + script, ranks=3)
    assert code == 0, output
    assert waited(output, 0) is None
    assert "  went on, the last finished " in output


def test_an_operation_that_raises_has_waited_too(site: Site):
    script = """
if RANK == 0:
    die()
try:
    dist.barrier()
except RuntimeError:
    say("raised", 1)
"""
    code, output = site.run(LOSE_ONE + script, ranks=3, env={"MOONCAKE_ON_FAILURE": "raise"})
    assert code == 0, output
    site.heard("raised", 1)
    assert waited(output, 0) is not None, output


def test_where_nobody_finishes_the_wait_is_told_all_the_same(site: Site):
    script = """
if RANK == 0:
    die()
dist.barrier()
sys.exit(3)
"""
    code, output = site.run(LOSE_ONE + script, ranks=3)
    assert code == 1, output
    assert waited(output, 0) is not None, output


def test_a_file_of_waits_that_somebody_else_wrote_ends_nothing(tmp_path: Path):
    error_file = tmp_path / "error.json"
    noted = waits.Waits(str(error_file))
    noted.read(1.0)
    assert noted.all() == []
    waits.ask(str(error_file))
    with (tmp_path / waits.NAME).open("ab", buffering=0) as file:
        file.write(b"2 15000\n\xff\n-1 3\n2 40000\n0 1\n3 99")
        noted.read(2.0)
        assert noted.all() == [(0, 1e-6, 2.0), (2, 0.04, 2.0)]
        assert noted.joined is None
        file.write(b"000\njoined\n2 10000\n")  # the line that was not whole yet, and one more
        noted.read(3.0)
    assert noted.all() == [(0, 1e-6, 2.0), (2, 0.04, 2.0), (2, 0.01, 3.0), (3, 0.099, 3.0)]
    assert noted.joined == 3.0


# ---- exit codes


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("sys.exit(0)", 0, "2 of 2 ranks finished\n"),
        ("sys.exit(RANK + 3)", 1, "0 of 2 ranks finished\n"),
        (
            "die() if RANK else until_seen_dead(1)",
            0,
            "1 of 2 ranks finished, 1 died and the others went on\n",
        ),
        # When does not count: a launcher sees ends late, and hosts' clocks differ.
        (
            "until_seen_dead(0) or sys.exit(7) if RANK else None",
            0,
            "1 of 2 ranks finished, 1 died and the others went on\n",
        ),
    ],
    ids=["all finish", "nobody finishes", "one is outlived", "one fails last"],
)
def test_the_exit_code_tells_whether_anybody_finished(site: Site, script, code, says):
    ended, output = site.run(script)
    assert ended == code, output
    assert f"mooncake-run: {says}" in output
    # torchrun's own report of those that count.
    assert ("Root Cause" in output) == (code == 1)


def test_clocks_of_other_hosts_decide_nothing():
    def ending(rank: int, code: int, ended: float, ahead: float) -> Ending:
        """Of a node for each two ranks, whose clock is `ahead`."""
        return Ending(rank, "host", 0, code, ahead, ended + ahead, node=rank // 2)

    def job(ahead: float) -> list[Ending]:
        own = [ending(0, 0, 7.0, 0.0), ending(1, -9, 5.0, 0.0)]
        return [*own, ending(2, 1, 8.0, ahead), ending(3, -9, 6.0, ahead)]

    def said(ahead: float) -> list[str]:
        """The table without the wall clock's time."""
        return [re.sub(r"\d\d:\d\d:\d\dZ", "", line) for line in table(job(ahead)).splitlines()]

    assert failures(job(0)) == failures(job(-3600)) == failures(job(3600)) == []
    assert said(0) == said(-3600) == said(3600)
    dead = [ending for ending in job(0) if not ending.finished]
    assert failures(dead) == dead
    assert "1 of 4 ranks finished, 3 died and the others went on" in said(0)[0]
    (row,) = [line for line in said(0) if line.startswith("  1 ")]
    assert row.endswith("killed by SIGKILL  went on, the last finished 2.0 s later")
    (row,) = [line for line in said(0) if line.startswith("  3 ")]
    assert row.endswith("killed by SIGKILL  finished on other hosts")


def test_the_longest_wait_of_the_others_stands_in_the_table():
    def ending(
        rank: int, code: int, waits: Sequence[tuple[int, float]], attempt: int = 0
    ) -> Ending:
        seen = [(lost, wait, 5.0) for lost, wait in waits]
        return Ending(rank, "host", attempt, code, 0.0, 5.0 + rank, waits=seen)

    endings = [
        ending(0, -9, []),
        ending(1, -9, [(0, 0.25)]),  # before it died itself
        ending(2, 0, [(0, 0.0042), (1, 1.26)]),
        ending(3, 0, [(1, 0.015)]),
    ]
    lines = table(endings).splitlines()
    assert lines[2].endswith("  went on after 250 ms, the last finished 3.0 s later")
    assert lines[3].endswith("  went on after 1.3 s, the last finished 2.0 s later")
    # Of another attempt's rank 0 nobody has said anything.
    again = table([*endings, ending(0, -9, [], attempt=1), ending(1, 0, [], attempt=1)])
    assert again.splitlines()[4].endswith("  went on, the last finished 1.0 s later")
    assert "went on after 4.2 ms" in table([endings[0], ending(2, 1, [(0, 0.0042)])])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--on-death", "resurrect"], "must be continue, restart or replace, not 'resurrect'"),
        (["--max-restarts", "2"], "--max-restarts is for --on-death restart"),
        (["--on-death", "replace", "--max-restarts", "2"], "is for --on-death restart"),
        (["--max-replacements", "2"], "--max-replacements is for --on-death replace"),
        (["--on-death", "replace", "--max-replacements", "-1"], "must be 0 or more, not -1"),
    ],
)
def test_flags_without_a_meaning_are_refused(flags, says, capsys):
    with pytest.raises(SystemExit) as refused:
        run.main([*flags, "script.py"])
    assert refused.value.code == 2
    assert says in capsys.readouterr().err


def test_standalone_needs_no_name_of_the_host(site: Site):
    code, said = site.run(
        'say("address", os.environ["MASTER_ADDR"])', main=_without_a_name_of_the_host
    )
    assert code == 0, said
    assert [site.heard("address", rank) for rank in (0, 1)] == ["127.0.0.1"] * 2


def _without_a_name_of_the_host(arguments: Sequence[str]) -> int:
    socket.getfqdn = lambda name="": "no-such-host.invalid"
    return run.main(arguments)


def test_without_a_temporary_folder_it_says_so(monkeypatch, capsys):
    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(SystemExit) as end:
        run.main(["--standalone", "rank.py"])
    assert end.value.code == 2
    assert "set TMPDIR to a folder that can be written" in capsys.readouterr().err


def test_it_is_installed_as_a_command():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="mooncake-run")
    assert command.load() is run.main


# ---- what torchrun does, and so does this

SHOW = """
say("environment", dict(os.environ))
say("arguments", sys.argv[1:])
"""
# Of one job, and chosen anew for each.
OF_THE_JOB = {"TORCHELASTIC_ERROR_FILE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}


def _torchrun(arguments: Sequence[str]) -> int:
    from torch.distributed.run import main

    main(arguments)
    return 0


def test_ranks_get_the_environment_that_torchrun_gives(tmp_path: Path):
    seen = []
    for name, main in (("ours", run.main), ("torchrun", _torchrun)):
        folder = tmp_path / name
        folder.mkdir()
        site = Site(folder)
        try:
            code, output = site.run(SHOW, "--role", "trainer", main=main)
            assert code == 0, output
            seen.append([site.heard("environment", rank) for rank in range(2)])
        finally:
            assert not site.close()
    for ours, theirs in zip(*seen, strict=True):
        assert ours.keys() == theirs.keys()
        different = {name for name in ours if ours[name] != theirs[name]}
        assert different <= OF_THE_JOB
        assert ours["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_a_dead_ranks_exception_is_in_its_error_file_and_in_the_table(site: Site):
    logs = site.folder / "logs"
    own = site.folder / "own.json"
    code, output = site.run(
        """
print("hello from", RANK)
if RANK == 1:
    raise ValueError("bad batch\\nand more")
until_seen_dead(1)
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    file.write('{"mess')
os._exit(5)  # while it writes
""",
        *("--run-path", "--log-dir", str(logs), "--tee", "3"),
        env={"TORCHELASTIC_ERROR_FILE": str(own)},
    )
    assert code == 1, output
    assert "exit code 1: ValueError: bad batch\n" in output
    assert "exit code 5\n" in output
    (attempt,) = logs.glob("*/attempt_0")
    assert (attempt / "1" / "stdout.log").read_text() == "hello from 1\n"
    assert "[default1]:hello from 1\n" in output
    written = json.loads((attempt / "1" / "error.json").read_text())
    assert written["message"]["message"].startswith("ValueError: bad batch")
    # Nobody finished, so the first failure is the job's.
    assert "bad batch" in own.read_text()


FAIL_ONCE = """
if ATTEMPT == 0:
    heard("pid", 0), heard("pid", 1)
    die() if RANK == 1 else time.sleep(60)
"""


@pytest.mark.parametrize(
    ("restarts", "code", "says"),
    [("1", 0, "2 of 2 ranks finished, attempt 2\n"), ("0", 1, "0 of 2 ranks finished\n")],
)
def test_restart_ends_all_and_starts_them_again(site: Site, restarts, code, says):
    flags = ["--on-death", "restart", "--max-restarts", restarts]
    ended, output = site.run(FAIL_ONCE, *flags)
    assert ended == code, output
    assert f"mooncake-run: {says}" in output
    assert "killed by SIGKILL" in output
    assert "were stopped" in output
    assert "stopped by the launcher (SIGTERM)" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_and_the_table_is_printed(site: Site, number: signal.Signals):
    launcher = site.start("time.sleep(60)")
    for rank in range(2):
        site.heard("pid", rank)
    os.kill(launcher.process.pid, number)
    code, output = launcher.wait()
    assert code == 1, output  # as torchrun's
    assert "0 of 2 ranks finished" in output
    assert f"stopped by the launcher ({number.name})" in output
    assert not [pid for pid in site.pids() if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow  # torch gives them 30 s
def test_ranks_that_ignore_the_signal_are_killed(site: Site):
    script = 'signal.signal(signal.SIGTERM, signal.SIG_IGN); say("deaf", 1); time.sleep(90)'
    launcher = site.start(script)
    for rank in range(2):
        site.heard("deaf", rank)
    os.kill(launcher.process.pid, signal.SIGTERM)
    code, output = launcher.wait()
    assert code == 1, output
    assert "stopped by the launcher (SIGKILL)" in output


# ---- several hosts


@needs_hosts
@pytest.mark.netns
@pytest.mark.parametrize("how", ["c10d", "static"])
def test_a_host_whose_ranks_are_all_dead_waits_for_the_others(site: Site, two_hosts, how):
    """Its launcher holds their store."""
    script = """
if RANK < 2:
    die()
until_seen_dead(0)
until_seen_dead(1)
"""
    launchers = [start_on(site, two_hosts(), node, script, 2, how) for node in range(2)]
    ended = [launcher.wait() for launcher in launchers]
    assert [code for code, _ in ended] == [0, 0], ended
    tables = [output.partition("mooncake-run: 2 of 4 ranks finished")[2] for _, output in ended]
    assert tables[0].count("killed by SIGKILL") == 2
    assert not tables[1], "one table is enough"


@needs_hosts
@pytest.mark.netns
def test_who_waited_on_another_host_is_in_the_table(site: Site, two_hosts):
    """The rank that dies and the table are on the first, those who waited on the second."""
    script = """
import torch
import torch.distributed as dist

dist.init_process_group("mooncake")
group = dist.new_group([0, 2, 3])
dist.barrier()
if RANK == 0:
    die()
if RANK > 1:
    dist.barrier(group=group)
say("done", 1)
heard("done", 2), heard("done", 3)
"""
    launchers = [start_on(site, two_hosts(), node, script, 2) for node in range(2)]
    ended = [launcher.wait() for launcher in launchers]
    assert [code for code, _ in ended] == [0, 0], ended
    assert waited(ended[0][1], 0) is not None, ended


CUT_OFF = """
import torch
import torch.distributed as dist

dist.init_process_group("mooncake")
dist.barrier()
say("ready", 1)
tensor = torch.zeros(1)
while tensor[0] != 2:
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
say("alone", 1)
"""


@needs_hosts
@pytest.mark.netns
def test_the_others_finish_when_the_host_with_the_store_dies(site: Site, two_hosts):
    launchers = [start_on(site, two_hosts(), node, CUT_OFF, 1 + node) for node in range(2)]
    for rank in range(3):
        site.heard("ready", rank)
    launchers[0].process.kill()
    os.kill(site.heard("pid", 0), signal.SIGKILL)
    code, output = launchers[1].wait()
    assert code == 0, output
    for rank in (1, 2):
        site.heard("alone", rank)
    assert "mooncake-run: 2 of 2 ranks finished" in output
    assert "rank 0 on " in output


@needs_hosts
@pytest.mark.netns
def test_a_launcher_that_was_killed_is_not_waited_for(site: Site, two_hosts):
    script = "heard('go', 'all')"
    launchers = [start_on(site, two_hosts(), node, script, 2) for node in range(2)]
    for rank in range(4):
        site.heard("pid", rank)
    launchers[1].process.kill()
    site.say("go", 1)
    code, output = launchers[0].wait()
    assert code == 0, output
    assert "ranks 2, 3 on " in output
    assert "not known, their launcher is gone" in output
