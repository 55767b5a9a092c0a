"""A small soak: tests/soak.py itself runs for as long as one likes."""

from __future__ import annotations

import pytest
import soak

# Growth for each cycle that is no leak of one thing a cycle. The connection to a dead rank is
# forgotten a moment after its end, so counts go up and down. Threads keep freed blocks for
# themselves, and lists of former processes take 300 bytes of the heap.
LIMITS = {
    "descriptors": 0.2,
    "threads": 0.2,
    "mappings": 0.2,
    "python objects": 2,
    "heap bytes": 4096,
    "RssAnon KiB": 16,
    "RssShmem KiB": 16,
    "arena KiB": 4,
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("transports", "keeper", "elastic"), [("shm", 3, False), ("tcp", 0, True)], ids=["shm", "tcp"]
)
def test_replacements_leave_nothing_behind(transports, keeper, elastic):
    plan = soak.Plan(transports=transports, keeper=keeper, elastic=elastic, together=True)
    found = {growth.name: growth for growth in soak.run(plan)}
    grown = {name: found[name] for name, limit in LIMITS.items() if found[name].per_cycle > limit}
    assert not grown, grown


def test_a_leak_is_seen():
    """Of one thing in each cycle, from a warm-up with more of it on."""
    facts = [
        (cycle, {"descriptors": 30 if cycle < 8 else 20 + cycle, "threads": 9 + cycle % 2})
        for cycle in range(31)
    ]
    found = {growth.name: growth for growth in soak.growth_of(facts, soak.Plan())}
    assert found["descriptors"].per_cycle == pytest.approx(1, abs=0.1)
    assert found["threads"].per_cycle <= LIMITS["threads"]
