"""Dispatch and combine by kernels with ranks on two hosts: two phases, graphs, faults of the
network. Results are in other suites (layout `device-kernels-hosts`), and so are most losses."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import devices
import ep_crew
import harness
import hosts
import peer_ranks
import pytest
import test_ep_graphs
import test_ep_kernels
import torch
from conftest import DEVICE
from ep_kernel_ranks import EXPERTS, SIZE, TOKENS, a_buffer, crew, inputs

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=str(hosts.why_not()))


@pytest.fixture(params=[(2, 1), (1, 2)], ids=["2+1", "1+2"], autouse=True)
def apart(request, two_hosts, monkeypatch):
    """So many ranks on each of two hosts."""
    monkeypatch.setattr(peer_ranks, "places", lambda size: two_hosts().places(request.param))
    return two_hosts()


def test_nothing_runs_between_the_phases():
    test_ep_kernels.test_nothing_runs_between_the_phases(20_000_000)


def test_hooks_in_any_order():
    test_ep_kernels.test_hooks_in_any_order()


@pytest.mark.parametrize("verb", ["dispatch", "combine"])
def test_a_rank_that_dies_between_the_phases(verb):
    test_ep_kernels.test_a_rank_that_dies_between_the_phases(verb)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_buffer_that_is_made_after_a_loss(victim):
    test_ep_kernels.test_a_buffer_that_is_made_after_a_loss(victim)


def test_rows_in_published_memory():
    test_ep_kernels.test_rows_in_published_memory()


def test_a_late_rank_is_named():
    test_ep_kernels.test_a_late_rank_is_named()


def test_replays():
    test_ep_graphs.test_replays()


def test_replays_go_on_after_a_loss():
    test_ep_graphs.test_replays_go_on_after_a_loss()


# ---- the network


def steps(me):
    """Round trips whose rows differ, until the test ends them."""
    buffer = a_buffer()
    ep_crew.round_trip(me, buffer, inputs(0), TOKENS, EXPERTS)
    me.board.set(f"going-{me.rank}")
    number = 0
    while not me.board.has("enough"):
        number += 1
        ep_crew.round_trip(me, buffer, inputs(number), TOKENS, EXPERTS)
        if me.rank == 0 and me.board.has("ends"):
            me.board.set("last", number + 5)
            me.board.set("enough")
    for later in range(number + 1, me.board.wait("last") + 1):
        ep_crew.round_trip(me, buffer, inputs(later), TOKENS, EXPERTS)
    buffer.destroy()


@pytest.mark.skipif(bool(hosts.why_no_resets()), reason=str(hosts.why_no_resets()))
def test_connections_that_break(apart):
    """All connections of a host are reset, several times. They are made again, and commands that
    had not arrived are repeated: no rank is lost, and no row is wrong."""
    ranks = crew()
    try:
        ranks.start(steps)
        ranks.board.wait_all("going", range(SIZE))
        for number in range(6):
            apart.reset(number % 2)
            time.sleep(0.4)
        ranks.board.set("ends")
        ranks.results()
    finally:
        ranks.end()


def cut_off(me, left):
    """The host of other ranks is cut off: the ranks of `left` go on without them."""
    buffer = a_buffer()
    given = inputs(3)
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    me.board.set(f"going-{me.rank}")
    me.board.wait("cut")
    mine = given[me.rank]
    seen = []
    for _ in range(1000):
        active = torch.ones(SIZE, dtype=torch.int32)
        found = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False, active_ranks=active
        )
        found[3].current_stream_wait()
        there = [rank for rank in range(SIZE) if active[rank]]
        seen.append(there)
        ep_crew.check_dispatch(me, found, given, TOKENS, EXPERTS, active=there, use_fp8=False)
        if there == left and len(seen) > 3:
            break
    me.board.set(f"without-{me.rank}")
    return seen[-1]


def test_a_host_that_is_cut_off(request):
    """The larger side goes on."""
    param = request.node.callspec.params["apart"]
    left = [0, 1] if param == (2, 1) else [1, 2]
    away = [rank for rank in range(SIZE) if rank not in left]
    with hosts.Hosts(2) as two:
        peer_ranks.places = lambda size: two.places(param)
        ranks = crew(env={"MOONCAKE_FAILURE_TIMEOUT_MS": "1500", "MOONCAKE_BLOCKING_WAIT": "1"})
        try:
            ranks.start(cut_off, left)
            ranks.board.wait_all("going", range(SIZE))
            two.link(1 if param == (2, 1) else 0, False)
            ranks.board.set("cut")
            ranks.board.wait_all("without", left)
            outcomes = ranks.outcomes()
        finally:
            ranks.end()
    for rank in left:
        assert outcomes[rank].error is None, outcomes[rank].text
        assert outcomes[rank].value == left
    for rank in away:
        assert outcomes[rank].error in ("EvictedError", "MinorityError"), outcomes[rank].text


# ---- programs of DeepEP

PROGRAM = """
import sys, torch, deep_ep
import torch.distributed as dist
from deep_ep.utils.envs import init_dist
from deep_ep.utils.math import calc_diff
import devices
from peer_ranks import runs_kernels

def loop(local_rank, num_local_ranks):
    rank, num_ranks, group = init_dist(local_rank, num_local_ranks)
    devices.use(rank)
    tokens, hidden, experts = 6, 256, 2 * num_ranks
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, num_ranks, experts)
    buffer = deep_ep.Buffer(group, num_rdma_bytes=size, low_latency_mode=True,
                            num_qps_per_rank=experts // num_ranks, explicitly_destroy=True)
    x = torch.randn((tokens, hidden), device="cpu").to(torch.get_default_device())
    topk_idx = (torch.arange(tokens).view(-1, 1) + rank) % experts
    weights = torch.ones((tokens, 1), dtype=torch.float32)

    def both():
        recv_x, count, handle, event, hook = buffer.low_latency_dispatch(
            x, topk_idx, tokens, experts, use_fp8=False, return_recv_hook=True)
        hook()
        combined, event, hook = buffer.low_latency_combine(
            recv_x.clone(), topk_idx, weights, handle, return_recv_hook=True)
        hook()
        assert calc_diff(combined.cpu(), x.cpu()) == 0

    for _ in range(5):
        both()
    runs_kernels(both, 4)
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} of {num_ranks} is through\\n", end="", flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(loop, args=(int(sys.argv[1]),), nprocs=int(sys.argv[1]))
"""


def test_a_program_of_deepep(apart, tmp_path):
    """As on two nodes: one launch on each, with two ranks."""
    devices.prepare(DEVICE)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {
        **os.environ,
        devices.VARIABLE: DEVICE,
        "MOONCAKE_EP_KERNELS": "1",
        "PYTHONPATH": os.path.dirname(__file__),
        "MASTER_ADDR": apart[0].v4[0],
        "MASTER_PORT": "8361",
        "WORLD_SIZE": "2",
    }
    devices.skip_without_queues(environment, least=2)
    programs = [
        subprocess.Popen(
            ["ip", "netns", "exec", host.namespace, sys.executable, "-m", "mooncake.ep.deepep",
             "program.py", "2"],
            cwd=tmp_path, env={**environment, "RANK": str(number)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for number, host in enumerate(apart.hosts)
    ]  # fmt: skip
    try:
        outputs = [program.communicate(timeout=harness.DEADLINE) for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0, 0], outputs
    for host, (text, _) in enumerate(outputs):
        ranks = [2 * host, 2 * host + 1]
        assert sorted(text.splitlines()) == [f"rank {rank} of 4 is through" for rank in ranks]
