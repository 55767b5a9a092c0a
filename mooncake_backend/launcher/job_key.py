"""The key of a job under --on-death replace: a replacement needs it before it can talk to a rank.

Without a launcher's key, rank 0 makes one and hands it out through the ranks' store
(docs/environment.md, MOONCAKE_JOB_KEY). That store may be gone when a replacement starts.
"""

from __future__ import annotations

import os
import secrets
import time

from torch._C._distributed_c10d import Store

VARIABLE = "MOONCAKE_JOB_KEY"
PLACE = "mooncake-run/job-key"  # key of the launchers' store
POLL = 0.02  # seconds between two looks at the store
PATIENCE = 60.0  # seconds until the launcher of node 0 must have written the key


def agree(store: Store, node: int, size: int) -> None:
    """Puts the key that node 0's launcher has been given, or makes, into this launcher's
    environment, which its ranks inherit. A launcher that has been given a key keeps it: the ranks
    say so if keys differ. RuntimeError if node 0's launcher writes none."""
    given = os.environ.get("MOONCAKE_JOB_KEY")
    if node == 0:
        own = given or secrets.token_hex(32)
        if size > 1:
            # A key that users hand out themselves is not written anywhere.
            store.set(PLACE, "" if given else own)
        os.environ[VARIABLE] = own
        return
    end = time.monotonic() + PATIENCE
    while not store.check([PLACE]):
        if time.monotonic() > end:
            raise RuntimeError(
                f"mooncake-run: node {node}: the launcher of node 0 has written no job key within "
                f"{PATIENCE:.0f} s: start the launchers of all nodes with --on-death replace"
            )
        time.sleep(POLL)
    if not given and (key := store.get(PLACE).decode()):
        os.environ[VARIABLE] = key
