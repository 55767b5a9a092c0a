"""python -m mooncake.ep.deepep PROGRAM ARGS: runs a Python program that imports deep_ep, with the
Buffer of mooncake.ep. The program and the processes that it starts find `deep_ep` in a folder of
this package, which stands on PYTHONPATH for them; nothing else does."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "on_path"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mooncake.ep.deepep",
        description="Runs a program that imports deep_ep, with the Buffer of mooncake.ep.",
    )
    parser.add_argument("program", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what it is given")
    given = parser.parse_args(arguments)
    program = Path(given.program)
    if not program.is_file():
        parser.error(f"there is no file {program}")
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), inherited]))
    # As `python PROGRAM` has it: the program's folder first, then PYTHONPATH.
    sys.path[:] = [str(program.resolve().parent), str(FOLDER), *sys.path[1:]]
    sys.argv = [given.program, *given.arguments]
    runpy.run_path(given.program, run_name="__main__")


if __name__ == "__main__":
    main()
