"""Prints which network cards are near which memory of this host, as an engine sees them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mooncake_backend.command_line import parse_flags

FAILED = 1
CUSTOM = "MC_CUSTOM_TOPO_JSON"


class DumpError(RuntimeError):
    """The error text that is printed instead of a topology."""


def dump(options: argparse.Namespace) -> str:
    from mooncake_backend.engine import TransferEngine

    if options.backend == "tent":
        raise DumpError("there is no backend tent: --backend=te")
    chosen = options.custom_topo_json
    if chosen is None and options.use_custom_topo:
        chosen = os.environ.get(CUSTOM) or None
        if chosen is None:
            raise DumpError(f"--use-custom-topo needs a file in {CUSTOM}, which is not set")
    if chosen is None:
        # The cards as discovered: an engine's variables must not change them.
        os.environ.pop(CUSTOM, None)
    else:
        # An engine only warns of a file that it cannot read, and then uses the discovered cards.
        try:
            json.loads(Path(chosen).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DumpError(f"the topology in {chosen} cannot be read: {error}") from None
        os.environ[CUSTOM] = chosen
    mode = "discover" if chosen is None else f"custom ({chosen})"
    topology = TransferEngine().get_local_topology(options.device_name or None)
    return f"Local topology [te/{mode}]: {topology}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="transfer_engine_topology_dump", description=__doc__)
    add = parser.add_argument
    add("--device-name", default="", help="only these cards, separated by commas")
    add("--backend", choices=["auto", "te", "tent"], default="auto", help="only te exists")
    add("--use-custom-topo", action="store_true", help=f"the file that {CUSTOM} names")
    add("--custom-topo-json", metavar="PATH", help="this file")
    try:
        print(dump(parse_flags(parser, arguments)))
    except DumpError as error:
        print(f"transfer_engine_topology_dump: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
