"""How often, and how soon, a rank is replaced."""

from __future__ import annotations

import random
from collections import defaultdict, deque

WINDOW = 600.0  # seconds in which replacements of a rank are counted
LEAST_PAUSE = 0.2  # seconds
MOST_PAUSE = 30.0


class Budget:
    """The replacements of each rank. limit: most of them in WINDOW."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._granted: dict[int, deque[float]] = defaultdict(deque)

    def take(self, rank: int, now: float) -> float | None:
        """Seconds until the next replacement of `rank` may start. None: its replacements are used
        up. The first one starts at once. The pause before each further one doubles, because a rank
        that dies again and again needs time more than speed. It is jittered, so that ranks that
        died together do not start together."""
        granted = self._granted[rank]
        while granted and granted[0] <= now - WINDOW:
            granted.popleft()
        if len(granted) >= self.limit:
            return None
        granted.append(now)
        if len(granted) == 1:
            return 0.0
        pause = min(MOST_PAUSE, LEAST_PAUSE * 2.0 ** min(len(granted) - 2, 30))
        return pause * random.uniform(0.5, 1.0)
