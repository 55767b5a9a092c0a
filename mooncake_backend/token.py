"""How a new process joins a running job whose store is gone, as it is if the process that served it
has died: by a member's join_token(), in `init_method="mooncake://TOKEN"`."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch._C._distributed_c10d import HashStore, Store

SCHEME = "mooncake"
PLACE = "mooncake/join_token"  # key of the new process's own store


def rendezvous(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """torch's handler of `init_method="mooncake://TOKEN"`: a store of this process alone, which
    holds the token. Without one in the URL it is MOONCAKE_JOIN's; rank and world_size, if the
    program gives none, are RANK's and WORLD_SIZE's."""
    parts = urlparse(url)
    text = parts.netloc or os.environ.get("MOONCAKE_JOIN", "")
    if not text:
        raise ValueError(
            "init_method mooncake:// is for a process that joins a running job: give the text of "
            "a member's mooncake_backend.join_token(group), in the URL or in MOONCAKE_JOIN"
        )
    given = {name: values[0] for name, values in parse_qs(parts.query).items()}
    rank, size = (_number(given, name) for name in ("rank", "world_size"))
    store = HashStore()
    store.set(PLACE, text)
    yield store, rank, size
    raise RuntimeError("a process joins a job once: make a new one")


def _number(given: dict[str, str], name: str) -> int:
    if (number := given.get(name, "-1")) != "-1":
        return int(number)
    try:
        return int(os.environ[name.upper()])
    except (KeyError, ValueError):
        raise ValueError(
            f"init_method mooncake:// needs {name}: give it to init_process_group, or set "
            f"{name.upper()}"
        ) from None


def text_of(token: bytes) -> str:
    return base64.urlsafe_b64encode(token).decode().rstrip("=")


def token_in(store: Any) -> bytes | None:
    """The token with which the handler has made this store; None: it is another one's."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, HashStore) or not store.check([PLACE]):
        return None
    text = store.get(PLACE).decode()
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(f"not the text of a join_token(), or only a part of it: {error}") from None
