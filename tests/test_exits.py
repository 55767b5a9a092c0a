"""How a rank ends, and what the others make of it: by destroying its groups, at the end of its
program, by an exception, by Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import cards
import harness
import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import BLOCKING_DEVICE_LAYOUT, DEVICE_LAYOUT
from harness import raised, until

import mooncake_backend

FUTEX = {"x86_64": "202", "aarch64": "98"}[os.uname().machine]


def environment(transports="shm", **more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MOONCAKE_")}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **cards.over(transports),
        **more,
    }


def ours(text):
    """The lines of the log."""
    return [line for line in text.splitlines() if " mooncake " in line]


def run_python(code, *arguments, env, **more):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        **more,
    )  # fmt: skip


def end_all(processes):
    for process in processes:
        process.kill()
        process.communicate()


# ---- operations that the other ranks never call

# Far beyond the time of a rank that waits for nothing.
PATIENCE = 60


def leaves_with_pending_on_rank(me, groups, how):
    """Each rank of `groups` has called an operation there that no other rank calls."""
    made = {"default": dist.group.WORLD, "first": dist.new_group(), "second": dist.new_group()}
    for group in made.values():
        dist.barrier(group)
    if me.rank in groups:
        work = dist.all_reduce(torch.ones(4), async_op=True, group=made[groups[me.rank]])
    me.board.set(f"ready-{me.rank}")
    me.board.wait_all("ready", range(me.size))
    began = time.monotonic()
    if how == "destroys":
        dist.destroy_process_group()
    else:
        mooncake_backend.group._leave()  # what a program does at its end
    took = time.monotonic() - began
    if me.rank in groups:
        assert work.is_completed()
        if how == "destroys":
            assert work.contributors == [me.rank]
    return took


@pytest.mark.parametrize("how", ["destroys", "ends"])
@pytest.mark.parametrize(
    "groups", [{0: "first", 1: "default"}, {0: "default", 1: "second", 2: "first"}], ids=str
)
def test_operations_that_others_never_call_hold_up_no_end(groups, how):
    env = {"MOONCAKE_FAILURE_TIMEOUT_MS": str(PATIENCE * 1000)}
    took = harness.run_ranks(3, leaves_with_pending_on_rank, groups, how, env=env)
    assert max(took) < PATIENCE / 2, took


# ---- destroy_process_group() while somebody still holds a group

# PYTHONPATH leads to tests/devices.py.
KEEPS = """
import sys, torch, torch.distributed as dist
import devices
from torch import nn
rank, folder, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = dist.FileStore(folder + "/store", 2)
devices.use(rank)
kind, backend = devices.kind(), devices.served_by("mooncake-cpu")
dist.init_process_group(backend, store=store, rank=rank, world_size=2)
kept = [dist.group.WORLD, dist.new_group([0, 1])]
if what == "dtensor":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh = init_device_mesh(kind, (2,))
    kept.append(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    assert kept[-1].sum().full_tensor() == 8
if what == "fully_shard":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    kept.append(fully_shard(nn.Linear(4, 4), mesh=init_device_mesh(kind, (2,))))
    kept[-1](torch.ones(1, 4)).sum().backward()
if what == "zero":
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = nn.Linear(4, 4)
    kept.append(ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
    model(torch.ones(1, 4)).sum().backward()
    kept[-1].step()
dist.destroy_process_group()
for group in kept[:2]:
    try:
        group.allreduce([torch.ones(4)]).wait()
        raise AssertionError("a destroyed group works")
    except dist.DistBackendError as error:
        assert "the process group was destroyed" in str(error), error
if what == "zero":  # the next job of this process has nothing to do with what is kept of this one
    store = dist.FileStore(folder + "/again", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
    dist.destroy_process_group()
print("over", flush=True)
sys.stdin.read()
"""


DROPS_LATE = """
import time, torch, torch.distributed as dist
import devices, mooncake_backend
class Slow:
    def __del__(self):
        time.sleep(0.3)  # whoever drops it asks for Python's lock again
devices.use(0)
backend = devices.served_by("mooncake-cpu")
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
kept = dist.group.WORLD
for _ in range(5):
    tensor = torch.ones(4)
    tensor.slow = Slow()
    work = dist.all_reduce(tensor, async_op=True)
    del tensor
    work.wait()
    del work
dist.destroy_process_group()
"""


@pytest.mark.parametrize("transports", ["shm", DEVICE_LAYOUT])
def test_tensors_that_are_dropped_at_the_end_do_not_end_the_process(transports):
    """A thread of ours that asked for Python's lock while Python ends would be ended by it, and
    std::terminate be called: also of a group that was destroyed, and is still held."""
    process = run_python(DROPS_LATE, env=environment(transports))
    _, errors = process.communicate(timeout=harness.DEADLINE)
    assert (process.returncode, errors) == (0, "")


SLOW_CALLBACK = """
import sys, time, torch, torch.distributed as dist
import devices, mooncake_backend
devices.use(0)
backend = devices.served_by("mooncake-cpu")
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
def slow(future):
    print("runs", flush=True)
    time.sleep(5)
    print("has ended", flush=True)
future = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(slow)
if sys.argv[1] == "destroyed":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("transports", ["shm", BLOCKING_DEVICE_LAYOUT])
@pytest.mark.parametrize("how", ["destroyed", "left"])
def test_a_callback_that_takes_long_ends_before_the_program(how, transports):
    env = environment(transports, MOONCAKE_FAILURE_TIMEOUT_MS="300")
    process = run_python(SLOW_CALLBACK, how, env=env)
    text, errors = process.communicate(timeout=harness.DEADLINE)
    assert process.returncode == 0, errors
    assert text == "runs\nhas ended\n"
    assert "waits for a callback" in errors


FORKED_CHILD = """
import os, sys, torch, torch.distributed as dist
import mooncake_backend
dist.init_process_group("mooncake-cpu", store=dist.HashStore(), rank=0, world_size=1)
work = dist.all_reduce(torch.ones(4), async_op=True)
future = work.get_future()
future.then(lambda done: None).wait()
dist.destroy_process_group()
child = os.fork()
if child == 0:
    del future, work
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 7)
"""


def test_a_forked_child_drops_works_of_its_parent():
    """The threads that mark futures and run callbacks are not in the child."""
    process = run_python(FORKED_CHILD, env=environment("shm"))
    _, errors = process.communicate(timeout=harness.DEADLINE)
    assert process.returncode == 0, errors


@pytest.mark.parametrize("transports", ["shm,tcp", DEVICE_LAYOUT])
@pytest.mark.parametrize("what", ["dtensor", "fully_shard", "zero"])
def test_who_still_holds_a_group_did_not_die(tmp_path, what, transports):
    """The default group's destruction is the goodbye, whoever holds an object of it: one rank ends
    while the other looks."""
    processes = [
        run_python(KEEPS, rank, tmp_path, what, env=environment(transports)) for rank in range(2)
    ]
    try:
        said = [process.stdout.readline() for process in processes]
        errors = [process.communicate(timeout=harness.DEADLINE)[1] for process in processes]
        assert said == ["over\n"] * 2, errors
        assert [process.returncode for process in processes] == [0, 0], errors
        assert [ours(text) for text in errors] == [[], []]
    finally:
        end_all(processes)


# ---- a program that ends

ENDS = """
import json, multiprocessing, os, sys, time, torch, torch.distributed as dist
import devices, mooncake_backend as mb

def rank_of(rank, folder, size, gone):
    store = dist.FileStore(folder + "/store", size)
    devices.use(rank)
    dist.init_process_group(
        devices.served_by("mooncake"), store=store, rank=rank, world_size=size
    )
    dist.all_reduce(torch.ones(8))
    found = {}
    for ended in (4, 3, 2):
        if rank == ended == 4:
            dist.destroy_process_group()
        if rank == ended == 2:
            raise ValueError("a bug\\nof two lines")
        if rank == ended:
            return
        gone(ended)
        found[ended] = results = []
        for _ in range(2):
            tensor = torch.ones(8)
            try:
                dist.all_reduce(tensor)
                results.append(tensor[0].item())
            except mb.PeerLostError as error:
                results.append(str(error))
        # The other survivor leaves after the last barrier, and is no active rank from then on.
        found["active"] = mb.get_active_ranks(dist.group.WORLD).tolist()
        found["kinds"] = [one.kind for one in mb.get_evidence(dist.group.WORLD)]
        dist.barrier()
    dist.destroy_process_group()
    with open(f"{folder}/found-{rank}", "w") as file:
        json.dump(found, file)
"""

PLAIN = (
    ENDS
    + """
def gone(rank):
    while mb.get_active_ranks(dist.group.WORLD)[rank]:
        time.sleep(0.01)

rank_of(int(sys.argv[1]), sys.argv[2], 5, gone)
"""
)

FORKED = PLAIN.replace(
    "rank_of(int(sys.argv[1]), sys.argv[2], 5, gone)",
    """
context = multiprocessing.get_context("fork")
ranks = [context.Process(target=rank_of, args=(r, sys.argv[2], 5, gone)) for r in range(5)]
for one in ranks: one.start()
for one in ranks: one.join()
sys.exit([one.exitcode for one in ranks] != [0, 0, 1, 0, 0])
""",
)


@pytest.mark.parametrize(
    ("mode", "transports", "program"),
    [
        ("continue", "tcp", PLAIN),
        ("raise", "shm", PLAIN),
        ("raise", "shm", FORKED),
        ("continue", "device", PLAIN),
        ("raise", "device-blocking", PLAIN),
    ],
    ids=["continue-tcp", "raise-shm", "raise-forked", "continue-device", "raise-device"],
)
def test_how_a_rank_ends(tmp_path, mode, transports, program):
    """Rank 4 destroys its group: nothing is lost. Rank 3 comes to the end of its program and rank
    2 to an exception, while the others go on: both are lost."""
    count = 1 if program is FORKED else 5
    processes = [
        run_python(program, rank, tmp_path, env=environment(transports, MOONCAKE_ON_FAILURE=mode))
        for rank in range(count)
    ]
    try:
        errors = [process.communicate(timeout=harness.DEADLINE)[1] for process in processes]
        text = "\n".join(errors)
        codes = [process.returncode for process in processes]
        assert codes == ([0] if program is FORKED else [0, 0, 1, 0, 0]), text
    finally:
        end_all(processes)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert found["4"] == [4, 4]
        if mode == "continue":
            assert found["3"] == [3, 3]
            assert found["2"] == [2, 2]
        else:
            assert (
                "lost rank 3 (its program ended without destroy_process_group())" in found["3"][0]
            )
            # Another survivor may tell it before rank 2 itself does.
            how = r"it ended by an uncaught ValueError: a bug|rank \d says so"
            assert re.search(rf"lost rank 2 \(({how})\)", found["2"][0])
            assert [found["3"][1], found["2"][1]] == [3, 2]
        assert found["active"] == [1, 1, 0, 0, 0]
        # The kernel may tell the end of rank 2 before its own report has come.
        assert found["kinds"][0] in ("failed", "exited")
        assert found["kinds"][1:] == ["ended", "goodbye"]
        lines = [line for line in ours(text) if f"rank {rank}: " in line]
        assert len(lines) == 2, text
        ended, failed = (line.partition(f"rank {rank}: ")[2] for line in lines)
        assert ended == (
            "rank 3 ended without destroy_process_group() while its job still runs operations; "
            "ranks 0-2 continue, epoch 3"
        )
        how = "it ended by an uncaught ValueError: a bug|process exited"
        assert re.fullmatch(rf"rank 2 died \(({how})\); ranks 0, 1 continue, epoch 4", failed)


# ---- Ctrl-C


def sleeps(pid):
    """In a futex: the main thread waits."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] == FUTEX


def stuck_on_rank(me, what):
    """Rank 0 waits for what rank 1 does not do."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    handled = []
    signal.signal(signal.SIGUSR2, lambda *_: (handled.append(1), me.board.set("handled")))
    oracle.exercise("all_reduce")
    got = torch.zeros(1000)
    if me.rank == 1:
        me.board.wait("interrupted")
        if what in ("recv", "batch_isend_irecv"):
            dist.send(torch.full((1000,), 7.0), 0)
        tensor = torch.ones(8)
        dist.all_reduce(tensor)
        return tensor[0].item()
    work = dist.all_reduce(torch.ones(8), async_op=True) if what == "wait" else None
    if what == "timed wait":
        work = dist.all_reduce(torch.ones(8), async_op=True)
    try:
        me.board.set("going")
        if what == "recv":
            dist.recv(got, 1)
        elif what == "batch_isend_irecv":
            for one in dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, 1)]):
                one.wait()
        elif what == "all_reduce":
            dist.all_reduce(torch.ones(8))
        elif what == "wait":
            work.wait()
        else:
            work.wait(harness.timedelta(seconds=100))
        raise AssertionError("it was not interrupted")
    except KeyboardInterrupt:
        assert handled
    if what in ("recv", "batch_isend_irecv"):
        # Nothing but that receive has ended.
        me.board.set("interrupted")
        dist.recv(got, 1)
        assert (got == 7).all()
        tensor = torch.ones(8)
        dist.all_reduce(tensor)
        return tensor[0].item()
    error = raised(dist.all_reduce, torch.ones(8))
    dist.destroy_process_group()
    me.board.set("interrupted")
    return error


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("what", ["recv", "batch_isend_irecv", "all_reduce", "wait", "timed wait"])
def test_ctrl_c_ends_a_wait(what, transports):
    """Long before its own deadline; a handler that raises nothing lets it go on."""
    env = {"MOONCAKE_TRANSPORTS": transports, "MOONCAKE_HOST_IP": "127.0.0.1"}
    with harness.starting(2, stuck_on_rank, what, env=env, timeout=600.0) as crew:
        crew.board.wait("going")
        until(lambda: sleeps(crew.pid(0)), "rank 0 to wait")
        crew.signal(0, signal.SIGUSR2)
        crew.board.wait("handled", 10)
        until(lambda: sleeps(crew.pid(0)), "rank 0 to wait")
        crew.signal(0, signal.SIGINT)
        crew.board.wait("interrupted", 10)
        first, second = crew.results(10)
    if what in ("recv", "batch_isend_irecv"):
        assert (first, second) == (2, 2)
    else:
        assert first[0] == "DistBackendError"
        assert re.search(r"KeyboardInterrupt.* while .*wait", first[1]), first[1]
        assert second in (1, 2)  # what rank 0 had given before may be in it


