"""Transfer engines in processes of their own over network cards, by seeds: processes are killed and
stopped, links go down, connections are reset, and cards misbehave. Whoever lives goes on, and what
was said to be written is there. How many seeds: MOONCAKE_TEST_FABRIC_SEEDS, from which one on:
MOONCAKE_TEST_SEED."""

from __future__ import annotations

import os
import random
import time

import harness
import hosts
import pytest
from engines import LOOPBACK
from fabric_crew import SIZE, lives
from harness import until
from test_transfer_fabric import needs_cards, needs_hosts

FIRST = int(os.environ.get("MOONCAKE_TEST_SEED", "1"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("MOONCAKE_TEST_FABRIC_SEEDS", "3")))
CARDS = (1, 2)  # the networks of a host that are cards; network 0 carries the engines' TCP
MOST_STOPPED = 0.3  # seconds, far less than a failure timeout
ENV = {
    "fabric": {
        "MOONCAKE_FABRIC_REQUIRE": "tcp;ofi_rxm",
        "MC_TE_FILTERS": ",".join(f"eth{card}" for card in CARDS),
        "MOONCAKE_TRANSPORTS": "fabric",
    },
    "sim": {"MOONCAKE_TRANSPORTS": "sim"},
}


class Fate:
    """What happens to the ranks of one seed."""

    def __init__(self, seed: int, crew: harness.Crew, net: hosts.Hosts | None) -> None:
        self.dice, self.crew, self.net = random.Random(f"fate {seed}"), crew, net
        self.dead: list[int] = []
        self.down: int | None = None

    def steps(self) -> int:
        """Of all ranks together."""
        board = self.crew.board
        names = [f"step-{rank}" for rank in range(SIZE)]
        return sum(1 + board.wait(name) for name in names if board.has(name))

    def strikes(self) -> None:
        kinds = [self.stops, self.stops, self.kills]
        if self.net:
            kinds += [self.resets, self.cuts, self.cuts]
        for _ in range(self.dice.randint(2, 5)):
            self.let_go_on(self.dice.randint(1, 6), 1.0)
            self.dice.choice(kinds)()

    def let_go_on(self, steps: int, at_most: float) -> None:
        """Until so many steps are done, or that many seconds are over."""
        enough, end = self.steps() + steps, time.monotonic() + at_most
        until(lambda: self.steps() >= enough or time.monotonic() > end, "steps")

    def alive(self) -> list[int]:
        return [rank for rank in range(SIZE) if rank not in self.dead]

    def has_failed(self) -> bool:
        """Somebody has ended already who should not have."""
        return any(self.crew.links[rank].poll() for rank in self.alive())

    def stops(self) -> None:
        rank = self.dice.choice(self.alive())
        self.crew.stop(rank)
        self.let_go_on(1, MOST_STOPPED)
        self.crew.cont(rank)

    def kills(self) -> None:
        if not self.dead:
            rank = self.dice.randrange(SIZE)
            self.crew.board.set(f"killed-{rank}")
            self.crew.kill(rank)
            self.dead.append(rank)

    def resets(self) -> None:
        assert self.net
        self.net.reset(self.dice.randrange(SIZE))

    def cuts(self) -> None:
        """One card's link goes; the one that was gone comes back. One way always works."""
        self.heals()
        assert self.net
        self.down = self.dice.randrange(SIZE)
        self.net.set_link(self.down, False, network=CARDS[-1])

    def heals(self) -> None:
        if self.net and self.down is not None:
            self.net.set_link(self.down, True, network=CARDS[-1])
            self.down = None


def live_through(seed, wire, net=None):
    addresses = [host.v4[0] for host in net.hosts] if net else [LOOPBACK] * SIZE
    options = {
        "backend": None,
        "env": ENV[wire],
        "rank_env": {rank: {"MOONCAKE_SIM_SEED": f"{SIZE * seed + rank}"} for rank in range(SIZE)},
        "namespaces": net.spread(SIZE) if net else None,
    }
    protocol = {"fabric": "fabric", "sim": "tcp"}[wire]
    began = time.monotonic()
    with harness.Crew(SIZE, **options) as crew:
        for link, address in zip(crew.links, addresses, strict=True):
            link.send((lives, (seed, protocol, address)))
        crew.board.wait_all("target", range(SIZE))
        fate = Fate(seed, crew, net)
        fate.strikes()
        fate.heals()
        crew.board.set("calm")
        for rank in fate.alive():
            name = f"done-{rank}"
            until(lambda name=name: crew.board.has(name) or fate.has_failed(), "the end", 60)
        crew.board.set("end")
        moved = crew.results(dead=fate.dead)
        assert all(moved[rank] for rank in fate.alive())
        crew.broken = bool(fate.dead)  # they cannot leave in good order
    return time.monotonic() - began


def run(wire, net=None):
    took = []
    for seed in SEEDS:
        try:
            took.append(live_through(seed, wire, net))
        except BaseException:
            print(f"again: MOONCAKE_TEST_FABRIC_SEEDS=1 MOONCAKE_TEST_SEED={seed}, wire {wire}")
            raise
    mean, most = 1000 * sum(took) / len(took), 1000 * max(took)
    print(f"{len(took)} seeds over {wire}: {mean:.0f} ms each, {most:.0f} at most")


def test_simulated_cards():
    run("sim")


@needs_cards
@needs_hosts
@pytest.mark.netns
@pytest.mark.skipif(bool(hosts.why_no_resets()), reason=str(hosts.why_no_resets()))
def test_cards_of_libfabric_over_links_that_go_and_come():
    with hosts.Hosts(SIZE, networks=1 + len(CARDS), v6=False) as net:
        run("fabric", net)
