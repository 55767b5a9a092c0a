"""mooncake-run --on-death replace: which ranks get a new process, when, and with what."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import launchers
import pytest
import torch.distributed as dist
from launchers import Launcher, Site, needs_hosts, start_on

from mooncake_backend import run
from mooncake_backend.launcher import budget, job_key, torch_parts, waits
from mooncake_backend.launcher.endings import Ending, failures, table
from mooncake_backend.launcher.ends import Ends
from mooncake_backend.launcher.nodes import Nodes

REPLACE = ("--on-death", "replace")

# Which process of its rank this is, how it fails as under @record, without torch, how it notes that
# it has joined the job, as the backend does, and how it waits for the end of another one.
AGAIN = (
    f"""
WAITS = {waits.NAME!r}
"""
    + """
NUMBER = int(os.path.basename(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])).partition(
    ".")[2] or 0)
say(f"started-{NUMBER}", os.getpid())

def fail(text):
    print(f"ValueError: {text}", file=sys.stderr)
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        more = {"timestamp": str(int(time.time()))}
        json.dump({"message": {"message": f"ValueError: {text}", "extraInfo": more}}, file)
    sys.exit(1)

def join():
    home = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
    with open(os.path.join(home, WAITS), "a") as file:
        file.write("joined\\n")
    say(f"joined-{NUMBER}", 1)

def until_ended(number, rank):
    pid = heard(f"started-{number}", rank)
    until(lambda: not os.path.exists(f"/proc/{pid}"))
"""
)


def start(site: Site, script: str, *flags: str, **named: Any) -> Launcher:
    return site.start(AGAIN + script, *REPLACE, *flags, **named)


def until_said(launcher: Launcher, words: str) -> None:
    harness.until(lambda: words in launcher.output(), f"{words!r} of {launcher.output()}")


def lines_of(output: str) -> list[str]:
    """The table."""
    return output[output.rindex("ranks finished") :].splitlines()


def row(output: str, name: str) -> str:
    (line,) = [line for line in lines_of(output) if re.match(rf"  {re.escape(name)} ", line)]
    return line


# ---- a new process


@pytest.mark.parametrize("how", ["die()", "sys.exit(3)"])
def test_a_rank_that_died_gets_a_new_process_with_the_same_environment(site: Site, how):
    script = f"""
say(f"environment-{{NUMBER}}", dict(os.environ))
say(f"arguments-{{NUMBER}}", sys.argv)
if RANK == 1 and not NUMBER:
    {how}
until_ended(1, 1) if RANK != 1 else None
"""
    code, output = start(site, script, ranks=3).wait()
    assert code == 0, output
    first, second = (site.heard(f"environment-{number}", 1) for number in range(2))
    assert second.pop("MOONCAKE_REJOIN") == "1"
    file, new_file = (each.pop("TORCHELASTIC_ERROR_FILE") for each in (first, second))
    assert first == second
    assert Path(new_file) == Path(file).parent.with_name("1.1") / "error.json"
    assert site.heard("arguments-0", 1) == site.heard("arguments-1", 1)
    assert "MOONCAKE_REJOIN" not in site.heard("environment-0", 0)

    pid = site.heard("started-1", 1)
    died = "killed by SIGKILL" if how == "die()" else "exit code 3"
    says = f"rank 1: {died}; 2 of 3 ranks go on, a replacement is started (pid {pid})"
    assert f"mooncake-run: {says}\n" in output
    assert "mooncake-run: 3 of 3 ranks finished, 1 replacement was started\n" in output
    assert re.search(rf"{died} +replaced after [\d.]+ m?s, went on, the last", row(output, "1"))
    assert row(output, "1.1").endswith("finished")
    assert "Root Cause" not in output


def test_a_rank_that_finished_is_not_replaced(site: Site):
    """One that dies after it is, because another rank goes on."""
    script = """
if RANK == 2 and not NUMBER:
    until_ended(0, 1)
    die()
