"""python -m mooncake.ep.deepep PROGRAM ARGS: runs a Python program that imports deep_ep, with the
Buffer of mooncake.ep. With -m MODULE ARGS it runs a module, as Python does.

A folder of this package has the module `deep_ep`. It is put on PYTHONPATH for the program and the
processes that it starts, and only for them.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "on_path"
USAGE = "usage: python -m mooncake.ep.deepep [-m] PROGRAM [ARGUMENT ...]"


def main(arguments: list[str]) -> None:
    is_module = arguments[:1] == ["-m"]
    program, *given = arguments[is_module:] or ["-h"]
    if program.startswith("-"):
        sys.exit(f"{__doc__}\n{USAGE}")
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), inherited]))
    # Like Python: first the program's folder, or with -m the current one, then PYTHONPATH.
    first = sys.path[0] if is_module else str(Path(program).resolve().parent)
    sys.path[:1] = [first, str(FOLDER)]
    sys.argv = [program, *given]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif Path(program).is_file():
        runpy.run_path(program, run_name="__main__")
    else:
        sys.exit(f"there is no file {program}\n{USAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])
