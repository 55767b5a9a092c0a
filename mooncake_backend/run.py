"""mooncake-run, also python -m mooncake_backend.run: torchrun, but survivors of a death go on.

It uses torchrun's parser, agent and rendezvous. Only its reaction to a rank's death differs. See
docs/launching.md.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial

from torch.distributed.argparse_util import env
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import get_args_parser, run

from mooncake_backend.launcher import torch_parts
from mooncake_backend.launcher.agent import ContinuingAgent, RestartingAgent
from mooncake_backend.launcher.budget import Budget
from mooncake_backend.launcher.endings import Journal
from mooncake_backend.launcher.replacing import ReplacingAgent

PROGRAM = "mooncake-run"
REACTIONS = ("continue", "restart", "replace")
MAX_REPLACEMENTS = 3


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
    torch_parts.set_agent(_agent(given, journal))
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
        "--max-restarts times. replace: as continue, and the launcher of the rank's host starts a "
        "new process for it.",
    )
    parser.add_argument(
        "--max-replacements",
        "--max_replacements",
        action=env,
        type=int,
        default=None,
        metavar="N",
        help="With --on-death replace: most replacements of one rank in ten minutes. A rank that "
        f"dies once more stays dead. {MAX_REPLACEMENTS} if not given.",
    )
    parser.add_argument(
        "--spares",
        action=env,
        type=int,
        default=0,
        metavar="N",
        help="With --on-death replace: processes of each host that have imported torch and this "
        "package, and wait to become the replacement of a rank.",
    )
    parser.add_argument(
        "--spare-preload",
        "--spare_preload",
        action=env,
        type=str,
        default="",
        metavar="MODULE[,MODULE]",
        help="Modules that spares import, too.",
    )
    return parser


def _agent(given: Namespace, journal: Journal) -> Callable[..., LocalElasticAgent]:
    if given.on_death == "restart":
        return partial(RestartingAgent, journal)
    if given.on_death == "continue":
        return partial(ContinuingAgent, journal)
    limit = given.max_replacements
    return partial(
        ReplacingAgent,
        journal,
        budget=Budget(MAX_REPLACEMENTS if limit is None else limit),
        spares=given.spares,
        preload=given.spare_preload,
    )


def _wrong(given: Namespace) -> str | None:
    if given.on_death not in REACTIONS:
        return f"--on-death must be continue, restart or replace, not {given.on_death!r}"
    if given.on_death != "restart" and given.max_restarts:
        return (
            f"--max-restarts is for --on-death restart: {given.on_death} does not start the ranks "
            "again"
        )
    if given.on_death != "replace" and given.max_replacements is not None:
        return "--max-replacements is for --on-death replace"
    if given.max_replacements is not None and given.max_replacements < 0:
        return f"--max-replacements must be 0 or more, not {given.max_replacements}"
    if wrong := _wrong_spares(given):
        return wrong
    try:
        tempfile.gettempdir()
    except OSError as error:
        return f"{error}: set TMPDIR to a folder that can be written"
    return None


def _wrong_spares(given: Namespace) -> str | None:
    if given.spares < 0:
        return f"--spares must be 0 or more, not {given.spares}"
    if given.spares == 0:
        return "--spare-preload needs --spares" if given.spare_preload else None
    if given.on_death != "replace":
        return "--spares is for --on-death replace"
    if given.no_python:
        return "--spares needs a Python program, and --no-python starts any: give up one of them"
    if getattr(given, "numa_binding", None):  # since torch 2.9
        return "--spares cannot go with --numa-binding: a spare would be bound to no node"
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