until_ended(1, 2) if RANK == 0 else None
"""
    code, output = start(site, script, ranks=3).wait()
    assert code == 0, output
    assert "3 of 3 ranks finished, 1 replacement was started\n" in output
    assert re.search(r"rank 2: killed by SIGKILL; .*, a replacement follows in [12]\.\d s", output)
    assert row(output, "2.1").endswith("finished")


def test_a_replacement_that_dies_is_replaced_until_the_budget_is_used_up(site: Site):
    launcher = start(site, "die() if RANK else heard('go', 'all')", "--max-replacements", "2")
    until_said(launcher, "it stays dead, as 2 replacements in 10 minutes are used up")
    site.say("go", 1)
    code, output = launcher.wait()
    assert code == 0, output
    said = [line for line in output.splitlines() if re.match(r"mooncake-run: rank 1", line)]
    assert re.search(r"rank 1: killed by SIGKILL; .* a replacement is started \(pid", said[0])
    assert re.search(
        r"rank 1.1: .*; 1 of 2 ranks go on, a replacement follows in [\d.]+ s", said[1]
    )
    assert re.search(r"rank 1: a replacement is started \(pid \d+\)", said[2])
    assert re.search(r"rank 1.2: .*; 1 of 2 ranks go on; it stays dead", said[3])
    assert "1 of 2 ranks finished, 1 died and the others went on, 2 replacements" in output
    assert ["replaced after" in row(output, name) for name in ("1", "1.1", "1.2")] == [
        True,
        True,
        False,
    ]


def test_each_process_has_logs_of_its_own(site: Site):
    script = """
print("I am", NUMBER, "of", RANK)
if RANK == 1:
    fail(f"bad batch {NUMBER}")
heard("go", "all")
"""
    logs = site.folder / "logs"
    flags = ["--log-dir", str(logs), "--tee", "3", "--max-replacements", "2"]
    launcher = start(site, script, *flags)
    until_said(launcher, "it stays dead")
    site.say("go", 1)
    code, output = launcher.wait()
    assert code == 0, output
    (attempt,) = logs.glob("*/attempt_0")
    assert sorted(path.name for path in attempt.iterdir()) == ["0", "1", "1.1", "1.2"]
    for number, name in enumerate(["1", "1.1", "1.2"]):
        assert (attempt / name / "stdout.log").read_text() == f"I am {number} of 1\n"
        written = json.loads((attempt / name / "error.json").read_text())
        assert written["message"]["message"] == f"ValueError: bad batch {number}"
        assert output.count(f"[default1]:I am {number} of 1\n") == 1
        assert f"[default1]:ValueError: bad batch {number}\n" in output
        assert f"exit code 1: ValueError: bad batch {number}" in row(output, name)


def test_nothing_of_the_dead_process_is_left(site: Site):
    """It may hold memory of a device, or be the rank itself, which a script has started."""
    script = """
import subprocess
if RANK == 1 and not NUMBER:
    say("helper", subprocess.Popen(["sleep", "1000"]).pid)
    die()
until_ended(1, 1) if RANK != 1 else heard("go", "all")
"""
    launcher = start(site, script)
    site.heard("started-1", 1)
    helper = site.heard("helper", 1)
    harness.until(lambda: not launchers.runs(helper), "the helper's end")
    site.say("go", 1)
    code, output = launcher.wait()
    assert code == 0, output


def _without_a_start_at_first(arguments: Sequence[str]) -> int:
    start_again, tries = torch_parts.start_again, []

    def refuse_once(*given: Any) -> torch_parts.Replacement:
        tries.append(1)
        if len(tries) == 1:
            raise OSError(errno.EAGAIN, "no more processes")
        return start_again(*given)

    torch_parts.start_again = refuse_once
    return run.main(arguments)


def test_a_start_that_fails_is_repeated(site: Site):
    script = "until_ended(1, 1) if RANK != 1 else None if NUMBER else die()"
    code, output = start(site, script, main=_without_a_start_at_first).wait()
    assert code == 0, output
    assert "no replacement can be started: BlockingIOError(11, 'no more processes')" in output
    assert row(output, "1.1").endswith("finished")


# ---- the job's end


def test_no_rank_is_replaced_once_all_others_have_finished(site: Site):
    code, output = start(site, "(until_ended(0, 0), die()) if RANK else None").wait()
    assert code == 0, output
    assert "rank 1: killed by SIGKILL; no rank is left that a replacement could join" in output
    assert "1 of 2 ranks finished, 1 died and the others went on\n" in output


def test_a_replacement_that_comes_too_late_holds_nothing_up(site: Site):
    """The job has ended before it could join."""
    script = """
