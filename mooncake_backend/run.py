"""mooncake-run, also python -m mooncake_backend.run: torchrun, but survivors of a death go on.

It uses torchrun's parser, agent and rendezvous. Only its reaction to a rank's death differs. See
docs/launching.md.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial

from torch.distributed.argparse_util import env
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import get_args_parser, run

from mooncake_backend.launcher import torch_parts
from mooncake_backend.launcher.agent import ContinuingAgent, RestartingAgent
from mooncake_backend.launcher.endings import Journal

PROGRAM = "mooncake-run"
AGENTS = {"continue": ContinuingAgent, "restart": RestartingAgent}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if wrong := _wrong(given):
        parser.exit(2, f"{PROGRAM}: error: {wrong}\n")
    if given.run_path:
        given.run_path, given.module = False, True
        given.training_script_args.insert(0, given.training_script)
        given.training_script = "mooncake_backend.launcher.run_path"
    if given.standalone and given.local_addr is None and not _has_a_name():
        given.local_addr = "127.0.0.1"
    journal = Journal()
    torch_parts.set_agent(partial(AGENTS[given.on_death], journal))
    try:
        record(run)(given)
        return 0
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    except SignalException as error:
        print(
            f"{PROGRAM}: {error.sigval.name}: all ranks of this host are stopped", file=sys.stderr
        )
        return 1
    finally:
        if journal.endings and journal.is_spokesman:
            print(journal.text(), file=sys.stderr, flush=True)


def _parser() -> ArgumentParser:
    parser = get_args_parser()
    parser.prog = PROGRAM
    parser.description = "torchrun, under which the survivors of a rank's death go on."
    parser.add_argument(
        "--on-death",
        "--on_death",
        action=env,
        type=str,
        default="continue",
        metavar="{continue,restart,replace}",
        help="Reaction to a rank's death. continue: the other ranks go on, and the job succeeds if "
        "they do. restart: as torchrun, ends all ranks and starts them again, up to "
        "--max-restarts times. replace: a new process takes the rank's place; not available yet, "
        "it comes with rejoining.",
    )
    return parser


def _wrong(given: Namespace) -> str | None:
    if given.on_death == "replace":
        return "--on-death replace is not available yet: it comes with rejoining"
    if given.on_death not in AGENTS:
        return f"--on-death must be continue or restart, not {given.on_death!r}"
    if given.on_death == "continue" and given.max_restarts:
        return "--max-restarts is for --on-death restart: continue starts no rank again"
    try:
        tempfile.gettempdir()
    except OSError as error:
        return f"{error}: set TMPDIR to a folder that can be written"
    return None


def _has_a_name() -> bool:
    """Whether the name that torch gives the ranks as this host's leads to an address."""
    try:
        socket.getaddrinfo(socket.getfqdn(), None)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
