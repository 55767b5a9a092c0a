"""Several hosts, several networks per host, IPv4 and IPv6: network namespaces on this machine."""

from __future__ import annotations

import os
import re
from datetime import timedelta

import harness
import hosts
import oracle
import pytest
import torch
import torch.distributed as dist
from harness import raised

import mooncake_backend

PORT = 29500  # nobody else is in these namespaces

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(hosts.why_not()), reason=str(hosts.why_not())),
]


def join(me, master, timeout=harness.DEADLINE, host_ip=None):
    """As a launcher does it: MASTER_ADDR and the store on rank 0's host."""
    if host_ip is not None:
        mooncake_backend.set_host_ip(host_ip)
    os.environ.update(
        MASTER_ADDR=master, MASTER_PORT=str(PORT), RANK=str(me.rank), WORLD_SIZE=str(me.size)
    )
    dist.init_process_group("mooncake", timeout=timedelta(seconds=timeout))


def use_on_rank(me, name):
    """All verbs; then stays until the test has looked. Returns the wires to all ranks."""
    for verb in oracle.VERBS:
        for count in (8, 40_000):
            oracle.exercise(verb, count=count, seed=count)
    got = torch.zeros(40_000)
    peer = me.size - 1 - me.rank
    works = [dist.irecv(got, peer), dist.isend(torch.full((40_000,), float(me.rank)), peer)]
    for work in works:
        work.wait()
    assert (got == peer).all()
    me.board.set(f"{name}-{me.rank}")
    me.board.wait(f"{name}-looked")
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return [backend.transport_to(r) for r in range(me.size)]


def join_and_use_on_rank(me, master, host_ips=None):
    join(me, master, host_ip=host_ips[me.rank] if host_ips else None)
    return use_on_rank(me, "used")


def fails_on_rank(me, master):
    """The store outlives the failure, so that every rank can say what it knows."""
    store = dist.TCPStore(master, PORT, is_master=me.rank == 0, wait_for_workers=False)
    os.environ["MASTER_ADDR"] = master
    error = raised(
        dist.init_process_group, "mooncake", store=store, rank=me.rank, world_size=me.size,
        timeout=timedelta(seconds=4),
    )  # fmt: skip
    me.board.set(f"failed-{me.rank}")
    me.board.wait_all("failed", range(me.size))
    return error


def listeners(host):
    """Addresses on which somebody listens for TCP connections, without the port of torch's own
    store."""
    found = set()
    for line in host.run("ss", "-H", "-ltn").splitlines():
        address, _, port = line.split()[3].rpartition(":")
        if int(port) != PORT:
            found.add(re.sub(r"[\[\]]", "", address))
    return found


def run(two, size, *args, expected, **options):
    """Joins over two hosts; meanwhile exactly the expected addresses are listened on. The wires."""
    spread = two.spread(size)
    with harness.starting(
        size, join_and_use_on_rank, *args, backend=None, namespaces=spread, **options
    ) as crew:
        try:
            crew.board.wait_all("used", range(size), deadline=harness.scaled(60))
        except TimeoutError:
            crew.results(deadline=1)
        found = [listeners(host) for host in two.hosts]
        crew.board.set("used-looked")
        wires = crew.results()
    assert found == [{address} for address in expected]
    return wires


def test_two_hosts_of_two_ranks():
    with hosts.Hosts(2) as two:
        wires = run(two, 4, two[0].v4[0], expected=[two[0].v4[0], two[1].v4[0]])
    near, far = ["shm", "tcp"]
    assert wires == [
        ["self", near, far, far],
        [near, "self", far, far],
        [far, far, "self", near],
        [far, far, near, "self"],
    ]


@pytest.mark.parametrize("version", ["v4", "v6"])
@pytest.mark.parametrize("network", [0, 2])
def test_multi_homed_hosts_follow_the_master(network, version):
    """Every rank listens in the network in which the master is, and nowhere else."""
    with hosts.Hosts(2, networks=3) as two:
        addresses = [getattr(host, version)[network] for host in two.hosts]
        run(two, 2, addresses[0], expected=addresses)


