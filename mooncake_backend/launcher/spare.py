"""The program of a spare: imports the modules that a rank imports, waits, and becomes a rank.

mooncake-run starts it by its path (spares.py), because the ranks' folder may come first where
Python looks for modules. The link to the launcher carries one message each way.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

MOST_BYTES = 1 << 20  # of a message
MOST_CHARACTERS = 500  # of an error
# The modules that the first use of a group imports.
MODULES = ("torch.distributed", "mooncake_backend.pg", "mooncake_backend.objects")
PR_SET_PDEATHSIG = 1


def main(link: socket.socket, wanted: Sequence[str], arguments: Sequence[str]) -> None:
    """`wanted`: the user's modules. `arguments`: what follows the interpreter in a rank's
    command."""
    # An import may take long and does not read the link. Afterwards the end of the link ends this
    # process: a rank must outlive its launcher, as one that was started does.
    _die_with_parent(signal.SIGKILL)
    inherited = dict(os.environ)
    _set_path(*program(arguments))
    error = load(wanted)
    _die_with_parent(0)
    link.send(json.dumps({"error": error[:MOST_CHARACTERS]}).encode())
    if error:
        sys.exit(1)
    order, files, _, _ = socket.recv_fds(link, MOST_BYTES, 2)
    if not order:
        os._exit(0)  # the launcher has ended
    link.close()
    become(json.loads(order), files, inherited)


def load(wanted: Sequence[str]) -> str:
    """Imports the modules, and loads the extension. Returns why it cannot, or ""."""
    name = ""
    try:
        for name in (*MODULES, *wanted):
            importlib.import_module(name)
        name = "mooncake_backend._C"
        importlib.import_module("mooncake_backend.extension").load()
    except BaseException as error:  # a module may call sys.exit()
        return f"cannot import {name}: {type(error).__name__}: {error}"
    return ""


def become(order: dict[str, Any], files: Sequence[int], inherited: dict[str, str]) -> None:
    """Runs the command with the environment and the files, stdout and stderr, of a rank. Variables
    that imported modules have set stay, as in a process that imports them now."""
    given = order["environment"]
    os.environ.update({name: given[name] for name in given if inherited.get(name) != given[name]})
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    sys.orig_argv[:] = order["command"]
    run(order["command"][1:])


def run(arguments: Sequence[str]) -> None:
    """Runs the program as Python does with these arguments, in a new __main__."""
    is_module, (name, *rest) = program(arguments)
    sys.argv[:] = ["-m" if is_module else name, *rest]
    main = sys.modules["__main__"] = ModuleType("__main__")
    scope = vars(main)
    scope["__builtins__"] = builtins
    try:
        if is_module:
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # as python -m does
        elif is_package(name):
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        else:
            path = os.path.join(os.getcwd(), name)
            loader = SourceFileLoader("__main__", path)
            scope.update(__file__=path, __cached__=None, __loader__=loader)
            exec(loader.source_to_code(loader.get_data(path), path), scope)
    except Exception as error:
        # Python prints a traceback that begins in the program.
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_globals is globals():
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.exit(1)


def program(arguments: Sequence[str]) -> tuple[bool, Sequence[str]]:
    """Whether torchrun's arguments for Python name a module; its name or the script, and the
    program's arguments."""
    rest = arguments[1:] if arguments[0] == "-u" else arguments
    return (True, rest[1:]) if rest[0] == "-m" else (False, rest)


def is_package(path: str) -> bool:
    """A folder or an archive with a __main__.py."""
    return os.path.isdir(path) or zipfile.is_zipfile(path)


def _set_path(is_module: bool, words: Sequence[str]) -> None:
    """Python has put the folder of this file at the front of sys.path. It puts there for a rank:
    the current folder for a module, the script's folder, or the package."""
    if getattr(sys.flags, "safe_path", False):  # since Python 3.11
        return
    script = words[0]
    if is_module:
        sys.path[0] = os.getcwd()
    else:
        script = os.path.join(os.getcwd(), script)
        sys.path[0] = script if is_package(script) else os.path.dirname(os.path.realpath(script))


def _die_with_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


if __name__ == "__main__":
    names = [name for name in sys.argv[2].split(",") if name]
    main(socket.socket(fileno=int(sys.argv[1])), names, sys.argv[3:])
