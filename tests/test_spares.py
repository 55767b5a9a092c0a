"""mooncake-run --spares: processes that wait to become the replacement of a rank."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import launchers
import pytest
import torch
from launchers import Launcher, Site
from test_replacements import AT_ONCE, SUMS, check_sums, row, start, until_said

from mooncake_backend import run
from mooncake_backend.launcher import spare, spares

FACTS = """
import signal, threading

def facts():
    scope = vars(sys.modules["__main__"])
    environment = dict(os.environ)
    del environment["TORCHELASTIC_ERROR_FILE"]
    mask = os.umask(0)
    os.umask(mask)
    files = {int(name): os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{name}")}
    return {
        "environment": environment,
        "arguments": [sys.argv, sys.orig_argv, list(sys.path), str(sys.flags)],
        "main": [(name, str(scope.get(name))) for name in
                 ("__name__", "__file__", "__package__", "__cached__", "__builtins__", "__doc__")],
        "spec": getattr(scope["__spec__"], "name", None),
        "loader": type(scope["__loader__"]).__name__,
        "folder": os.getcwd(),
        "mask": mask,
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "files": files,
        "streams": [[stream.encoding, stream.errors, stream.line_buffering, stream.write_through,
                     stream.isatty(), stream.mode] for stream in (sys.stdout, sys.stderr)],
        "threads": threading.active_count(),
    }
"""


# ---- launchers that do not wait before they start spares, and say which are ready


def _at_once(arguments: Sequence[str]) -> int:
    spares.AFTER_START = spares.AFTER_USE = 0.0
    folder, keep = Path(arguments[-1]), spares.Spares.keep

    def keep_and_say(self: spares.Spares, now: float) -> None:
        keep(self, now)
        said = [[one.process.pid, one.is_ready] for one in self.kept]
        (folder / ".spares").write_text(json.dumps(said))
        (folder / ".spares").rename(folder / "spares")

    spares.Spares.keep = keep_and_say  # type: ignore[method-assign]
    return run.main(arguments)


def _once(arguments: Sequence[str]) -> int:
    """A spare that was used is not made again."""
    begin = spares.Spares.begin

    def begin_once(self: spares.Spares, *given: Any) -> None:
        begin(self, *given)
        spares.AFTER_USE = math.inf

    spares.Spares.begin = begin_once  # type: ignore[method-assign]
    return _at_once(arguments)


def begin(
    site: Site,
    script: str,
    *flags: str,
    count: int = 1,
    main: Callable[[Sequence[str]], int] = _at_once,
    **named: Any,
) -> Launcher:
    return start(site, script, "--spares", str(count), *flags, main=main, **named)


def kept(site: Site) -> list[tuple[int, bool]]:
    """The process ids of the spares, and whether each is ready."""
    path = site.folder / "spares"
    return [tuple(one) for one in json.loads(path.read_text())] if path.exists() else []


def ready(site: Site, count: int = 1, but: Sequence[int] = ()) -> list[int]:
    """Waits until this number of spares is ready. `but`: spares of the past."""

    def found() -> list[int]:
        pids = [pid for pid, is_ready in kept(site) if is_ready and pid not in but]
        return pids if len(pids) == count else []

    return list(harness.until(found, f"{count} ready spares"))


def until_gone(pid: int) -> None:
    harness.until(lambda: not launchers.runs(pid), f"the end of {pid}")


# ---- a spare becomes the rank's replacement


@pytest.mark.parametrize("flags", [(), ("--run-path",)], ids=["script", "module"])
@pytest.mark.parametrize("redirects", ["0", "3"])
def test_a_spare_is_what_a_started_replacement_would_be(site: Site, flags, redirects):
    """The same rank dies twice while there is one spare: the second process is started."""
    script = (
        FACTS
        + """
say(f"facts-{NUMBER}", facts())
if RANK == 0:
    heard("facts-2", 1)
elif NUMBER == 0:
    heard("go", "all")
if RANK and NUMBER < 2:
    die()
"""
    )
    launcher = begin(site, script, *flags, "--redirects", redirects, main=_once)
    (pid,) = ready(site)
    site.say("go", 1)
    code, output = launcher.wait()
    assert code == 0, output
    assert site.heard("started-1", 1) == pid
    of_spare, of_started = (site.heard(f"facts-{number}", 1) for number in (1, 2))
    for number, facts in ((1, of_spare), (2, of_started)):
        facts["files"] = {
            name: path.replace(f"/1.{number}/", "/1.N/") for name, path in facts["files"].items()
        }
        assert facts["files"]["1"].endswith("/1.N/stdout.log") == (redirects == "3")
    assert of_spare == of_started
    assert of_spare["environment"]["MOONCAKE_REJOIN"] == "1"
    assert re.search(r"replaced after [\d.]+ m?s \(spare\), went on", row(output, "1"))
    assert re.search(r"replaced after [\d.]+ m?s, went on", row(output, "1.1"))


def test_logs_and_error_files_are_those_of_a_started_replacement(site: Site):
    script = """
from torch.distributed.elastic.multiprocessing.errors import record

def fail():
    raise ValueError("bad batch")

@record
def main():
    print("I am", RANK)
    print("a word without a line's end", end="")
    fail()

if RANK:
    heard("go", "all")
    main()
heard("end", "all")
"""
    logs = site.folder / "logs"
    flags = ["--log-dir", str(logs), "--tee", "3", "--max-replacements", "2"]
    launcher = begin(site, script, *flags, main=_once)
    ready(site)
    site.say("go", 1)
    until_said(launcher, "it stays dead")
    site.say("end", 1)
    code, output = launcher.wait()
    assert code == 0, output
    folders = [next(logs.glob("*/attempt_0")) / name for name in ("1", "1.1", "1.2")]
    texts = {(folder / "stdout.log").read_text() for folder in folders}
    assert texts == {"I am 1\na word without a line's end"}
    errors = [(folder / "stderr.log").read_text() for folder in folders]
    assert "spare" not in errors[1]
    traces = {error[error.index("Traceback") :] for error in errors}
    assert len(traces) == 1, traces
    written = [json.loads((folder / "error.json").read_text())["message"] for folder in folders]
    for message in written:
        del message["extraInfo"]["timestamp"]
    assert written[1] == written[2]
    assert output.count("[default1]:I am 1\n") == 3
    assert "(spare)" in row(output, "1")
    assert row(output, "1.1").count("ValueError: bad batch") == 1


@pytest.mark.ci
def test_killed_ranks_come_back_as_spares(site: Site):
    script = """
kill = die
def die():
    heard("go", "all")
    kill()
"""
    launcher = begin(site, f"{script}\nVICTIMS = {AT_ONCE}\n{SUMS}", count=3, ranks=4)
    ready(site, 3)
    site.say("go", 1)
    code, output = launcher.wait()
    assert code == 0, output
    check_sums(site, AT_ONCE, output)
    for rank in ("0", "1", "2"):
        assert "(spare)" in row(output, rank)


# ---- spares that die


GO = """
if RANK == 1 and not NUMBER:
    heard("go", "all")
    die()
until_ended(1, 1) if RANK == 0 else None
"""


def test_a_spare_that_dies_unused_is_made_again(site: Site):
    launcher = begin(site, GO)
    (first,) = ready(site)
    os.kill(first, signal.SIGKILL)
    (second,) = ready(site, but=[first])
    site.say("go", 1)
    code, output = launcher.wait()
    assert code == 0, output
    says = f"spare (pid {first}): killed by SIGKILL; another one is started"
    assert f"mooncake-run: {says}\n" in output
    assert site.heard("started-1", 1) == second
    assert "(spare)" in row(output, "1")


def test_the_end_of_a_spare_is_seen_when_it_comes(site: Site):
    """Long before the launcher looks again."""
    launcher = begin(site, "heard('go', 'all')", "--monitor-interval", "3600")
    ((pid, _),) = harness.until(lambda: kept(site), "a spare")
    os.kill(pid, signal.SIGKILL)
    until_said(launcher, f"spare (pid {pid}): killed by SIGKILL; another one is started")
    site.say("go", 1)
    code, output = launcher.wait()
    assert code == 0, output


def test_spares_that_die_again_and_again_are_given_up(site: Site):
    launcher = begin(site, GO)
    dead: list[int] = []
    for _ in range(spares.MOST_LOST + 1):
        dead += ready(site, but=dead)
        os.kill(dead[-1], signal.SIGKILL)
    until_said(launcher, "no more spares are started")
    site.say("go", 1)
    code, output = launcher.wait()
    assert code == 0, output
    assert output.count("another one is started") == spares.MOST_LOST
    assert "no more spares are started, as 3 in 10 minutes are used up" in output
    assert "(spare)" not in output


def test_a_spare_that_dies_while_it_becomes_a_rank_is_a_death_of_that_rank(site: Site):
    """It has been told, and does not get to run the program."""
    script = """
if RANK == 1 and not NUMBER:
    heard("go", "all")
    die()
until_ended(2, 1) if RANK == 0 else None
"""
    launcher = begin(site, script, main=_once)
    (pid,) = ready(site)
    harness.stop_process(pid)
    site.say("go", 1)
    until_said(launcher, f"a replacement is started (pid {pid})")
    os.kill(pid, signal.SIGKILL)
    code, output = launcher.wait()
    assert code == 0, output
    assert "(spare)" in row(output, "1")
    assert "killed by SIGKILL" in row(output, "1.1")
    assert row(output, "1.2").endswith("finished")
    assert not (site.folder / "started-1-1").exists()


def test_a_spare_that_has_just_died_is_not_used(site: Site):
    """The launcher has not seen its end yet: both die at once."""
    launcher = begin(site, GO)
    (pid,) = ready(site)
    harness.stop_process(launcher.process.pid)
    site.say("go", 1)
    until_gone(site.heard("pid", 1))
    os.kill(pid, signal.SIGKILL)
    until_gone(pid)
    os.kill(launcher.process.pid, signal.SIGCONT)
    code, output = launcher.wait()
    assert code == 0, output
    assert site.heard("started-1", 1) != pid
    assert "no replacement can be started" not in output
    assert row(output, "1.1").endswith("finished")


def test_a_rank_that_was_a_spare_is_replaced_like_any_other(site: Site):
    script = """
if RANK == 1 and NUMBER < 2:
    heard(f"go-{NUMBER}", "all")
    die()
until_ended(2, 1) if RANK == 0 else None
"""
    launcher = begin(site, script)
    first = ready(site)
    site.say("go-0", 1)
    site.heard("started-1", 1)
    second = ready(site, but=first)
    site.say("go-1", 1)
    code, output = launcher.wait()
    assert code == 0, output
    assert [site.heard(f"started-{number}", 1) for number in (1, 2)] == first + second
    for name in ("1", "1.1"):
        assert "(spare)" in row(output, name)


# ---- the end of spares


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_spares_end_with_the_job(site: Site, number):
    launcher = begin(site, "heard('go', 'all')", count=2)
    pids = ready(site, 2)
    harness.stop_process(pids[0])  # it cannot see that the launcher ends
    assert all(launchers.runs(pid) for pid in pids)
    if number is None:
        site.say("go", 1)
    else:
        os.kill(launcher.process.pid, number)
    code, output = launcher.wait()
    assert code == (0 if number is None else 1), output
    assert not any(launchers.runs(pid) for pid in pids)
    assert "spare" not in output, "their end is no event"


def test_spares_end_with_a_launcher_that_is_killed(site: Site):
    """One waits, one still imports, and one has become a rank, which lives on like all ranks."""
    (site.folder / "slow.py").write_text(
        f"""
import os, time
if os.path.exists({str(site.folder / "slow")!r}):
    open({str(site.folder / "imports")!r}, "w").close()
    time.sleep(1000)
"""
    )
    script = GO + 'heard("end", "all")\nsay(f"over-{NUMBER}", 1)\n'
    launcher = begin(site, script, "--spare-preload", "slow", count=2)
    ready(site, 2)
    (site.folder / "slow").touch()
    site.say("go", 1)
    rank = site.heard("started-1", 1)
    harness.until((site.folder / "imports").exists, "a spare that imports")
    pids = [pid for pid, _ in kept(site)]
    assert [is_ready for _, is_ready in kept(site)] == [True, False]
    assert rank not in pids
    launcher.process.kill()
    for pid in pids:
        until_gone(pid)
    site.say("end", 1)
    site.heard("over-1", 1)
    for pid in site.pids():
        until_gone(pid)


def test_a_spare_holds_nothing_of_a_rank(site: Site):
    launcher = begin(site, "heard('go', 'all')")
    (pid,) = ready(site)
    files = {int(path.name): os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    assert [files.pop(number) for number in (1, 2)] == [os.devnull] * 2
    files.pop(0)
    (link,) = files.values()
    assert link.startswith("socket:")
    (inode,) = re.findall(r"\d+", link)
    assert inode in Path("/proc/net/unix").read_text()
    site.say("go", 1)
    assert launcher.wait()[0] == 0


# ---- imports


def test_modules_are_imported_before_a_rank_dies(site: Site):
    """Those beside the script are found as the script finds them."""
    folder = site.folder / "seen"
    folder.mkdir()
    (site.folder / "model.py").write_text(
        f"""
import os
os.mkdir({str(folder)!r} + "/" + str(os.getpid()))
RANK = os.getenv("RANK")
os.environ.update(MODEL="large")
"""
    )
    script = (
        "import model\n"
        + GO
        + 'say(f"rank-{NUMBER}", [model.RANK, dict(os.environ).get("MODEL")])\n'
    )
    launcher = begin(site, script, "--spare-preload", "wave,model", main=_once)
    (pid,) = ready(site)
    assert str(pid) in os.listdir(folder)
    site.say("go", 1)
    code, output = launcher.wait()
    assert code == 0, output
    assert site.heard("rank-1", 1) == [None, "large"]
    assert len(os.listdir(folder)) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot import model: ModuleNotFoundError: No module named 'model'"),
        ("raise KeyError('weights')", "cannot import model: KeyError: 'weights'"),
        ("import sys; sys.exit(5)", "cannot import model: SystemExit: 5"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_once(site: Site, text, says):
    if text is not None:
        (site.folder / "model.py").write_text(text)
    launcher = begin(site, GO, "--spare-preload", "model", count=3)
    until_said(launcher, "no more spares are started")
    site.say("go", 1)
    code, output = launcher.wait()
    assert code == 0, output
    assert output.count(f"{says}; no more spares are started\n") == 1
    assert output.count("spare") == 2
    assert "replaced after" in row(output, "1")
    assert "(spare)" not in row(output, "1")


def test_a_rank_that_dies_while_a_spare_imports_does_not_wait_for_it(site: Site):
    """And no second spare imports beside it."""
    (site.folder / "slow.py").write_text("import time\ntime.sleep(1000)\n")
    launcher = begin(site, GO, "--spare-preload", "slow", count=3)
    harness.until(lambda: kept(site), "a spare")
    site.say("go", 1)
    code, output = launcher.wait()
    assert code == 0, output
    assert "(spare)" not in row(output, "1")
    assert row(output, "1.1").endswith("finished")
    assert len(kept(site)) == 1


@pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.device_count() > 0,
    reason="the driver is looked for once, or never",
)
def test_the_driver_is_not_used_while_a_spare_waits(tmp_path: Path):
    """Without a driver each use looks for its library again, and the loader says so. torch looks
    for it when it is imported."""
    code = """
import os, sys
from mooncake_backend.launcher import spare

def uses():
    with open(sys.argv[1] + f".{os.getpid()}") as file:
        return file.read().count("find library=libcuda.so")

import torch
imported = uses()
assert spare.load([]) == ""
assert {"mooncake_backend._C", "mooncake_backend.group"} <= sys.modules.keys()
assert uses() == imported, "by a spare"
torch.cuda.is_available()
assert uses() > imported
"""
    said = str(tmp_path / "libraries")
    env = {**os.environ, "LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": said}
    subprocess.run([sys.executable, "-c", code, said], env=env, check=True)


# ---- parts


PROGRAM = """
import pickle, sys
class Thing: pass
scope = vars(sys.modules["__main__"])
print(sys.argv, sys.path[0], sorted(name for name in scope if name != "__annotations__"))
print([str(scope[name]) for name in ("__name__", "__file__", "__package__", "__spec__")])
print(type(scope["__builtins__"]))
print(pickle.loads(pickle.dumps(Thing())).__class__ is Thing)
def fail(): raise ValueError("as told")
if "fail" in sys.argv:
    fail()
if "exit" in sys.argv:
    sys.exit("by choice")
import atexit
atexit.register(lambda: print("at the end", pickle.loads(pickle.dumps(Thing())) is not None))
"""


def _file(folder: Path) -> list[str]:
    (folder / "prog.py").write_text(PROGRAM)
    return ["prog.py"]


def _module(folder: Path) -> list[str]:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "prog.py").write_text(PROGRAM)
    return ["-m", "package.prog"]


def _folder(folder: Path) -> list[str]:
    (folder / "tree").mkdir()
    (folder / "tree" / "__main__.py").write_text(PROGRAM)
    return ["tree"]


def _archive(folder: Path) -> list[str]:
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        archive.writestr("__main__.py", PROGRAM)
    return ["all.zip"]


def _link(folder: Path) -> list[str]:
    (folder / "real").mkdir()
    _file(folder / "real")
    (folder / "prog.py").symlink_to(Path("real") / "prog.py")
    return ["./prog.py"]


@pytest.mark.parametrize("word", ["go", "fail", "exit"])
@pytest.mark.parametrize("make", [_file, _module, _folder, _archive, _link])
def test_a_program_runs_as_under_python(tmp_path: Path, make, word):
    arguments = ["-u", *make(tmp_path), "one", word]
    (tmp_path / "alone.py").write_text(
        f"""
import sys
sys.path.insert(0, {str(Path(spare.__file__).parent)!r})
import spare
del sys.path[0]
spare._set_path(*spare.program(sys.argv[1:]))
spare.run(sys.argv[1:])
"""
    )
    ran = [
        subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        for words in (arguments, ["-u", "alone.py", *arguments])
    ]
    native, own = (
        [each.returncode, re.sub("0x[0-9a-f]+", "ADDRESS", each.stdout), each.stderr]
        for each in ran
    )
    assert own == native
    assert native[0] == (0 if word == "go" else 1), native


def test_an_order_that_is_too_long_is_refused():
    """The kernel's own limit is lower."""
    one = spares.Spare([sys.executable, "-u", "prog.py"], "", os.environ)
    try:
        harness.until(lambda: one.read() or one.is_ready, "a ready spare")
        for size in (400_000, spare.MOST_BYTES):
            with pytest.raises(OSError, match="too long"):
                one.become(["python"], {"LONG": "x" * size}, None, None)
    finally:
        one.end()
    assert one.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--spares", "1"], "--spares is for --on-death replace"),
        (["--on-death", "replace", "--spares", "-1"], "--spares must be 0 or more, not -1"),
        (["--on-death", "replace", "--spare-preload", "model"], "--spare-preload needs --spares"),
        (["--on-death", "replace", "--spares", "1", "--no-python"], "and --no-python starts any"),
        (["--on-death", "replace", "--spares", "1", "--numa-binding", "node"], "--numa-binding"),
    ],
)
def test_flags_without_a_meaning_are_refused(flags, says, capsys):
    with pytest.raises(SystemExit) as refused:
        run.main([*flags, "script.py"])
    assert refused.value.code == 2
    assert says in capsys.readouterr().err
