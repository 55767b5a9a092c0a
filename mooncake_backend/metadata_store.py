"""The values of the metadata server, and the limits of their memory."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from types import TracebackType

MOST_KEY_BYTES = 4096
MOST_VALUE_BYTES = 1 << 20  # as in Mooncake's server
MOST_STORED_BYTES = 256 << 20  # of keys and values together, with ENTRY_BYTES for each pair
MOST_MOVING_BYTES = 64 << 20  # of large values that connections are sending or receiving
ENTRY_BYTES = 256  # approximate overhead of a pair in Python

clock = time.monotonic


class Budget:
    """Bytes in use, counted by the client's address. One address may use half of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._all = 0
        self._by_owner: Counter[str] = Counter()

    def change(self, owner: str, count: int, freed: int = 0) -> bool:
        """Adds `count` bytes for the owner, unless a limit forbids it. `freed` of them replace
        bytes that are still counted. Returns whether they were added."""
        added = count - freed
        fits = self._all + added <= self._most
        fits = fits and self._by_owner[owner] + added <= self._most // 2
        if added > 0 and not fits:
            return False
        self._count(owner, count)
        return True

    def free(self, owner: str, count: int) -> None:
        self._count(owner, -count)

    def _count(self, owner: str, count: int) -> None:
        self._all += count
        self._by_owner[owner] += count
        if self._by_owner[owner] == 0:
            del self._by_owner[owner]


class Lease:
    """A context manager: holds a request's bytes of a budget, and frees them at its end."""

    def __init__(self, budget: Budget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._held = 0

    def grow(self, count: int) -> bool:
        granted = self._budget.change(self._owner, count)
        self._held += count if granted else 0
        return granted

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._budget.free(self._owner, self._held)


@dataclass(frozen=True)
class Value:
    data: bytes
    owner: str  # address of the client that wrote it
    cost: int
    written: float  # by clock(): when a client last gave this value

    @property
    def age(self) -> int:
        """Seconds since a client last gave this value."""
        return int(clock() - self.written)

    @property
    def tag(self) -> str:
        """The entity tag of RFC 9110, without its quotes."""
        return hashlib.sha256(self.data).hexdigest()[:32]


@dataclass(frozen=True)
class Answer:
    status: int
    text: str


class Store:
    """Keys and values. A key that contains "rpc_meta" names an engine. A request replaces its value
    only if it names the present value by its tag."""

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}
        self._stored = Budget(MOST_STORED_BYTES)

    def get(self, key: str) -> Value | None:
        return self._values.get(key)

    def put(self, key: str, data: bytes, owner: str, tags: Collection[str] | None) -> Answer:
        """`tags`: values of the header If-Match; None if the request has no such header."""
        known = self._values.get(key)
        if mismatch := self._check(known, tags):
            return mismatch
        if known is not None and known.data == data:
            self._values[key] = replace(known, written=clock())
            return Answer(200, "metadata unchanged")
        if known is not None and tags is None and "rpc_meta" in key:
            return Answer(400, "Duplicate rpc_meta key not allowed")
        cost = ENTRY_BYTES + len(key.encode("utf-8", "surrogatepass")) + len(data)
        freed = known.cost if known is not None and known.owner == owner else 0
        if not self._stored.change(owner, cost, freed):
            return Answer(507, "the metadata server is full: delete keys, or start it again")
        if known is not None:
            self._stored.free(known.owner, known.cost)
        self._values[key] = Value(data, owner, cost, clock())
        return Answer(200, "metadata updated")

    def delete(self, key: str, tags: Collection[str] | None) -> Answer:
        known = self._values.get(key)
        if mismatch := self._check(known, tags):
            return mismatch
        if known is None:
            return Answer(404, "metadata not found")
        self._stored.free(known.owner, known.cost)
        del self._values[key]
        return Answer(200, "metadata deleted")

    @staticmethod
    def _check(known: Value | None, tags: Collection[str] | None) -> Answer | None:
        if tags is None or (known is not None and ("*" in tags or known.tag in tags)):
            return None
        return Answer(412, "metadata has another value")
