"""What programs written for `mooncake.pg` ask of works and groups, and what they get."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import harness
import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import raised, until

from mooncake_backend import MooncakeBackendOptions, PeerLostError, group, membership, options

ROOT = Path(__file__).resolve().parents[1]
SMALL, LARGE = 256, 20_000  # elements: in one message; fetched
SHORT = 0.5  # a failure_timeout that has to pass in the test


def over(transports, **more):
    return {"env": {"MOONCAKE_TRANSPORTS": transports, "MOONCAKE_HOST_IP": "127.0.0.1", **more}}


def one_hot(rank, size):
    return [int(r == rank) for r in range(size)]


# ---- messages


def batch_with_a_death_on_rank(me, count):
    """One work for each message, in their order: whoever zips them with the peers sees who failed,
    and the other messages are not disturbed."""
    if me.rank == 2:
        me.board.wait_all("posted", [0, 1])
        signal.raise_signal(signal.SIGKILL)
    other = 1 - me.rank
    got = {peer: torch.zeros(count) for peer in (2, other)}
    given = torch.full((count,), float(me.rank))
    operations = [
        dist.P2POp(dist.irecv, got[2], 2),
        dist.P2POp(dist.isend, given, other),
        dist.P2POp(dist.irecv, got[other], other),
    ]
    works = dist.batch_isend_irecv(operations)
    assert len(works) == len(operations)
    me.board.set(f"posted-{me.rank}")
    failed = []
    for operation, work in zip(operations, works, strict=True):
        raises = False
        try:
            work.wait()
        except PeerLostError:
            raises = True
        hint = membership.get_failed_ranks_hint(work).tolist()
        assert hint == (one_hot(2, me.size) if operation.peer == 2 else [0] * me.size)
        assert raises == (operation.peer == 2)
        if not membership.get_local_success(work):
            failed.append(operation.peer)
    assert failed == [2]
    assert (got[other] == other).all()
    # To whom is known to be lost: the same answers.
    until(lambda: not membership.get_peer_state(dist.group.WORLD, [2])[0], "the loss")
    assert group.backend_of(dist.group.WORLD).supports_coalescing  # of blocks; a batch is none
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, given, 2)]):
        assert raised(work.wait)[0] == "PeerLostError"
        assert not membership.get_local_success(work)
        assert membership.get_failed_ranks_hint(work).tolist() == one_hot(2, me.size)


def lost_messages_on_rank(me, count, made, mode):
    """All to all by messages, with options of this maker: with all ranks, then without rank 1."""
    from mooncake import pg

    maker = {"mooncake.pg": pg.MooncakeBackendOptions, "torch": MooncakeBackendOptions}[made]
    dist.init_process_group(
        "mooncake-cpu", store=me.store(), rank=me.rank, world_size=me.size,
        pg_options=maker(torch.ones(me.size, dtype=torch.int32), on_failure=mode),
    )  # fmt: skip
    peers = [rank for rank in range(me.size) if rank != me.rank]
    got = {}

    def all_to_all():
        operations = []
        for peer in peers:
            got[peer] = torch.full((2 * count,), 7.0)[::2]
            operations.append(dist.P2POp(dist.isend, torch.full((count,), float(me.rank)), peer))
            operations.append(dist.P2POp(dist.irecv, got[peer], peer))
        return operations, dist.batch_isend_irecv(operations)

    for work in all_to_all()[1]:
        work.wait()
        assert pg.get_local_success(work)
    me.board.set(f"round-{me.rank}")
    if me.rank == 1:
        me.board.wait_all("round", peers)
        signal.raise_signal(signal.SIGKILL)
    until(lambda: not membership.get_peer_state(dist.group.WORLD, [1])[0], "the loss")
    operations, works = all_to_all()
    for operation, work in zip(operations, works, strict=True):
        returns = operation.peer != 1 or (made == "mooncake.pg" and mode == "continue")
        if returns:
            work.wait()
            assert work.get_future().wait()[0] is not None
        else:
            assert raised(work.wait)[0] == "PeerLostError"
        assert pg.get_local_success(work) == (operation.peer != 1)
        hint = pg.get_failed_ranks_hint(work).tolist()
        assert hint == (one_hot(1, me.size) if operation.peer == 1 else [0] * me.size)
        if operation.op is dist.irecv and returns:
            assert (got[operation.peer] == (0 if operation.peer == 1 else operation.peer)).all()
    any_source = dist.irecv(torch.ones(count), tag=3)
    me.board.set(f"last-{me.rank}")
    me.board.wait_all("last", [0, 2])
    if me.rank == 2:
        signal.raise_signal(signal.SIGKILL)
    if made == "mooncake.pg" and mode == "continue":
        any_source.wait()
    else:
        assert raised(any_source.wait)[0] in ("PeerLostError", "MinorityError")
    if any_source.lost_ranks:  # else this rank is the one of three that is too few
        assert pg.get_failed_ranks_hint(any_source).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("made", "mode", "count"),
    [("mooncake.pg", "continue", SMALL), ("mooncake.pg", "continue", LARGE),
     ("mooncake.pg", "raise", SMALL), ("torch", "continue", SMALL)],
)  # fmt: skip
def test_messages_of_a_lost_rank_end_as_the_options_say(made, mode, count):
    arguments = (count, made, mode)
    with harness.starting(
        3, lost_messages_on_rank, *arguments, backend=None, **over("shm")
    ) as crew:
        crew.results(dead=[1, 2])


@pytest.mark.parametrize(("transports", "count"), [("shm", SMALL), ("tcp", LARGE)])
def test_a_batch_tells_which_of_its_messages_failed(transports, count):
    with harness.starting(3, batch_with_a_death_on_rank, count, **over(transports)) as crew:
        crew.results(dead=[2])


# ---- the view


def synced_on_rank(me):
    world = dist.group.WORLD
    status = membership.SyncAfterFailureStatus
    everybody = list(range(me.size))
    assert membership.get_peer_state(world, everybody) == [True] * me.size
    assert membership.get_num_synced_ranks(world) == me.size
    assert raised(membership.get_peer_state, world, [me.size])[0] == "RuntimeError"
    assert membership.sync_after_failure(world).status == status.NoPending
    me.board.set(f"asked-{me.rank}")
    if me.rank == 1:
        me.board.wait_all("asked", everybody)
        signal.raise_signal(signal.SIGKILL)
    until(lambda: not membership.get_peer_state(world, [1])[0], "the death")
    answer = membership.sync_after_failure(world)
    assert (answer.status, answer.reject_reason) == (status.Reconciled, "")
    assert membership.get_active_ranks(world).tolist() == [1, 0, 1]
    assert membership.get_num_synced_ranks(world) == 2
    assert membership.sync_after_failure(world).status == status.NoPending
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()


def test_sync_after_failure_returns_when_the_view_is_agreed():
    with harness.starting(3, synced_on_rank, **over("shm")) as crew:
        crew.results(dead=[1])


def capacity_on_rank(me):
    """SGLang polls the slots that ranks may join later."""
    active = torch.ones(8, dtype=torch.int32)
    me.init(options=MooncakeBackendOptions(active, False, 8, failure_timeout=30))
    world = dist.group.WORLD
    assert membership.get_peer_state(world, [3, 0, 7]) == [False, True, False]
    assert membership.get_peer_state(dist.new_group([0, 1, 2]), [2]) == [True]
    assert membership.get_num_synced_ranks(world) == 3
    for wrong in (8, -1):
        kind, text = raised(membership.get_peer_state, world, [wrong])
        assert (kind, f"rank {wrong}" in text) == ("RuntimeError", True), text


def test_slots_that_no_rank_has_yet():
    harness.run_ranks(3, capacity_on_rank, backend=None, **over("shm"))


# ---- settings


@pytest.fixture
def settings():
    before = dict(options._settings)
    window = membership._reconciliation_window
    yield options._settings
    options._settings.update(before)
    membership._reconciliation_window = window


def timed_on_rank(me):
    membership.set_p2p_timeout_us(200_000)
    membership.set_collective_timeout_us(1_500_000)
    me.init()
    kind, message = raised(dist.recv, torch.zeros(3), 1 - me.rank)
    assert kind == "DistBackendError"
    assert "timed out" in message
    dist.barrier()  # has the group's timeout


def test_the_timeout_of_messages():
    harness.run_ranks(2, timed_on_rank, backend=None, **over("shm"))


def test_timeouts_are_settings_of_later_groups(settings):
    membership.set_collective_timeout_us(2_500_000)
    membership.set_p2p_timeout_us(7_000_000)
    given = MooncakeBackendOptions().for_group(2)
    assert (given["failure_timeout"], given["message_timeout"]) == (2.5, 7.0)
    for nine in (9, np.int64(9), np.float32(9), Fraction(9), timedelta(seconds=9)):
        found = MooncakeBackendOptions(failure_timeout=nine).for_group(2)["failure_timeout"]
        assert (type(found), found) == (float, 9.0)
    by_size = MooncakeBackendOptions(np.int64(4), False)
    assert type(by_size.for_group(2)["max_group_size"]) is int
    membership.set_collective_timeout_us(np.int64(2_500_000))
    assert type(MooncakeBackendOptions().for_group(2)["failure_timeout"]) is float
    membership.set_collective_timeout_us(100)  # a busy machine must not look dead
    membership.set_p2p_timeout_us(0)
    given = MooncakeBackendOptions().for_group(2)
    assert (given["failure_timeout"], given["message_timeout"]) == (1.0, None)
    for function in (
        membership.set_collective_timeout_us,
        membership.set_p2p_timeout_us,
        membership.set_fault_reconciliation_window_us,
    ):
        with pytest.raises(ValueError, match="negative"):
            function(-1)
        with pytest.raises(TypeError, match="microseconds as an int"):
            function(1.5)
    membership.set_fault_reconciliation_window_us(1_000_000)


def test_a_device_filter_is_a_setting_of_later_groups(settings):
    assert MooncakeBackendOptions().for_group(2)["devices"] == []
    membership.set_device_filter(name for name in ("mlx5_1", "mlx5_2"))
    assert MooncakeBackendOptions().for_group(2)["devices"] == ["mlx5_1", "mlx5_2"]
    membership.set_device_filter("mlx5_3")
    assert MooncakeBackendOptions().for_group(2)["devices"] == ["mlx5_3"]
    membership.set_device_filter([])
    assert MooncakeBackendOptions().for_group(2)["devices"] == []
    for wrong in ([1], [""], [None]):
        with pytest.raises(TypeError, match="device names"):
            membership.set_device_filter(wrong)


def test_a_lost_rank_cannot_stay_and_be_taken_out():
    text = "auto_deactivate_on_failure=False needs auto_sync_on_failure=False"
    with pytest.raises(ValueError, match=text):
        MooncakeBackendOptions(auto_deactivate_on_failure=False)
    late = MooncakeBackendOptions()
    late.auto_deactivate_on_failure = False
    with pytest.raises(ValueError, match=text):
        late.for_group(2)


# ---- types

PROGRAM = """
import mooncake_backend as mb

