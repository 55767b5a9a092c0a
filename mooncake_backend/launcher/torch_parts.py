"""The launcher's uses of torch.distributed.elastic beyond its documented classes. No other file of
the launcher uses a private name of torch. Checked in torch 2.8.0, 2.11.0 and 2.15.0.

agent.py overrides SimpleElasticAgent._start_workers, _monitor_workers, _exit_barrier, _shutdown.
These are documented in torch's manual ("Extending the Agent"), underscores included.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    SubprocessHandler,
    get_subprocess_handler,
)
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher import api

from mooncake_backend.launcher import ends

log = logging.getLogger(__name__)


def set_agent(make: Callable[..., LocalElasticAgent]) -> None:
    """launch_agent() looks its agent up by this name; there is no other way to set the class."""
    if not hasattr(api, "LocalElasticAgent"):
        raise RuntimeError("mooncake-run does not know how this version of torch makes its agent")
    api.LocalElasticAgent = make  # type: ignore[misc,assignment]


def processes(agent: LocalElasticAgent) -> dict[int, Popen[bytes]]:
    """The processes by local rank; empty before the first start. Only the agent's `_pcontext` is
    private: the handlers and their `proc` have public names."""
    if agent._pcontext is None:
        return {}
    return {rank: handler.proc for rank, handler in _context(agent).subprocess_handlers.items()}


def stop_heartbeats(rendezvous: RendezvousHandler) -> None:
    """Stops the heartbeats of a DynamicRendezvousHandler: when the store is gone, each of them logs
    a whole C++ stack. Waits for a heartbeat under way."""
    stop = getattr(rendezvous, "_stop_heartbeats", None)
    if stop is not None:
        stop()


def error_files(agent: LocalElasticAgent) -> dict[int, str]:
    """By local rank, the file to which a process writes its exception. Empty if the ranks have no
    files (--log-dir /dev/null)."""
    files = {} if agent._pcontext is None else agent._pcontext.error_files
    return {rank: str(file) for rank, file in files.items() if str(file) != os.devnull}


def program(agent: LocalElasticAgent) -> tuple[list[str], dict[str, str]]:
    """The command of the first rank of this host, and the variables that are the same in all ranks
    of the host."""
    context = _context(agent)
    first = min(context.envs)
    same = set.intersection(*[set(variables.items()) for variables in context.envs.values()])
    return [str(context.entrypoint), *context.args[first]], {**os.environ, **dict(same)}


class Replacement(NamedTuple):
    """A process that start_again() has started. tails: readers that copy its output to the
    launcher's (--tee); stop() returns once they have copied all of it."""

    pid: int
    error_file: str
    tails: list[TailLog]
    was_spare: bool


# Spares.become().
Become = Callable[..., "Popen[bytes] | None"]


class _SpareHandler(SubprocessHandler):
    """Starts a process only if there is no spare that becomes one."""

    def __init__(self, become: Become, **given: Any) -> None:
        self._become = become
        super().__init__(**given)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        spare = self._become(args, env, self._stdout, self._stderr)
        self.was_spare = spare is not None
        return super()._popen(args, env) if spare is None else spare


def start_again(
    agent: LocalElasticAgent,
    local_rank: int,
    number: int,
    added: dict[str, str],
    become: Become | None = None,
) -> Replacement:
    """Starts a process in the place of the one of `local_rank`, which has ended, as
    SubprocessContext._start does, or makes a spare this process if `become` has one. It is the
    rank's replacement `number`. Its environment is its predecessor's and `added`; its files are in
    a folder of its own. OSError if the system starts no process; then, and after any other
    exception, there is none."""
    context = _context(agent)

    def moved(path: str) -> str:
        return replacement_path(path, number)

    environment = {**context.envs[local_rank], **added}
    if error_file := environment.get("TORCHELASTIC_ERROR_FILE", ""):
        environment["TORCHELASTIC_ERROR_FILE"] = moved(error_file)
    stdout, stderr = moved(context.stdouts[local_rank]), moved(context.stderrs[local_rank])
    for path in (stdout, stderr, moved(error_file)):
        if path and path != os.devnull:
            Path(path).parent.mkdir(exist_ok=True)
    more: dict[str, Any] = {}
    if "numa_options" in inspect.signature(get_subprocess_handler).parameters:  # since torch 2.9
        more["numa_options"] = getattr(context, "_numa_options", None)
    make = get_subprocess_handler if become is None else partial(_SpareHandler, become)
    handler = make(
        entrypoint=str(context.entrypoint),
        args=context.args[local_rank],
        env=environment,
        stdout=stdout,
        stderr=stderr,
        local_rank_id=local_rank,
        **more,
    )
    context.subprocess_handlers[local_rank] = handler
    tails = []
    try:
        for tail in _tails(context):
            if local_rank in tail._log_files:
                tails.append(_tail(tail, local_rank, moved(tail._log_files[local_rank])).start())
    except Exception as error:  # a version of torch that is not known here
        log.warning(
            "mooncake-run: the new process of local rank %d writes to its log files only: %r",
            local_rank,
            error,
        )
    was_spare = getattr(handler, "was_spare", False)
    return Replacement(handler.proc.pid, moved(error_file), tails, was_spare)


def replacement_path(path: str, number: int) -> str:
    """The file of a rank's replacement `number`: in a folder beside the first process's,
    "2.1/error.json" beside "2/error.json". No path, and the null device, stay."""
    if not path or path == os.devnull:
        return path
    file = Path(path)
    return str(file.parent.with_name(f"{file.parent.name}.{number}") / file.name)


def code_if_ended(agent: LocalElasticAgent, local_rank: int) -> int | None:
    """ends.code_if_ended() of a rank's process."""
    return ends.code_if_ended(_context(agent).subprocess_handlers[local_rank].proc)


def kill(agent: LocalElasticAgent, local_rank: int) -> None:
    """Kills the process group of a process that has not been reaped."""
    with suppress(ProcessLookupError, PermissionError):
        _context(agent).subprocess_handlers[local_rank].close(signal.SIGKILL)


def _context(agent: LocalElasticAgent) -> SubprocessContext:
    context = agent._pcontext
    assert isinstance(context, SubprocessContext), type(context)
    return context


def _tails(context: SubprocessContext) -> list[TailLog]:
    tails = getattr(context, "_tail_logs", None)
    if tails is None:  # torch 2.8
        tails = [getattr(context, name, None) for name in ("_stdout_tail", "_stderr_tail")]
    return [tail for tail in tails if tail is not None]


def _tail(like: TailLog, local_rank: int, path: str) -> TailLog:
    more: dict[str, Any] = {}
    if hasattr(like, "_log_line_filter"):  # since torch 2.9
        more["log_line_filter"] = like._log_line_filter
    return TailLog(
        like._name,
        {local_rank: path},
        like._dst,
        like._log_line_prefixes,
        like._interval_sec,
        **more,
    )
