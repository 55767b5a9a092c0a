"""Mooncake's Buffer: `from mooncake.mooncake_ep_buffer import Buffer`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from . import runtime
from .events import EventOverlap
from .runtime import Handle, Hook, OnFailure, Received, Runtime


def get_ep_buffer_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Bytes of a Buffer that suffice for dispatches and combines of these sizes."""
    return runtime.size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)


class Buffer:
    """Dispatch and combine, with Mooncake's signatures. Making one is collective over the group.

    group: a process group of any backend. With a group of ours, the Buffer shares its connections
    and its view of the active ranks
    num_ep_buffer_bytes: bytes of memory, see get_ep_buffer_size_hint()
    disable_p2p: accepted without effect

    timeout, renormalize, on_failure: beyond Mooncake's; see mooncake.ep.runtime.Runtime

    Shapes and errors are as in mooncake.ep.Buffer's low latency mode.
    """

    def __init__(
        self,
        group: Any,
        num_ep_buffer_bytes: int = 0,
        disable_p2p: bool = False,
        *,
        timeout: timedelta | None = None,
        renormalize: bool = False,
        on_failure: OnFailure | None = None,
    ) -> None:
        members = runtime.members_of(group)
        self.group = self.backend = group
        self.rank, self.group_size = members.rank, members.size
        self.num_ep_buffer_bytes = num_ep_buffer_bytes
        # Without effect, because there is only one path here. Callers set it and read it.
        self._use_fallback = False
        self._runtime = Runtime(
            members,
            num_ep_buffer_bytes,
            timeout=timeout,
            renormalize=renormalize,
            on_failure=on_failure,
        )

    get_ep_buffer_size_hint = staticmethod(get_ep_buffer_size_hint)

    @property
    def runtime(self) -> Any:
        """The native buffer."""
        return self._runtime.native

    @property
    def missing_contributions(self) -> torch.Tensor:
        """bool [n] of the last combine. True for a token if one of its experts is on a rank that
        did not take part in the dispatch or in the combine. Waits for the combine to end."""
        return self._runtime.missing_contributions()

    def connect(self, is_update: bool = False) -> None:
        """Does nothing: the constructor has connected. With is_update, calls update_ep_member()."""
        if is_update:
            self.update_ep_member()

    def update_ep_member(self) -> None:
        """If the group has let new processes in (mooncake.pg.recover_ranks), the next dispatch
        begins with them: all members have called this, and the new process makes its Buffer.
        Handles from before are refused then. Local. Raises if this Buffer cannot be used any more.
        Lost ranks need no such call."""
        self._runtime.update_members()

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        active_ranks: torch.Tensor | None,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        timeout_us: int | None,
        use_fp8: bool | None = None,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Received, torch.Tensor, Handle, EventOverlap, Hook | None]:
        """Sends each token to the ranks of its experts. All ranks call it.

        x: bfloat16 [n, h], with n up to num_max_dispatch_tokens_per_rank (T)
        topk_idx: int64 [n, k]; -1 is no expert
        active_ranks: int32, at least as many elements as ranks: a mask for this call. A rank with 0
            gets nothing, and nothing of it is received. Afterwards lost ranks are 0. None: all
            ranks
        timeout_us: microseconds after this rank's call. A living rank that has not called the
            operation by then is skipped: it takes no part in this operation, on all ranks, but
            does in the next one. -1, 0 or None: living ranks are waited for until the Buffer's
            timeout. A lost rank is waited for only until the survivors know the loss
        num_experts: of all ranks, the same on all ranks
        use_fp8: sends float8_e4m3fn, with a float32 scale for each 128 channels; True if None

        Returns (recv_x, recv_count, handle, event, hook)
        recv_x: rows of this rank's L experts, bfloat16 [L, R * T, h]. With FP8 a pair of
            float8_e4m3fn rows and scales, float32 [L, R * T, ceil(h / 128)]
        recv_count: number of rows of each expert, int32 [L]
        handle: for combine
        event: waits for the operation if async_finish is set
        hook: waits for the operation if return_recv_hook is set
        """
        recv_x, recv_count, handle, event, hook = self._runtime.dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            use_fp8=use_fp8 is not False,
            active_ranks=active_ranks,
            timeout_us=timeout_us,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )
        return recv_x, recv_count, handle, event, self._hook(hook)

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        active_ranks: torch.Tensor | None,
        timeout_us: int | None,
        handle: Handle,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Brings each token's rows back and adds them, weighted. All ranks call it.

        x: bfloat16 [L, R * T, h], in the order of recv_x
        topk_idx, topk_weights: [n, k], the weights float32
        zero_copy: x was written into get_next_combine_buffer(handle)
        out: bfloat16 [n, h] for the result

        Returns (combined_x, event, hook), combined_x is bfloat16 [n, h].
        """
        combined_x, event, hook = self._runtime.combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            zero_copy=zero_copy,
            out=out,
            active_ranks=active_ranks,
            timeout_us=timeout_us,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )
        return combined_x, event, self._hook(hook)

    def get_next_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """bfloat16 [L, R * T, h]: rows written there need no copy in the next combine."""
        return self._runtime.next_combine_buffer(handle)

    def _hook(self, hook: Hook | None) -> Hook | None:
        """Returns a hook in any case if _use_fallback is set, as upstream's fallback does."""
        return _nothing_left if hook is None and self._use_fallback else hook


def _nothing_left() -> None:
    pass
