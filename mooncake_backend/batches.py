"""Batches of messages: torch.distributed.batch_isend_irecv()."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from mooncake_backend._C import MooncakeBackend


def are_one_work(backend: MooncakeBackend) -> bool:
    """The backend's `supports_coalescing`. Yes: what is called in a block of _coalescing_manager()
    ends with one work. batch_isend_irecv() alone asks for it, before its first message, and gets a
    no: each message has a work of its own then, as callers expect who look up in the list of works
    which of their peers failed. So torch posts one message after the other, and a wrong one would
    leave those before it posted. Therefore all of them are checked here."""
    caller = sys._getframe(1)
    if caller.f_code.co_name != "batch_isend_irecv":
        return True
    for one in caller.f_locals["p2p_op_list"]:
        backend.check_message(one.op is dist.isend, one.tensor, one.group_peer, one.tag)
    return False