if NUMBER:
    time.sleep(1000)
die() if RANK == 1 else heard("started-1", 1)
"""
    code, output = start(site, script).wait()
    assert code == 0, output
    assert "no rank is left that the new processes of rank 1 could join" in output
    assert "stopped by the launcher (SIGKILL)" in row(output, "1.1")


def test_where_all_ranks_die_at_once_the_job_is_over(site: Site):
    """The replacements of the ranks that died first find no job any more."""
    script = """
if NUMBER:
    time.sleep(1000)
for rank in range(RANK):
    until_ended(0, rank)
fail(f"bad batch of {RANK}")
"""
    launcher = start(site, script, ranks=3)
    code, output = launcher.wait()
    assert code == 1, output
    assert "rank 2: exit code 1: ValueError: bad batch of 2; no rank is left" in output
    assert "no rank is left that the new processes of ranks 0, 1 could join" in output
    assert "0 of 3 ranks finished, 2 replacements were started" in output
    assert "stopped by the launcher (SIGKILL)" in row(output, "0.1")
    # torchrun's report names the failures of the ranks' own.
    assert output.count("exitcode  : 1 ") == 3, output


def test_a_rank_that_came_back_is_as_good_as_one_that_never_died(site: Site):
    """Each rank of the first start dies, one after the other."""
    script = """
if not NUMBER:
    heard("joined-1", RANK - 1) if RANK else None
    die()
join()
for rank in range(3):
    heard("joined-1", rank)
"""
    code, output = start(site, script, ranks=3).wait()
    assert code == 0, output
    assert "3 of 3 ranks finished, 3 replacements were started" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_replacements_too(site: Site, number: signal.Signals):
    script = """
say(f"ready-{NUMBER}", 1)
die() if (RANK, NUMBER) in [(0, 0), (1, 0), (1, 1)] else time.sleep(1000)
"""
    launcher = start(site, script, ranks=3)
    site.heard("ready-1", 0)
    site.heard("ready-2", 1)
    os.kill(launcher.process.pid, number)
    code, output = launcher.wait()
    assert code == 1, output
    for name in ("0.1", "1.2", "2"):
        assert f"stopped by the launcher ({number.name})" in row(output, name)
    for path in site.folder.glob("started-*"):
        assert not launchers.runs(json.loads(path.read_text())), path


def _with_a_signal_while_it_starts(arguments: Sequence[str]) -> int:
    start_one = torch_parts.get_subprocess_handler

    def start_and_signal(**given: Any) -> Any:
        handler = start_one(**given)
        os.kill(os.getpid(), signal.SIGTERM)
        return handler

    torch_parts.get_subprocess_handler = start_and_signal
    return run.main(arguments)


def test_a_signal_while_a_replacement_starts_leaves_no_process(site: Site):
    script = "die() if RANK and not NUMBER else time.sleep(1000)"
    launcher = start(site, script, main=_with_a_signal_while_it_starts)
    code, output = launcher.wait()
    assert code == 1, output
    assert "stopped by the launcher (SIGTERM)" in row(output, "1.1")


# ---- notices, and the key


def test_a_replacement_looks_at_no_notice(site: Site):
    """A notice names ranks that will not come; its predecessor's place is taken."""
    script = """
from datetime import timedelta
from torch.distributed import TCPStore
from mooncake_backend.launcher import notices

say(f"key-{NUMBER}", notices.key_for(RANK, 2))
if RANK == 1:
    heard("go", "all") if NUMBER else None
    die()
until(lambda: notices.key_for(0, 2))
key = notices.key_for(0, 2)
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(*place, is_master=False, timeout=timedelta(seconds=60))
heard("key-1", 1)
say("before", store.check([key]))
say("died", 1)
heard("go", "all")
until(lambda: store.check([key]))
say("notice", store.get(key).decode())
"""
    launcher = start(site, script, "--max-replacements", "1")
    site.heard("died", 0)
    site.say("go", 1)
    code, output = launcher.wait()
    assert code == 0, output
    assert site.heard("key-1", 1) is None
    assert site.heard("before", 0) is False
    assert site.heard("notice", 0) == "rank 1: killed by SIGKILL\n"


