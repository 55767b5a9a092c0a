"""A dispatch that skips a late rank while cards still write its first attempt over a slow link:
libfabric's provider over TCP, three hosts, 20 Mbit/s."""

from __future__ import annotations

import ep_crew
import harness
import hosts
import pytest
import torch
import torch.distributed as dist
from cards import SOFTWARE
from ep_crew import check_dispatch
from test_network import join
from test_transfer_fabric import needs_cards, needs_hosts

import mooncake_backend

SIZE, TOKENS, HIDDEN, TOPK, EXPERTS = 3, 384, 5120, 4, 6
LINK_BITS = 20_000_000  # 3.6 MB to each of two ranks take 2.9 s
PATIENCE_US = 100_000
LATE = 2
ENV = {**SOFTWARE, "MOONCAKE_TRANSPORTS": "shm,fabric", "MOONCAKE_FAILURE_TIMEOUT_MS": "10000"}
BF16 = {"use_fp8": False}

pytestmark = [pytest.mark.netns, needs_cards, needs_hosts]


def on_rank(me, master):
    mooncake_backend.set_device_filter(["eth0"])
    join(me, master)
    left = [rank for rank in range(SIZE) if rank != LATE]
    given = ep_crew.inputs(11, [TOKENS] * SIZE, HIDDEN, TOPK, EXPERTS)
    mine = given[me.rank]
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)

    def dispatch(**more):
        return buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, **BF16, **more)

    for _ in range(2):
        check_dispatch(me, dispatch(), given, TOKENS, EXPERTS, **BF16)
    me.board.set(f"ready-{me.rank}")
    me.board.wait_all("ready", range(SIZE))
    me.board.wait("slow")
    if me.rank == LATE:
        me.board.wait_all("through", left)
    ranks = torch.ones(SIZE, dtype=torch.int32)
    found = dispatch(active_ranks=ranks, timeout_us=PATIENCE_US)
    if me.rank != LATE:
        check_dispatch(me, found, given, TOKENS, EXPERTS, active=left, **BF16)
        me.board.set(f"through-{me.rank}")
    # All take part in the next operation, and have their own memory for themselves.
    for _ in range(2):
        check_dispatch(me, dispatch(), given, TOKENS, EXPERTS, **BF16)
    dist.barrier()
    buffer.destroy()
    return ranks.tolist()


def test_a_late_rank_is_skipped_while_cards_still_write():
    with hosts.Hosts(SIZE, v6=False) as net:
        options = {"namespaces": net.spread(SIZE), "backend": None, "env": ENV}
        with harness.starting(SIZE, on_rank, net[0].v4[0], **options) as crew:
            crew.board.wait_all("ready", range(SIZE))
            net.limit(LINK_BITS)
            crew.board.set("slow")
            results = crew.results()
    assert results == [[int(rank != LATE) for rank in range(SIZE)]] * SIZE
