"""Process groups and expert parallelism between two hosts over network cards, for which libfabric's
provider over TCP stands: all of it moves, and goes on without a rank that is killed."""

from __future__ import annotations

import ep_crew
import harness
import hosts
import oracle
import pytest
import torch
import torch.distributed as dist
from cards import SOFTWARE
from test_network import join
from test_transfer_fabric import needs_cards, needs_hosts

import mooncake_backend

COUNT = 1 << 20
SIZE, TOKENS, HIDDEN, TOPK, EXPERTS = 4, 8, 640, 2, 8
VERBS = ("all_reduce", "broadcast", "all_to_all")
ENV = {**SOFTWARE, "MOONCAKE_TRANSPORTS": "shm,fabric", "MOONCAKE_FAILURE_TIMEOUT_MS": "1000"}
VICTIM = 3

pytestmark = [pytest.mark.netns, needs_cards, needs_hosts]


def on_rank(me, master):
    mooncake_backend.set_device_filter(["eth0"])
    join(me, master)
    for verb in VERBS:
        for count in (8, 40_000):
            oracle.exercise(verb, count=count, seed=count)
    given = ep_crew.inputs(11, [TOKENS] * SIZE, HIDDEN, TOPK, EXPERTS)
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    for _ in range(3):
        ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    wires = [backend.transport_to(rank) for rank in range(SIZE)]
    me.board.set(f"ready-{me.rank}")
    me.board.wait_all("ready", range(SIZE))
    # The victim is killed somewhere in these.
    tensor = torch.ones(1 << 18)
    me.board.set("moving")
    found = 15.0
    while found == 15:
        tensor.fill_(2.0**me.rank)
        dist.all_reduce(tensor)
        (found,) = tensor.unique().tolist()
    assert found == 7
    assert mooncake_backend.get_active_ranks(dist.group.WORLD).tolist() == [1, 1, 1, 0]
    for _ in range(10):
        tensor.fill_(2.0**me.rank)
        dist.all_reduce(tensor)
        assert (tensor == 7).all()
        tensor.fill_(float(me.rank))
        dist.broadcast(tensor, 1)
        assert (tensor == 1).all()
    mine = given[me.rank]
    found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False)
    buffer.low_latency_combine(found[0], mine.topk_idx, mine.weights, found[2])
    lost = (mine.topk_idx >= EXPERTS * VICTIM // SIZE).any(dim=1)
    assert buffer.missing_contributions.bool().tolist() == lost.tolist()
    return wires


def moves_by_cards(me, addresses):
    """What cards have read, and written, for all_reduce, and for dispatches and combines."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize(addresses[me.rank], "P2PHANDSHAKE", "fabric", "eth0") == 0
    mooncake_backend.set_transfer_engine(engine)
    join(me, addresses[0])
    counted = []

    def count():
        dist.barrier()
        counters = engine.get_counters()
        assert counters["cards_retried"] == 0
        counted.append((counters["cards_read"], counters["cards_written"]))

    tensor = torch.empty(COUNT)
    many = [torch.empty(COUNT // 4) for _ in range(4)]
    for _ in range(2):
        count()
        tensor.fill_(me.rank + 1)
        dist.all_reduce(tensor)
        assert (tensor == 3).all()
        for part in many:
            part.fill_(me.rank + 1)
        dist.all_reduce_coalesced(many)
        assert all((part == 3).all() for part in many)
    tokens, hidden = 64, 2048
    given = ep_crew.inputs(11, [tokens] * 2, hidden, TOPK, EXPERTS)
    buffer = ep_crew.deepep_buffer(tokens, hidden, EXPERTS)
    for _ in range(2):
        count()
        ep_crew.round_trip(me, buffer, given, tokens, EXPERTS)
    count()
    return counted


def test_large_ones_are_moved_by_cards():
    """The first of each kind asks for keys, and may go as packets."""
    with hosts.Hosts(2, v6=False) as two:
        env = {**ENV, "MOONCAKE_JOB_KEY": "of this test alone"}
        options = {"backend": None, "namespaces": two.spread(2), "env": env}
        addresses = [host.v4[0] for host in two.hosts]
        for counted in harness.run_ranks(2, moves_by_cards, addresses, **options):
            read, written = zip(*counted, strict=True)
            assert read[2] - read[1] >= 2 * COUNT * 4
            # Rows of a combine are read, those of a dispatch are written unasked.
            assert read[4] - read[3] > 64 * 2048
            assert written[4] - written[3] > 64 * 2048


def test_all_of_it_between_two_hosts_and_on_without_a_rank_that_is_killed():
    with hosts.Hosts(2, v6=False) as two:
        options = {"backend": None, "namespaces": two.spread(SIZE), "env": ENV}
        with harness.starting(SIZE, on_rank, two[0].v4[0], **options) as crew:
            crew.board.wait("moving", deadline=harness.scaled(60))
            crew.kill(VICTIM)
            wires = crew.results(dead=[VICTIM])
    assert [wires[0][rank] for rank in range(1, SIZE)] == ["shm", "fabric", "fabric"]