def destroying_on_rank(me, what, exits):
    """Rank 0 destroys the group in a handler that interrupts its own wait."""
    dist.all_reduce(torch.ones(8))

    def destroy(*_):
        dist.destroy_process_group()
        me.board.set("destroyed")
        if exits:
            sys.exit("as a job's end asks for")

    if me.rank == 1:
        me.board.wait("destroyed", 30)
        dist.destroy_process_group()
        return None
    signal.signal(signal.SIGTERM, destroy)
    me.board.set("going")
    try:
        return interrupted(what)
    except SystemExit as exit:
        return type(exit).__name__, str(exit)


def interrupted(what):
    if what == "recv":
        return raised(dist.recv, torch.ones(8), 1)
    if what == "wait":
        work = dist.all_reduce(torch.ones(8), async_op=True)
        return raised(work.wait)
    if what == "wait beside the thread that runs it":
        work = dist.all_reduce(torch.ones(8), async_op=True)
        return raised(work.wait, timedelta(minutes=9))
    return raised(dist.all_reduce, torch.ones(8))


@pytest.mark.parametrize("exits", [False, True], ids=["returns", "exits"])
@pytest.mark.parametrize(
    "what", ["all_reduce", "wait", "wait beside the thread that runs it", "recv"]
)
def test_destroying_in_a_signal_handler(what, exits):
    """It does not wait for the operation that it has interrupted, on its own thread."""
    env = {"MOONCAKE_TRANSPORTS": "shm", "MOONCAKE_FAILURE_TIMEOUT_MS": "60000"}
    with harness.starting(2, destroying_on_rank, what, exits, env=env, timeout=600.0) as crew:
        crew.board.wait("going")
        until(lambda: sleeps(crew.pid(0)), "rank 0 to wait")
        crew.signal(0, signal.SIGTERM)
        kind, text = crew.results(60)[0]
        if exits:
            assert (kind, text) == ("SystemExit", "as a job's end asks for")
        else:
            assert kind == "DistBackendError", text
            assert "destroyed" in text, text


# ---- import


@pytest.mark.parametrize("first", ["", "import torch;"])
def test_import_registers_when_torch_does_not(first):
    code = (
        first + "import mooncake_backend, torch.distributed as dist;"
        "assert {'MOONCAKE', 'MOONCAKE-CPU'} <= set(dist.Backend._plugins)"
    )
    env = environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    process = run_python(code, env=env)
    _, error = process.communicate(timeout=harness.DEADLINE)
    assert process.returncode == 0, error
