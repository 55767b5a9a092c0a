"""What the launcher needs of torch.distributed.elastic beyond its documented classes; nothing else
in this package uses a private name of torch. Read in torch 2.8.0, 2.11.0 and 2.15.0.

Documented, underscores and all ("Extending the Agent" in torch's manual), and overridden in
agent.py: SimpleElasticAgent._start_workers, _monitor_workers, _exit_barrier, _shutdown.
"""

from __future__ import annotations

from collections.abc import Callable
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher import api


def set_agent(make: Callable[..., LocalElasticAgent]) -> None:
    """launch_agent() makes its agent by this name, and has no other way to be told of a class."""
    if not hasattr(api, "LocalElasticAgent"):
        raise RuntimeError("mooncake-run does not know how this version of torch makes its agent")
    api.LocalElasticAgent = make  # type: ignore[misc,assignment]


def processes(agent: LocalElasticAgent) -> dict[int, Popen[bytes]]:
    """By local rank; empty before the first start. The handlers and their `proc` have public names,
    the agent's way to them has not."""
    context = agent._pcontext
    if context is None:
        return {}
    assert isinstance(context, SubprocessContext), type(context)
    return {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}


def stop_heartbeats(rendezvous: RendezvousHandler) -> None:
    """Of DynamicRendezvousHandler: each of them logs the whole stack of C++ when the store is gone.
    Waits for the one under way."""
    stop = getattr(rendezvous, "_stop_heartbeats", None)
    if stop is not None:
        stop()


def error_files(agent: LocalElasticAgent) -> dict[int, Any]:
    """By local rank: where a process writes its exception."""
    context = agent._pcontext
    return {} if context is None else context.error_files
