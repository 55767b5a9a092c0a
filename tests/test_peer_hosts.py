"""Groups whose collectives go by kernels, with ranks on two hosts. Ranks of one host work together
as in tests/test_peer_kernels.py, and those of different ones by proxies."""

from __future__ import annotations

import os

import hosts
import peer_ranks
import pytest
import test_graphs
import test_peer_all_to_all
import test_peer_kernels
import test_peer_two_shot
import test_peer_verbs
import test_symmetric_memory
import torch
import torch.distributed as dist
from harness import raised
from peer_ranks import run

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=str(hosts.why_not()))


@pytest.fixture(autouse=True)
def apart(two_hosts, monkeypatch):
    """Half of the ranks on each of two hosts."""
    monkeypatch.setattr(peer_ranks, "places", two_hosts().spread)


@pytest.fixture(params=["first", "last"])
def alone(request, two_hosts, monkeypatch):
    """One rank on a host of its own: the first or the last one. Returns its number, of four."""
    counts = (1, 3) if request.param == "first" else (3, 1)
    monkeypatch.setattr(peer_ranks, "places", lambda size: two_hosts().places(counts))
    return 0 if request.param == "first" else 3


# ---- results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_verbs(size):
    test_peer_verbs.test_verbs(size)


def test_verbs_with_a_rank_alone(alone):
    run(4, test_peer_verbs.verbs_on_rank)


def test_types_and_reductions():
    test_peer_verbs.test_types_and_reductions()


def test_lists():
    test_peer_verbs.test_lists()


def test_premultiplied_sums():
    test_peer_verbs.test_premultiplied_sums()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_to_all(size):
    test_peer_all_to_all.test_splits(size)


def test_two_shot():
    test_peer_two_shot.test_types_and_reductions(3)


def test_two_shot_in_one_piece():
    test_peer_two_shot.test_one_piece()


def test_streams():
    test_peer_kernels.test_streams()


def test_several_groups():
    test_peer_kernels.test_several_groups()


@pytest.mark.parametrize("size", [2, 4])
def test_replays(size):
    test_graphs.test_replays(size)


# ---- ranks that die


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank(victim):
    """Of two ranks on the first host, or the only rank of the second one."""
    test_peer_kernels.test_a_killed_rank(victim)


@pytest.mark.parametrize(("victims", "later"), [((0,), 3), ((1, 2), 3), ((2, 3), 1)])
def test_groups_that_are_made_after_a_loss(victims, later):
    """One of two ranks of a host, one on each host, or all of one host."""
    test_peer_kernels.test_groups_that_are_made_after_a_loss(victims, later)


# A survivor also ends the proxy's commands to a lost rank of another host.
@pytest.mark.parametrize("step", [*test_peer_kernels.STEPS, "proxy-end"])
def test_a_second_rank_dies_while_the_others_agree(step):
    test_peer_kernels.test_a_second_rank_dies_while_the_others_agree(step)


@pytest.mark.parametrize("late", [0, 2])
def test_a_stopped_rank_is_waited_for(late):
    test_peer_kernels.test_a_stopped_rank_is_waited_for(late)


@pytest.mark.parametrize("way", ["kernels", "pieces"])
@pytest.mark.parametrize("verb", test_peer_verbs.ROOTED)
def test_a_root_is_lost(verb, way):
    test_peer_verbs.test_a_root_is_lost(verb, way)


@pytest.mark.parametrize("delay", [0.0, 0.011])
def test_a_rank_dies_within_a_call_of_many_pieces(delay):
    test_peer_verbs.test_a_rank_dies_within_a_call_of_many_pieces("all_reduce", delay)


@pytest.mark.parametrize("delay", [0.0, 0.037])
def test_a_rank_dies_within_a_two_shot_call(delay):
    test_peer_two_shot.test_a_rank_dies_within_a_call_of_one_piece(delay)


def test_a_rank_dies_between_replays():
    test_peer_two_shot.test_a_rank_dies_between_replays()


# ---- errors


def test_a_rank_that_does_not_call():
    test_peer_kernels.test_a_rank_that_does_not_call()


def test_another_size_is_named():
    test_peer_kernels.test_another_size_is_named()


def test_abort_ends_kernels():
    test_peer_kernels.test_abort_ends_kernels()


# ---- symmetric memory


def is_refused(me):
    kind, text = raised(test_symmetric_memory.shared, 100)
    assert kind == "NotImplementedError"
    assert "is on another host than rank 0" in text, text


@test_symmetric_memory.pytestmark
def test_symmetric_memory_needs_one_host():
    run(3, is_refused)


def other_sizes(me):
    """A rank computes places in other ranks' memory by its own size."""
    os.environ["MOONCAKE_PEER_BYTES"] = str(16384 + 4096 * me.rank)
    group = dist.new_group()
    for round in range(4):
        tensor = torch.full((1000,), float(me.rank + round))
        peer_ranks.runs_kernels(lambda tensor=tensor: dist.all_reduce(tensor, group=group), 0)
        assert tensor.unique().tolist() == [1.0 + 2 * round]


def test_ranks_with_other_sizes_stage():
    run(2, other_sizes)
