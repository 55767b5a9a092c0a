"""The launcher's uses of torch.distributed.elastic beyond its documented classes. No other file of
the launcher uses a private name of torch. Checked in torch 2.8.0, 2.11.0 and 2.15.0.

agent.py overrides SimpleElasticAgent._start_workers, _monitor_workers, _exit_barrier, _shutdown.
These are documented in torch's manual ("Extending the Agent"), underscores included.
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
    """launch_agent() looks its agent up by this name; there is no other way to set the class."""
    if not hasattr(api, "LocalElasticAgent"):
        raise RuntimeError("mooncake-run does not know how this version of torch makes its agent")
    api.LocalElasticAgent = make  # type: ignore[misc,assignment]


def processes(agent: LocalElasticAgent) -> dict[int, Popen[bytes]]:
    """The processes by local rank; empty before the first start. Only the agent's `_pcontext` is
    private: the handlers and their `proc` have public names."""
    context = agent._pcontext
    if context is None:
        return {}
    assert isinstance(context, SubprocessContext), type(context)
    return {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}


def stop_heartbeats(rendezvous: RendezvousHandler) -> None:
    """Stops the heartbeats of a DynamicRendezvousHandler: when the store is gone, each of them logs
    a whole C++ stack. Waits for a heartbeat under way."""
    stop = getattr(rendezvous, "_stop_heartbeats", None)
    if stop is not None:
        stop()


def error_files(agent: LocalElasticAgent) -> dict[int, Any]:
    """By local rank, the file to which a process writes its exception."""
    context = agent._pcontext
    return {} if context is None else context.error_files
