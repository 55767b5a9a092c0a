"""Fixtures: layouts of ranks over transports and hosts, and a check that tests leave nothing
behind."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cards
import devices
import ep_crew
import fake_device
import harness
import hosts
import launchers
import pytest
from hypothesis import HealthCheck, settings

LAYOUT_NAMES = ["shm", "shm-no-cma", "tcp", "mixed", "sim"]


def marks_of(layout: str) -> Any:
    """A first look at the tests runs the main layouts only. Simulated cards, and a system that
    forbids reads of other processes, have their tests in C++; here they are slow."""
    if layout in ("shm-no-cma", "sim"):
        return pytest.mark.slow
    return () if layout in ("shm", "tcp") else pytest.mark.ci


LAYOUTS = [pytest.param(name, marks=marks_of(name)) for name in LAYOUT_NAMES]
# Over shm, with tensors of a device.
DEVICE_LAYOUT = pytest.param("device", marks=pytest.mark.ci)
# The same, and waits for calls of Buffers wait on the host.
HOST_WAITS_LAYOUT = pytest.param("device-host", marks=pytest.mark.ci)
# The low latency mode of Buffers by kernels.
KERNELS_LAYOUT = pytest.param("device-kernels", marks=pytest.mark.ci)
# The same with the ranks on two hosts.
HOSTS_LAYOUT = pytest.param("device-kernels-hosts", marks=pytest.mark.ci)
# Where tests want the error of an operation from its own wait().
BLOCKING_DEVICE_LAYOUT = pytest.param("device-blocking", marks=pytest.mark.ci)
ALL_LAYOUTS = [*LAYOUTS, pytest.param("fabric", marks=pytest.mark.slow)]
# Tensors of layout `device` are on this one.
DEVICE = devices.TESTED
SMALL_EAGER = 4096  # the least that a slot holds, so that both sides of the switch are cheap

# Files of tests that take long, beside the layouts above: tests/run.sh --ci runs them.
LONGER = [
    "demo",
    "ecosystem",
    "ep_deepep",
    "ep_docs",
    "ep_elastic",
    "ep_failures",
    "ep_hosts",
    "ep_mistakes",
    "ep_normal",
    "ep_slow_link",
    "ep_token_hosts",
    "ep_training",
    "exits",
    "fabric_links",
    "first_submit_probe",
    "graphs",
    "groups_fabric",
    "kernels",
    "launcher",
    "lifetimes",
    "partitions",
    "peer_hosts",
    "peer_verbs",
    "replacing",
    "restarts",
    "seen_losses",
    "spares",
    "transfer_bench",
    "transfer_fabric",
    "transfer_faults",
]

settings.register_profile(
    "ci", max_examples=100, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("long", parent=settings.get_profile("ci"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def layout_options(layout: str, size: int, two_hosts: Callable[[], Any]) -> dict[str, Any]:
    """What a Crew needs for the layout."""
    if layout == "fake":  # ranks that register the device keep it, so they are no other layout's
        fake_device.build()
        return {"backend": None}
    env = {"MOONCAKE_EAGER_BYTES": str(SMALL_EAGER)}
    if layout == "shm":
        return {"env": {**env, "MOONCAKE_TRANSPORTS": "shm"}}
    if layout.startswith("device"):
        env |= devices.settings(layout)
        if layout.endswith("-hosts"):
            if why := hosts.why_not():
                pytest.skip(why)
            env["GLOO_SOCKET_IFNAME"] = "eth0"
            return {"env": env, "namespaces": two_hosts().spread(size)}
        return {"env": {**env, "MOONCAKE_TRANSPORTS": "shm"}}
    if layout == "shm-no-cma":
        return {"env": {**env, "MOONCAKE_TRANSPORTS": "shm", "MOONCAKE_CMA": "0"}}
    if layout in ("tcp", "sim", "fabric"):
        return {"env": {**env, **cards.over(layout)}}
    if hosts.why_not() is None:
        return {"env": env, "namespaces": two_hosts().spread(size)}
    # The first two ranks have shared memory between them, all others only TCP.
    env["MOONCAKE_HOST_IP"] = "127.0.0.1"
    near = {"MOONCAKE_TRANSPORTS": "shm,tcp"}
    far = {"MOONCAKE_TRANSPORTS": "tcp"}
    return {"env": env, "rank_env": {r: near if r < 2 else far for r in range(size)}}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--turn",
        metavar="N/M",
        default="0/1",
        help="of the tests marked ci, only each M-th by a hash of its name, counted from N",
    )
    parser.addoption("--most", type=int, help="only the first tests of those that are chosen")


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    turn, turns = map(int, config.getoption("--turn").split("/"))
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        if item.path.stem.removeprefix("test_") in LONGER:
            item.add_marker(pytest.mark.ci)
        others_turn = (zlib.crc32(item.nodeid.encode()) - turn) % turns != 0
        (others if others_turn and item.get_closest_marker("ci") else chosen).append(item)
    items[:] = chosen
    yield  # options like -m choose
    if (most := config.getoption("--most")) is not None:
        others += items[most:]
        del items[most:]
    config.hook.pytest_deselected(items=others)


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[Callable[[], hosts.Hosts]]:
    """Two hosts for the whole run, made when first asked for."""
    made: list[hosts.Hosts] = []

    def get() -> hosts.Hosts:
        if not made:
            made.append(hosts.Hosts(2))
        return made[0]

    get.namespaces = lambda: made[0].namespaces if made else []  # type: ignore[attr-defined]
    yield get
    for one in made:
        one.close()


class Crews:
    """Lends crews that live on from test to test, one for each layout and size; a broken one is
    replaced."""

    def __init__(self, two_hosts: Callable[[], hosts.Hosts]) -> None:
        self.two_hosts = two_hosts
        self.key: tuple[str, int] | None = None
        self.crew: harness.Crew | None = None

    def get(self, layout: str, size: int) -> harness.Crew:
        if self.crew is None or self.key != (layout, size) or self.crew.broken:
            self.close()
            self.crew = harness.Crew(size, **layout_options(layout, size, self.two_hosts))
            self.key = (layout, size)
        return self.crew

    def close(self) -> None:
        crew, self.crew = self.crew, None
        if crew is not None:
            if crew.broken:
                crew.end()
            else:
                crew.close()


@pytest.fixture(scope="session")
def crews(two_hosts: Callable[[], hosts.Hosts]) -> Iterator[Crews]:
    crews = Crews(two_hosts)
    yield crews
    crews.close()


@pytest.fixture(params=["shm", DEVICE_LAYOUT, HOST_WAITS_LAYOUT, KERNELS_LAYOUT, HOSTS_LAYOUT])
def ep(crews: Crews, request: pytest.FixtureRequest) -> ep_crew.EpCrew:
    """Four ranks for expert parallelism."""
    return ep_crew.EpCrew(request.param, lambda: crews.get(request.param, ep_crew.SIZE))


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """No process, /dev/shm entry or network namespace is left by the test."""
    before_children = _children()
    before_shm = set(os.listdir("/dev/shm"))
    before_hosts = set(hosts.existing())
    yield
    kept = [p.pid for crew in harness.live_crews for p in crew.processes]
    for crew in list(harness.live_crews):
        shared = request.session.stash.get(SHARED, None)
        if shared is None or crew is not shared.crew:
            crew.end()
            pytest.fail("the test left a crew of ranks behind")
    harness.until(
        lambda: set(harness.server_children()) <= set(kept), "forked processes to end", 10
    )
    left = _children() - before_children - harness.helper_processes()
    assert not left, f"the test left processes behind: {left}"
    pids = [str(os.getpid()), *map(str, kept)]
    left_shm = [
        name
        for name in set(os.listdir("/dev/shm")) - before_shm
        if "mooncake" in name or any(pid in name for pid in pids)
    ]
    assert not left_shm, f"the test left {left_shm} in /dev/shm"
    mine = {n for n in hosts.existing() if n.split("-")[1] == str(os.getpid())}
    get = request.session.stash.get(TWO_HOSTS, None)
    left_hosts = mine - before_hosts - set(get.namespaces() if get else [])
    assert not left_hosts, f"the test left network namespaces behind: {left_hosts}"


SHARED = pytest.StashKey[Any]()
TWO_HOSTS = pytest.StashKey[Any]()


@pytest.fixture(autouse=True, scope="session")
def _stash(request: pytest.FixtureRequest, crews: Crews, two_hosts: Callable[[], Any]) -> None:
    request.session.stash[SHARED] = crews
    request.session.stash[TWO_HOSTS] = two_hosts


def _children() -> set[int]:
    found = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found |= {int(word) for word in (task / "children").read_text().split()}
    return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[launchers.Site]:
    site = launchers.Site(tmp_path)
    yield site
    assert not site.close(), "ranks were left"
