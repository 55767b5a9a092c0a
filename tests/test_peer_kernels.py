"""Groups whose collectives go by kernels, in memory that the ranks of a host map: streams, losses,
errors, ends. tests/test_peer_verbs.py has the collectives. On the device `fake` the kernels are the
library's own source, on the CPU (tests/simt)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import devices
import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from harness import raised, scaled, until
from peer_ranks import LIMIT, crew, dies, run, runs_kernels


def streams_on_rank(me):
    """Several streams on one group, asynchronous calls, callbacks, and staged operations between:
    each reads the results of the one before it."""
    streams = [torch.Stream(device=torch.accelerator.current_accelerator()) for _ in range(3)]
    works, tensors, expected = [], [], []
    for round in range(24):
        count = LIMIT if round % 5 == 4 else 300  # above the limit: in pieces
        with streams[round % 3]:
            tensors.append(torch.full((count,), float(me.rank + round)))
            call = dist.all_reduce_coalesced if round % 5 == 3 else dist.all_reduce  # staged
            given = tensors[-1:] if round % 5 == 3 else tensors[-1]
            works.append(call(given, async_op=True))
        expected.append(float(sum(r + round for r in range(me.size))))
    for work in works:
        work.wait()
    for tensor, value in zip(tensors, expected, strict=True):
        assert tensor.unique().tolist() == [value]
    chain = torch.ones(100)
    for _ in range(5):
        dist.all_reduce(chain)
    assert chain.tolist() == [float(me.size**5)] * 100
    doubled = dist.all_reduce(torch.ones(10), async_op=True).get_future()
    doubled = doubled.then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [2.0 * me.size] * 10


def test_streams():
    run(3, streams_on_rank)


def groups_on_rank(me):
    pair = dist.new_group([0, 1])
    everybody = dist.new_group()
    for round in range(5):
        tensor = torch.full((50,), float(me.rank + round))
        if me.rank < 2:
            dist.all_reduce(tensor, group=pair)
            assert tensor.tolist() == [1.0 + 2 * round] * 50
        dist.all_reduce(tensor, group=everybody)
    for group in (everybody, pair):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_several_groups():
    run(3, groups_on_rank)


def until_one_dies(me, victim):
    """Operations of which each has its own data. Returns the sums and the ranks in them."""
    rounds, after = [], 0
    while after < 20:
        number = len(rounds)
        tensor = torch.full((200,), float((1 << me.rank) + 1000 * number))
        dist.all_reduce(tensor)
        sums = tensor.unique().tolist()
        assert len(sums) == 1, sums
        rounds.append(sums[0])
        if me.rank == victim and number == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        after += (int(sums[0]) % 1000) != 2**me.size - 1
        assert number < 5000
    return rounds


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank(victim):
    """All survivors have the same sums, with the lost rank in them up to one operation and without
    it from there on."""
    ranks = crew(3)
    ranks.start(until_one_dies, victim)
    results = ranks.results(dead=[victim])
    ranks.end()
    sums = [rounds for rank, rounds in enumerate(results) if rank != victim]
    assert sums[0] == sums[1]
    everybody, survivors = 7, 7 - (1 << victim)
    last = max(i for i, total in enumerate(sums[0]) if int(total) % 1000 == everybody)
    for number, total in enumerate(sums[0]):
        who = everybody if number <= last else survivors
        assert total == who + 1000 * number * bin(who).count("1"), number


def among(me, group, left):
    """Calls by kernels have the parts of the ranks that are left."""
    who = [dist.get_group_rank(group, rank) for rank in left]
    gather = dist.all_gather_into_tensor

    def all_reduce(tensor):
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert tensor.unique().tolist() == [float(sum(1 << rank for rank in left))]
        assert work.contributors == who

    for count, kernels in ((200, 1), (2 * LIMIT, 2)):
        tensor = torch.full((count,), float(1 << me.rank))
        runs_kernels(lambda tensor=tensor: all_reduce(tensor), kernels)
        parts = torch.full((group.size(), count), -1.0)
        own = torch.full((count,), me.rank + 1.0)
        runs_kernels(lambda parts=parts, own=own: gather(parts, own, group=group), kernels)
        for rank, part in enumerate(parts):
            given = dist.get_global_rank(group, rank) + 1.0 if rank in who else 0.0
            assert part.unique().tolist() == [given]
        scattered = torch.zeros(count)
        given = torch.arange(float(group.size())).repeat_interleave(count) + 10 * me.rank
        dist.reduce_scatter_tensor(scattered, given, group=group)
        assert scattered.unique().tolist() == [
            float(len(left) * group.rank() + 10 * sum(left)),
        ]
        taken = torch.full((group.size() * count,), -1.0)
        runs_kernels(
            lambda taken=taken, given=given: dist.all_to_all_single(taken, given, group=group), 1
        )
        for rank, part in enumerate(taken.view(group.size(), count)):
            source = 10.0 * dist.get_global_rank(group, rank) + group.rank()
            assert part.unique().tolist() == [source if rank in who else 0.0]


def made_after_a_loss(me, victims, later):
    """Groups of all ranks, also of those that are lost, and of the ranks that are left."""
    left = list(range(me.size))
    for victim in victims:
        left.remove(victim)
        dies(me, victim, left)
    groups = [
        dist.group.WORLD,  # its first call comes after the loss
        dist.new_group(list(reversed(range(me.size)))),
        dist.new_group(left),
    ]
    for group in groups:
        among(me, group, left)
    assert raised(dist.broadcast, torch.ones(3), victims[0], group=groups[1])[0] == "PeerLostError"
    left.remove(later)
    dies(me, later, left)
    for group in groups:  # a further kernel may stop those of the group, until this call ends
        dist.all_reduce(torch.ones(10), group=group)
    for group in groups:
        among(me, group, left)


@pytest.mark.parametrize(("victims", "later"), [((0,), 3), ((3,), 0), ((1, 2), 3), ((2, 3), 1)])
def test_groups_that_are_made_after_a_loss(victims, later):
    ranks = crew(4)
    ranks.start(made_after_a_loss, victims, later)
    ranks.results(dead=[*victims, later])
    ranks.end()


STEPS = ["peers-stop", "peers-stopped", "peers-agreed"]


def two_die(me, step):
    """Rank 1 dies after some operations, and rank 2 while the others agree about that."""
    from mooncake_backend import _C

    if me.rank == 2:
        _C.arm_failpoint(step, 1, False)
    sums = []
    for number in range(60):
        tensor = torch.full((200,), float(1 << me.rank))
        dist.all_reduce(tensor)
        sums.append(int(tensor[0]))
        if me.rank == 1 and number == 20:
            os.kill(os.getpid(), signal.SIGKILL)
    return sums


@pytest.mark.parametrize("step", STEPS)
def test_a_second_rank_dies_while_the_others_agree(step):
    ranks = crew(4)
    ranks.start(two_die, step)
    results = ranks.results(dead=[1, 2])
    ranks.end()
    assert results[0] == results[3]
    assert results[0][0] == 15
    assert results[0][-1] == 9


def late_on_rank(me, late):
    for round in range(20):
        if me.rank == late and round == 10:
            me.board.set("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        tensor = torch.full((100,), float(me.rank + round))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [float(sum(r + round for r in range(me.size)))] * 100
    torch.accelerator.synchronize()


@pytest.mark.parametrize("late", [0, 2])
def test_a_stopped_rank_is_waited_for(late):
    ranks = crew(3)
    ranks.start(late_on_rank, late)
    ranks.board.wait("stopping")
    process = ranks.processes[late].pid
    until(lambda: _state(process) == "T", "the rank to stop")
    time.sleep(0.3)  # longer than the patience of kernels
    os.kill(process, signal.SIGCONT)
    ranks.results()
    ranks.close()


def _state(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]


def timeout_on_rank(me):
    group = dist.new_group(timeout=timedelta(seconds=scaled(1)))
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=group)
    if me.rank == 1:
        me.board.wait("over")
        return
    dist.all_reduce(tensor, group=group)

    torch.accelerator.synchronize()  # it does not hang
    kind, text = raised(dist.all_reduce, tensor, group=group)
    assert kind == "DistBackendError", kind
    assert "has not ended on the device" in text, text
    me.board.set("over")


def test_a_rank_that_does_not_call():
    run(2, timeout_on_rank)


def silent_on_rank(me):
    """Rank 1 calls after rank 0 has given up. No later call of rank 0 goes on as if nothing were
    wrong, staged or not."""
    group = dist.new_group(timeout=timedelta(seconds=scaled(1)))
    dist.all_reduce(torch.ones(10), group=group)
    torch.accelerator.synchronize()
    if me.rank == 1:
        me.board.wait("late")
        dist.all_reduce(torch.ones(10), group=group)
        torch.accelerator.synchronize()
        return
    dist.all_reduce(torch.ones(10), group=group)
    torch.accelerator.synchronize()
    me.board.set("late")
    for call in (
        lambda: dist.all_reduce(torch.ones(LIMIT), group=group),
        lambda: dist.broadcast(torch.ones(4), 0, group=group),
        lambda: dist.barrier(group),
        lambda: dist.all_reduce(torch.ones(4), group=group),
    ):
        kind, text = raised(call)
        assert kind == "DistBackendError"
        assert "it waits for rank 1" in text, text


def test_no_call_hides_an_earlier_error():
    run(2, silent_on_rank)


def aborts_on_rank(me):
    dist.all_reduce(torch.ones(10))
    torch.accelerator.synchronize()
    if me.rank == 1:
        me.board.wait("over")
        return
    work = dist.all_reduce(torch.ones(10), async_op=True)
    dist.distributed_c10d._abort_process_group()
    torch.accelerator.synchronize()  # the kernel does not wait for rank 1
    assert not work.is_success()
    me.board.set("over")


def test_abort_ends_kernels():
    ranks = crew(2)
    try:
        ranks.call(aborts_on_rank)
    finally:
        ranks.end()


def interrupted_on_rank(me):
    dist.all_reduce(torch.ones(10))
    if me.rank == 1:
        me.board.wait("over")
        return

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(torch.ones(10))
    me.board.set("over")


def test_a_signal_ends_a_wait_on_the_host():
    ranks = crew(2, env={"MOONCAKE_BLOCKING_WAIT": "1"})
    try:
        ranks.call(interrupted_on_rank)
    finally:
        ranks.end()


def layouts_on_rank(me):
    parameter = torch.nn.Parameter(torch.full((4, 3), float(me.rank + 1)).t())
    dist.all_reduce(parameter)
    assert parameter.unique().tolist() == [3.0]
    splits = [2, 2] if me.rank == 0 else None
    received = torch.empty(4)
    dist.all_to_all_single(received, torch.full((4,), float(me.rank)), splits, splits)
    assert received.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_parameters_and_splits():
    run(2, layouts_on_rank)


LEAVES = """
import sys, torch, torch.distributed as dist
import devices
rank = int(sys.argv[1])
devices.use(rank)
dist.init_process_group(devices.served_by("mooncake"), init_method="file://" + sys.argv[2],
                        rank=rank, world_size=2)
