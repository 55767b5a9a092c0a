"""Defects of the proxy's kernels, for mutants.py: name, file, text, and its replacement."""

from __future__ import annotations

PROXY = "proxy/proxy.cuh"
MUTANTS = [
    (
        "the valid word is relaxed",
        PROXY,
        "storeReleaseSystem(&slot.valid",
        "storeRelaxedSystem(&slot.valid",
    ),
    (
        "the valid word is written first",
        PROXY,
        "  slot.sourceRegion = what.sourceRegion;\n",
        "  slot.sourceRegion = what.sourceRegion;\n"
        "  storeReleaseSystem(&slot.valid, ticket.number + 1);\n",
    ),
    (
        "the check for a full ring is left out",
        PROXY,
        "while (ticket.number - loadAcquireDevice(&tickets.takenSeen) < proxy.slots)",
        "while (loadAcquireDevice(&tickets.takenSeen) != ~0u)",
    ),
    (
        "a ring has a slot too many",
        PROXY,
        "(&tickets.takenSeen) < proxy.slots)",
        "(&tickets.takenSeen) <= proxy.slots)",
    ),
    (
        "the host's count of free slots is read relaxed",
        PROXY,
        "loadAcquireSystem(&counts.taken)",
        "loadRelaxedSystem(&counts.taken)",
    ),
    (
        "the count of free slots is handed on relaxed",
        PROXY,
        "storeReleaseDevice(&tickets.takenSeen",
        "storeRelaxedDevice(&tickets.takenSeen",
    ),
    (
        "two threads have one slot",
        PROXY,
        "if (found == ticket.number) return true;",
        "return true;",
    ),
    (
        "a wait for a slot ignores the ring's end",
        PROXY,
        "    if (loadAcquireSystem(&counts.ended)) {\n"
        "      ticket.result = ProxyResult::kEnded;\n"
        "      return true;\n    }\n",
        "",
    ),
    (
        "a wait for a command ignores the ring's end",
        PROXY,
        "    if (!loadAcquireSystem(&counts.ended)) return false;\n    // It",
        "    return false;\n    // It",
    ),
    (
        "a wait for a command ends one too early",
        PROXY,
        "awaitCompleted(proxy, peer, number + 1)",
        "awaitCompleted(proxy, peer, number)",
    ),
    (
        "the count of completed commands is read relaxed",
        PROXY,
        "loadAcquireSystem(&counts.completed)",
        "loadRelaxedSystem(&counts.completed)",
    ),
    (
        "counts are compared without a sign",
        PROXY,
        "int32_t(loadAcquireSystem(&counts.completed) - count) < 0",
        "loadAcquireSystem(&counts.completed) < count",
    ),
    (
        "a signal is read relaxed",
        PROXY,
        "loadAcquireSystem(signal) < count",
        "loadRelaxedSystem(signal) < count",
    ),
    (
        "a wait for a signal ignores the ring's end",
        PROXY,
        "    if (!loadAcquireSystem(&proxy.counts[peer].ended)) return false;\n",
        "    return false;\n",
    ),
    (
        "all peers have one ring",
        PROXY,
        "size_t(peer) * proxy.slots + ",
        "",
    ),
    (
        "a command that came at the ring's end counts as lost",
        PROXY,
        "if (!hasCompleted()) result = ProxyResult::kEnded;",
        "result = ProxyResult::kEnded;",
    ),
    (
        "the host's memory is read at every look",
        PROXY,
        "    if (time < next) continue;\n",
        "",
    ),
]