def test_launchers_agree_on_a_key(monkeypatch):
    keys = []
    for given in (None, "a key of the user's own"):
        store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for node, size in ((0, 2), (1, 2)):
            monkeypatch.delenv("MOONCAKE_JOB_KEY", raising=False)
            if given and node == 0:
                monkeypatch.setenv("MOONCAKE_JOB_KEY", given)
            job_key.agree(store, node, size)
            keys.append(os.environ.get("MOONCAKE_JOB_KEY"))
        if given:
            assert given.encode() not in store.get(job_key.PLACE)
    made, same, own, none = keys
    assert re.fullmatch("[0-9a-f]{64}", made)
    assert same == made
    assert own == "a key of the user's own"
    assert none is None, "the user hands it out"


def test_a_launcher_of_another_reaction_is_named(monkeypatch):
    monkeypatch.setattr(job_key, "PATIENCE", 0.0)
    with pytest.raises(RuntimeError, match="the launchers of all nodes with --on-death replace"):
        job_key.agree(dist.HashStore(), 1, 2)


# ---- several hosts


@needs_hosts
@pytest.mark.netns
def test_each_launcher_replaces_its_own_ranks(site: Site, two_hosts):
    script = """
say(f"key-{NUMBER}", os.environ["MOONCAKE_JOB_KEY"])
if RANK in (1, 2) and not NUMBER:
    die()
until_ended(1, 1) if RANK != 1 else None
until_ended(1, 2) if RANK not in (1, 2) else None
"""
    two = two_hosts()
    started = [start_on(site, two, node, AGAIN + script, 2, more=REPLACE) for node in range(2)]
    ended = [launcher.wait() for launcher in started]
    assert [code for code, _ in ended] == [0, 0], ended
    output = ended[0][1]
    assert "4 of 4 ranks finished, 2 replacements were started" in output
    for name in ("1", "2"):
        assert "replaced after" in row(output, name)
    assert "1 of 2 ranks of this host go on, a replacement is started" in output
    keys = [site.heard("key-0", rank) for rank in range(4)]
    keys += [site.heard("key-1", rank) for rank in (1, 2)]
    assert len(set(keys)) == 1


@needs_hosts
@pytest.mark.netns
def test_the_last_rank_of_a_host_is_replaced_while_other_hosts_go_on(site: Site, two_hosts):
    script = """
if RANK == 1 and not NUMBER:
    die()
until_ended(1, 1) if RANK == 0 else None
if RANK == 0 and not NUMBER:
    say("alone", 1)
"""
    two = two_hosts()
    started = [start_on(site, two, node, AGAIN + script, 1, more=REPLACE) for node in range(2)]
    ended = [launcher.wait() for launcher in started]
    assert [code for code, _ in ended] == [0, 0], ended
    assert "2 of 2 ranks finished, 1 replacement was started" in ended[0][1]
    assert "0 of 1 ranks of this host go on, a replacement is started" in ended[1][1]


def test_launchers_know_of_each_other_whether_ranks_are_left():
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = [Nodes(store, me, 2, f"host-{me}", [me], interval=3600.0) for me in range(2)]
    try:
        for node in nodes:
            assert others_run(node)
        for running in (False, True):
            nodes[1].tell(running)
            harness.until(lambda running=running: others_run(nodes[0]) == running, "the news")
        # Each tells, then asks: one of them at least must learn that no rank is left.
        for node in nodes:
            node.tell(False)
        answers = [others_run(node) for node in nodes]
        assert False in answers
    finally:
        for node in nodes:
            node.close()