dist.all_reduce(torch.ones(10))
tensors = [torch.full((1000,), float(rank + 1)) for _ in range(200)]
for tensor in tensors:
    dist.all_reduce(tensor, async_op=True)
if rank == 1:
    torch.accelerator.synchronize()
    print(*{value for tensor in tensors for value in tensor.tolist()})
"""


def test_what_was_called_before_the_end_of_a_program_is_done(tmp_path):
    """Rank 0 returns from its program while its kernels have not begun."""
    devices.prepare(DEVICE)
    env = {
        **os.environ,
        devices.VARIABLE: DEVICE,
        "MOONCAKE_PEER_BYTES": str(LIMIT),
        "PYTHONPATH": os.pathsep.join(
            [os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]
        ),
    }
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES, str(rank), str(tmp_path / "store")],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [program.communicate(timeout=100)[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0]
    assert outputs[1].strip() == "3.0"


def mismatch_on_rank(me):
    dist.all_reduce(torch.ones(10))
    texts = []

    def fails(count=10):
        try:
            dist.all_reduce(torch.ones(count))
        except dist.DistBackendError as error:
            texts.append(str(error))
        return texts

    fails(10 if me.rank != 1 else 11)  # its own wait() may know the error
    torch.accelerator.synchronize()
    until(fails, "the error")
    assert "another operation" in texts[0], texts


def test_another_size_is_named():
    run(3, mismatch_on_rank)


def other_ways_on_rank(me):
    oracle.exercise("all_reduce", count=100)
    runs_kernels(lambda: dist.all_reduce(torch.ones(8)), 0)


@pytest.mark.parametrize("env", ["MOONCAKE_ON_FAILURE=raise", "MOONCAKE_STREAM_WORDS=0"])
def test_without_kernels_calls_are_staged(env):
    name, value = env.split("=")
    run(2, other_ways_on_rank, env={name: value})


def denied_on_rank(me):
    from fake_device import control

    if me.rank == 1:
        control.inject("allocateShared", code="exhausted")
    oracle.exercise("all_reduce", count=100)
    runs_kernels(lambda: dist.all_reduce(torch.ones(8)), 0)


@pytest.mark.skipif(DEVICE != "fake", reason="only fake devices fail on purpose")
def test_one_rank_without_memory_is_enough_to_stage():
    run(3, denied_on_rank)
