"""python -m mooncake_backend doctor: checks which parts work on this machine."""

from __future__ import annotations

import argparse
import sys

from mooncake_backend.doctor import examine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mooncake_backend")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="check this installation and this machine")
    doctor.add_argument("--quick", action="store_true", help="do not start the two-rank trial")
    doctor.add_argument(
        "--peer", metavar="HOST:PORT", help="a transfer engine: which wire leads to it from here"
    )
    given = parser.parse_args()
    return examine(trial=not given.quick, peer=given.peer)


if __name__ == "__main__":
    sys.exit(main())