@pytest.mark.parametrize("how", ["MOONCAKE_HOST_IP", "set_host_ip"])
def test_the_address_can_be_chosen(how):
    with hosts.Hosts(2, networks=3) as two:
        chosen = [host.v4[1] for host in two.hosts]  # not the master's network
        if how == "set_host_ip":
            env = {r: {"MOONCAKE_HOST_IP": two[r].v4[2]} for r in range(2)}  # loses
            run(two, 2, two[0].v4[0], chosen, expected=chosen, rank_env=env)
        else:
            env = {r: {"MOONCAKE_HOST_IP": chosen[r]} for r in range(2)}
            run(two, 2, two[0].v4[0], expected=chosen, rank_env=env)


def test_only_ipv6():
    with hosts.Hosts(2, v4=False) as two:
        run(two, 4, two[0].v6[0], expected=[host.v6[0] for host in two.hosts])


def test_an_address_of_another_host_is_refused():
    with hosts.Hosts(2, networks=2) as two:
        env = {0: {"MOONCAKE_HOST_IP": two[1].v4[1]}}
        errors = harness.run_ranks(
            2, fails_on_rank, two[0].v4[0], backend=None, namespaces=two.spread(2), rank_env=env
        )
        assert errors[0][0] == "ValueError"
        for text in ("MOONCAKE_HOST_IP", two[1].v4[1], two[0].v4[0], two[0].v4[1]):
            assert text in errors[0][1]
        assert errors[1][0] == "DistBackendError"
        assert re.search(r"rank\(?s?\)? 0\b", errors[1][1]), errors[1]


def test_an_address_that_others_cannot_reach():
    with hosts.Hosts(2) as two:
        env = {r: {"MOONCAKE_HOST_IP": "127.0.0.1"} for r in range(2)}
        errors = harness.run_ranks(
            2, fails_on_rank, two[0].v4[0], backend=None, namespaces=two.spread(2), rank_env=env
        )
    for rank, (kind, text) in enumerate(errors):
        assert kind == "DistBackendError", text
        assert f"rank {1 - rank}" in text


def test_shared_memory_alone_listens_on_no_network():
    with hosts.Hosts(1) as one, harness.starting(
        2, join_and_use_on_rank, one[0].v4[0],
        backend=None, namespaces=one.spread(2), env={"MOONCAKE_TRANSPORTS": "shm"},
    ) as crew:  # fmt: skip
        crew.board.wait_all("used", range(2))
        assert listeners(one[0]) == set()
        crew.board.set("used-looked")
        crew.results()


def test_a_host_that_loses_its_link_is_named():
    """No end of the connection tells the other one anything: the silence does. Of two equal sides
    the one with the lowest rank goes on."""
    with (
        hosts.Hosts(2) as two,
        harness.starting(
            2, link_lost_on_rank, two[0].v4[0], backend=None, namespaces=two.spread(2)
        ) as crew,
    ):
        crew.board.wait_all("up", range(2))
        two[1].run("ip", "link", "set", "eth0", "down")
        crew.board.set("cut")
        alone, (kind, text) = crew.results()
        assert alone == 1
        assert kind == "MinorityError"
        assert "rank 0" in text


def link_lost_on_rank(me, master):
    join(me, master)
    oracle.exercise("all_reduce")
    me.board.set(f"up-{me.rank}")
    me.board.wait("cut")
    tensor = torch.ones(8)
    if me.rank == 1:
        return raised(dist.all_reduce, tensor)
    dist.all_reduce(tensor)
    return tensor[0].item()


def test_a_killed_run_leaves_no_hosts(tmp_path):
    """Its namespaces are removed by the next one."""
    import subprocess
    import sys

    code = "import hosts, os; hosts.Hosts(2); os.kill(os.getpid(), 9)"
    folder = os.path.dirname(hosts.__file__)
    killed = subprocess.Popen([sys.executable, "-c", code], cwd=folder)
    killed.wait()
    assert any(f"-{killed.pid}-" in name for name in hosts.existing())
    hosts.remove_stale()
    assert not any(f"-{killed.pid}-" in name for name in hosts.existing())