def step(group: object) -> list[int]:
    try:
        options = mb.MooncakeBackendOptions(failure_timeout=1.0, on_failure="raise")
    except mb.InputsLostError as error:
        intact: bool = error.inputs_intact
    except mb.PeerLostError as error:
        intact = error.inputs_intact
    except (mb.EvictedError, mb.MinorityError):
        raise
    if not mb.get_local_success(None):
        return [seen.rank for seen in mb.get_evidence(group)]
    return [int(rank) for rank in mb.get_failed_ranks_hint(None).tolist()]
"""
WRONG = """
import mooncake_backend as mb
mb.MooncakeBackendOptions(on_failure="rise")
mb.get_local_succes(None)
"""


# torch's own files take minutes, and are not what is checked.
CONFIGURATION = """
[mypy]
strict = true
disallow_subclassing_any = false
[mypy-torch.*]
follow_imports = skip
"""


def mypy(program, folder):
    (folder / "program.py").write_text(program)
    (folder / "mypy.ini").write_text(CONFIGURATION)
    command = [sys.executable, "-m", "mypy", "program.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_callers_program_passes_the_type_checker(tmp_path):
    pytest.importorskip("mypy")
    checked = mypy(PROGRAM, tmp_path)
    assert checked.returncode == 0, checked.stdout
    checked = mypy(WRONG, tmp_path)
    assert "No overload variant" in checked.stdout
    assert "get_local_succes" in checked.stdout
