"""Links of network cards that go down and come back while a transfer engine moves bytes over them:
libfabric's provider over TCP, a card for each of two links between two hosts."""

from __future__ import annotations

import time

import harness
import hosts
import pytest
from fabric_crew import moves_until_told
from harness import until
from test_transfer_fabric import needs_cards, needs_hosts

CARDS = (1, 2)  # their networks; network 0 is for what the engines tell each other
FAILING = 2
MOVED = 4 << 20  # over a card: so it works
ENV = {
    "MOONCAKE_FABRIC_REQUIRE": "tcp;ofi_rxm",
    "MC_TE_FILTERS": ",".join(f"eth{card}" for card in CARDS),
    "MOONCAKE_TRANSPORTS": "fabric",
}

pytestmark = [pytest.mark.netns, needs_cards, needs_hosts]


class Links:
    """Two hosts, and how much each card of the second one has been sent."""

    def __init__(self, net: hosts.Hosts, crew: harness.Crew) -> None:
        self.net, self.crew = net, crew

    def sent(self, card: int) -> int:
        text = self.net[1].run("cat", f"/sys/class/net/eth{card}/statistics/tx_bytes")
        return int(text)

    def carries(self, card: int) -> None:
        """Waits until it does."""
        before = self.sent(card)
        until(lambda: self.sent(card) > before + MOVED, f"bytes over eth{card}", 60)

    def goes_on(self, rounds: int) -> None:
        """Waits for so many more transfers, all of which were good."""
        before = self.rounds()
        until(lambda: self.rounds() >= before + rounds, "transfers that go on", 60)

    def rounds(self) -> int:
        return int(self.crew.board.wait("rounds", 60))

    def switch(self, where: str, up: bool) -> None:
        if where == "unplugged":
            self.net.link(1, up, network=FAILING)
        else:
            host = {"down at the target": 0, "down at the initiator": 1}[where]
            self.net.set_link(host, up, network=FAILING)


@pytest.fixture
def links():
    with hosts.Hosts(2, networks=1 + len(CARDS), v6=False) as net:
        addresses = [host.v4[0] for host in net.hosts]
        options = {"backend": None, "namespaces": net.spread(2), "env": ENV}
        with harness.starting(2, moves_until_told, addresses, **options) as crew:
            yield Links(net, crew)
            crew.board.set("enough")
            assert crew.results()[1] > 0


@pytest.mark.parametrize("where", ["down at the target", "down at the initiator", "unplugged"])
def test_transfers_go_on_without_a_link_and_use_it_when_it_is_back(links, where):
    for card in CARDS:
        links.carries(card)
    for _ in range(2):
        links.switch(where, False)
        links.goes_on(20)
        links.switch(where, True)
        links.carries(FAILING)
        links.goes_on(5)


def test_what_a_link_held_back_for_two_seconds_corrupts_nothing(links):
    for card in CARDS:
        links.carries(card)
    links.switch("unplugged", False)
    gone = time.monotonic()
    links.goes_on(20)
    until(lambda: time.monotonic() > gone + 2, "two seconds")
    links.switch("unplugged", True)
    links.carries(FAILING)
    links.goes_on(20)