def others_run(node: Nodes) -> bool:
    """The answer to one question, for which a launcher asks again and again."""
    answers: list[bool] = []

    def has_answered() -> bool:
        answer = node.others_run()
        if answer is not None:
            answers.append(answer)
        return bool(answers)

    harness.until(has_answered, "an answer")
    return answers[0]


# ---- with the backend

# Each group of VICTIMS dies once the replacements of the group before it have taken part. Every sum
# is that of the ranks of which the backend says that they have contributed.
SUMS = """
import torch
import torch.distributed as dist
from mooncake_backend import pg, replacing

dist.init_process_group("mooncake-cpu")
world, size = dist.group.WORLD, dist.get_world_size()
if NUMBER:
    pg.join_group(world)

def part(rank, turn):
    return torch.arange(3, dtype=torch.float64) * turn + 2.0 ** rank

def most(value):
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)

def have_come_back(ranks):
    return all(os.path.exists(f"{FOLDER}/whole-1-{rank}") for rank in ranks)

turn, seen = 0, []
while True:
    turn = most(turn) + 1
    tensor = part(RANK, turn)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    ranks = list(work.contributors)
    assert torch.equal(tensor, sum(part(rank, turn) for rank in ranks)), (turn, ranks, tensor)
    if ranks not in seen[-1:]:
        seen.append(ranks)
    if len(ranks) == size:
        say(f"whole-{NUMBER}", turn)
        due = [group for group in VICTIMS if not have_come_back(group)]
        if due and RANK in due[0] and not NUMBER:
            die()
    if most(int(all(map(have_come_back, VICTIMS)))):
        break
    replacing.admit(world)
say(f"seen-{NUMBER}", seen)
dist.destroy_process_group()
"""
IN_TURN = [[0], [1], [2], [3]]
AT_ONCE = [[0, 2], [1]]


def check_sums(site: Site, victims: Sequence[Sequence[int]], output: str) -> None:
    came = sorted(itertools.chain(*victims))
    assert f"4 of 4 ranks finished, {len(came)} replacements were started" in output
    everybody = list(range(4))
    for rank in everybody:
        assert row(output, f"{rank}.1" if rank in came else str(rank)).endswith("finished")
        seen = site.heard(f"seen-{int(rank in came)}", rank)
        assert seen[-1] == everybody
    for rank in came:
        died = r"killed by SIGKILL +replaced after [\d.]+ m?s( \(spare\))?, went on"
        assert re.search(died, row(output, str(rank)))


@pytest.mark.ci
@pytest.mark.parametrize("victims", [IN_TURN, AT_ONCE], ids=["in-turn", "at-once"])
def test_killed_ranks_come_back(site: Site, victims):
    code, output = start(site, f"VICTIMS = {victims}\n{SUMS}", ranks=4).wait()
    assert code == 0, output
    check_sums(site, victims, output)


@needs_hosts
@pytest.mark.netns
@pytest.mark.ci
@pytest.mark.parametrize("victims", [IN_TURN, AT_ONCE], ids=["in-turn", "at-once"])
def test_killed_ranks_of_two_hosts_come_back(site: Site, two_hosts, victims):
    two = two_hosts()
    script = f"{AGAIN}VICTIMS = {victims}\n{SUMS}"
    started = [start_on(site, two, node, script, 2, more=REPLACE) for node in range(2)]
    ended = [launcher.wait() for launcher in started]
    assert [code for code, _ in ended] == [0, 0], ended
    check_sums(site, victims, ended[0][1])


# ---- parts


