"""Batches of messages: torch.distributed.batch_isend_irecv()."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from mooncake_backend._C import MooncakeBackend


def are_one_work(backend: MooncakeBackend) -> bool:
    """The backend's `supports_coalescing`: whether a block of _coalescing_manager() ends with one
    work. The answer is no for batch_isend_irecv() only, which reads this before its first message.
    Then each message has its own work, in which callers look up the peers that failed. torch posts
    the messages one after the other, so a wrong one would leave the messages before it posted.
    Therefore all messages are checked here."""
    caller = sys._getframe(1)
    if caller.f_code.co_name != "batch_isend_irecv":
        return True
    for one in caller.f_locals["p2p_op_list"]:
        backend.check_message(one.op is dist.isend, one.tensor, one.group_peer, one.tag)
    return False
