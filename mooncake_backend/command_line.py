"""Command-line flags in the style of Mooncake's tools, with one dash or two."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def parse_flags(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parses `-mode=target` and `-mode target` like `--mode=target`. None: sys.argv."""
    given = sys.argv[1:] if arguments is None else arguments
    return parser.parse_args([_with_two_dashes(parser, argument) for argument in given])


def _with_two_dashes(parser: argparse.ArgumentParser, argument: str) -> str:
    flag = "-" + argument.partition("=")[0]
    is_known = any(flag in action.option_strings for action in parser._actions)
    return f"-{argument}" if flag.startswith("--") and is_known else argument