def test_pauses_double_and_replacements_are_counted_for_ten_minutes():
    ranks = budget.Budget(4)
    assert ranks.take(2, 0.0) == 0.0
    for least in (0.1, 0.2, 0.4):
        pause = ranks.take(2, 1.0)
        assert pause is not None
        assert least <= pause <= 2 * least
    assert ranks.take(2, 599.0) is None
    assert ranks.take(1, 599.0) == 0.0, "each rank has its own"
    assert ranks.take(2, 600.0) is not None, "the first is not counted any more"
    assert ranks.take(2, 600.5) is None
    many = budget.Budget(10_000)
    assert max(many.take(0, 0.0) or 0.0 for _ in range(5000)) <= budget.MOST_PAUSE
    assert budget.Budget(0).take(0, 0.0) is None


@pytest.mark.parametrize("blind", [False, True])
def test_an_end_is_seen_when_it_comes(monkeypatch, blind):
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "no pidfds here")

    if blind:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    open_files = len(os.listdir("/proc/self/fd"))
    ends = Ends()
    processes = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for name, process in enumerate(processes):
            ends.watch(name, process.pid)
        ends.wait(0.0)
        assert [process.poll() for process in processes] == [None, None]
        for name, process in enumerate(processes):
            process.kill()
            # Far longer than the deadline, unless the end is seen.
            harness.until(lambda p=process: ends.wait(3600.0) or p.poll() is not None, "its end")
            ends.forget(name)
            ends.forget(name)
        ends.wait(0.0)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        ends.close()
    assert len(os.listdir("/proc/self/fd")) == open_files


def ending(rank: int, incarnation: int, code: int, started: float, ended: float, **more: Any):
    return Ending(rank, "host", 0, code, started, ended, incarnation=incarnation, **more)


def test_a_replaced_process_is_a_loss_and_no_failure():
    lost = [ending(1, 0, -9, 0.0, 5.0), ending(1, 1, 3, 5.1, 6.0)]
    assert failures([ending(0, 0, 0, 0.0, 9.0), *lost, ending(1, 2, 0, 6.1, 9.0)]) == []
    failed = ending(0, 0, 1, 0.0, 9.0)
    assert failures([failed, *lost]) == [failed, lost[1]]
    too_late = ending(1, 2, -9, 6.1, 6.2, stopped=True)
    assert failures([failed, *lost, too_late]) == [failed, lost[1]]


def test_waits_are_those_for_the_process_that_was_lost():
    seen = [
        (1, 0.25, 5.3),  # just after the first one's end, when the second had been started
        (1, 0.5, 5.6),
        (1, 0.75, 9.5),
    ]
    endings = [
        ending(0, 0, 0, 0.0, 12.0, waits=seen),
        ending(1, 0, -9, 0.0, 5.0),
        ending(1, 1, -9, 5.1, 9.0, joined=5.6),
        ending(1, 2, 0, 9.02, 12.0, joined=9.6),
    ]
    lines = table(endings).splitlines()
    assert lines[0] == "mooncake-run: 2 of 2 ranks finished, 2 replacements were started"
    assert lines[2].endswith(
        "replaced after 100 ms, went on after 250 ms, the last finished 7.0 s later"
    )
    assert lines[3].endswith(
        "replaced after 20 ms, went on after 750 ms, the last finished 3.0 s later"
    )
    assert [line.split()[0] for line in lines[4:]] == ["0", "1.2"]


def test_files_of_replacements_are_in_folders_of_their_own():
    assert torch_parts.replacement_path("/logs/2/error.json", 1) == "/logs/2.1/error.json"
    assert torch_parts.replacement_path("", 1) == ""
    assert torch_parts.replacement_path(os.devnull, 1) == os.devnull


def test_without_log_files_a_rank_is_replaced_all_the_same(site: Site):
    script = """
NUMBER = int(os.environ.get("MOONCAKE_REJOIN", "0"))
say(f"started-{NUMBER}", os.getpid())
if RANK == 1 and not NUMBER:
    die()
if RANK == 0:
    pid = heard("started-1", 1)
    until(lambda: not os.path.exists(f"/proc/{pid}"))
"""
    code, output = site.run(script, *REPLACE, "--log-dir", os.devnull)
    assert code == 0, output
    assert "2 of 2 ranks finished, 1 replacement was started" in output
