"""torch's calls for objects, and its checkpoints, after a loss and during one."""

from __future__ import annotations

import contextlib
import signal

import cards
import harness
import pytest
import torch
import torch.distributed as dist
from harness import raised

import mooncake_backend as mb
from mooncake_backend.group import backend_of

SIZE, VICTIM = 3, 1
ALIVE = [rank for rank in range(SIZE) if rank != VICTIM]


@pytest.fixture(params=["continue", "raise"])
def env(request):
    return {**cards.over("shm"), "MOONCAKE_ON_FAILURE": request.param}


def die():
    signal.raise_signal(signal.SIGKILL)


def raises_loss(function, *arguments, **named):
    kind, text = raised(function, *arguments, **named)
    assert kind == "PeerLostError", text
    assert f"rank {VICTIM}" in text


def lose(me):
    """The victim dies, and the others have seen it."""
    dist.barrier()
    if me.rank == VICTIM:
        die()
    with contextlib.suppress(mb.PeerLostError):  # in mode raise
        dist.barrier()


def part(rank):
    """Another size on each rank."""
    return {"rank": rank, "text": "x" * (100 * rank)}


def calls_on_rank(me):
    lose(me)
    expected = [part(rank) if rank in ALIVE else None for rank in range(SIZE)]
    for group in (None, dist.new_group(range(SIZE))):
        for _ in range(2):
            everybody = ["old"] * SIZE
            dist.all_gather_object(everybody, part(me.rank), group=group)
            assert everybody == expected
        for root in ALIVE:
            gathered = ["old"] * SIZE if me.rank == root else None
            dist.gather_object(part(me.rank), gathered, root, group=group)
            assert gathered == (expected if me.rank == root else None)
            sent = [part(root), None] if me.rank == root else ["old"] * 2
            dist.broadcast_object_list(sent, root, group=group)
            assert sent == [part(root), None]
            taken, given = ["old"], [part(rank) for rank in range(SIZE)]
            dist.scatter_object_list(taken, given if me.rank == root else None, root, group=group)
            assert taken == [part(me.rank)]
            if me.rank == root:
                for other in set(ALIVE) - {root}:
                    dist.send_object_list([part(root)], other, group=group)
            else:
                dist.recv_object_list(taken, root, group=group)
                assert taken == [part(root)]
        raises_loss(dist.gather_object, part(me.rank), None, VICTIM, group=group)
        raises_loss(dist.broadcast_object_list, [None], VICTIM, group=group)
        raises_loss(dist.scatter_object_list, [None], None, VICTIM, group=group)
        raises_loss(dist.send_object_list, [part(me.rank)], VICTIM, group=group)
        raises_loss(dist.recv_object_list, [None], VICTIM, group=group)


def test_lost_ranks_have_none_as_their_part(env):
    with harness.starting(SIZE, calls_on_rank, env=env) as crew:
        crew.results(dead=[VICTIM])


def half_a_call_on_rank(me, to_all):
    """The victim tells the size of its object, and dies before it sends the bytes."""
    group = dist.group.WORLD
    if me.rank == VICTIM:
        sizes = list(torch.zeros(SIZE, 1, dtype=torch.long))
        dist.all_gather(sizes, torch.tensor([1000]))
        die()
    parts = [None] * SIZE if to_all or me.rank == 0 else None
    call = dist.all_gather_object if to_all else dist.gather_object
    arguments = (parts, part(me.rank)) if to_all else (part(me.rank), parts)
    if backend_of(group).on_failure == "raise":
        raises_loss(call, *arguments)
    else:
        call(*arguments)
        assert parts in (None, [part(rank) if rank in ALIVE else None for rank in range(SIZE)])


@pytest.mark.parametrize("to_all", [True, False])
def test_a_rank_dies_between_its_size_and_its_bytes(env, to_all):
    with harness.starting(SIZE, half_a_call_on_rank, to_all, env=env) as crew:
        crew.results(dead=[VICTIM])


def checkpoint_on_rank(me):
    import torch.distributed.checkpoint as dcp

    lose(me)
    state = {"weight": torch.arange(12.0), "step": 7}
    # torch's planner needs all parts. All ranks raise its error, so none waits for another.
    with pytest.raises(dcp.CheckpointException):
        dcp.save(state, checkpoint_id=me.folder / "broken")
    group = dist.new_group(ALIVE)
    dcp.save(state, checkpoint_id=me.folder / "saved", process_group=group)
    loaded = {"weight": torch.zeros(12), "step": 0}
    dcp.load(loaded, checkpoint_id=me.folder / "saved", process_group=group)
    assert (loaded["weight"] == state["weight"]).all()
    assert loaded["step"] == 7


def test_a_checkpoint_after_a_loss(env):
    with harness.starting(SIZE, checkpoint_on_rank, env=env) as crew:
        crew.results(dead=[VICTIM])


def test_other_backends_raise_as_before():
    harness.run_ranks(2, broken_pickle_on_rank)


def broken_pickle_on_rank(me):
    gloo, ours = dist.new_group(backend="gloo"), dist.group.WORLD
    empty = torch.zeros(0, dtype=torch.uint8)
    assert dist.distributed_c10d._tensor_to_object(empty, 0, ours) is None
    # torch 2.15 gives one argument more: weights_only.
    assert dist.distributed_c10d._tensor_to_object(empty, 0, ours, True) is None
    assert raised(dist.distributed_c10d._tensor_to_object, empty, 0, gloo)[0] == "EOFError"
