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
    """Bytes of a Buffer that suffices for dispatches and combines of these sizes."""
    return runtime.size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)


class Buffer:
    """Dispatch and combine, with Mooncake's signatures. Making one is collective over the group.

    group: a process group of any backend; of ours it shares the connections and who is alive
    disable_p2p: accepted, changes nothing

    Beyond Mooncake's:
    staged: GPU tensors are copied through the CPU; without it they are refused. None: what
        MOONCAKE_EP_STAGED says, 0 if that is not set
    timeout: of every operation, the group's own if not given
    renormalize: a token that misses contributions has its other weights scaled up to the same sum
    on_failure: "continue" without lost ranks, or "raise"; the group's own if not given
    """

    def __init__(
        self,
        group: Any,
        num_ep_buffer_bytes: int = 0,
        disable_p2p: bool = False,
        *,
        staged: bool | None = None,
        timeout: timedelta | None = None,
        renormalize: bool = False,
        on_failure: OnFailure | None = None,
    ) -> None:
        members = runtime.members_of(group)
        self.group = self.backend = group
        self.rank, self.group_size = members.rank, members.size
        self.num_ep_buffer_bytes = num_ep_buffer_bytes
        # There is one path here, so nothing is done differently; callers set it and look at it.
        self._use_fallback = False
        self._runtime = Runtime(
            members,
            num_ep_buffer_bytes,
            staged=staged,
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
        """Of the last combine, bool [n]: True for a token one of whose experts is on a rank that
        took no part, in the dispatch or in the combine. Waits for the combine to end."""
        return self._runtime.missing_contributions()

    def connect(self, is_update: bool = False) -> None:
        """The constructor has connected already; with is_update the same as update_ep_member()."""
        if is_update:
            self.update_ep_member()

    def update_ep_member(self) -> None:
        """Raises if this Buffer cannot be used any more. Local: any ranks may call it, and the
        others need not, as all agree on who is in without it, before the next operation."""
        self._runtime.native.update_members()

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
        """Sends each token to the ranks of its experts; all ranks call it.

        x: bfloat16 [n, h], with n up to num_max_dispatch_tokens_per_rank (T)
        topk_idx: int64 [n, k]; -1 is no expert
        active_ranks: int32, at least as many elements as ranks, of which the first ones count:
            where it is 0, nothing is sent to that rank nor taken from it; it is 0 afterwards for
            those that were lost. None: all ranks
        timeout_us: who has not called it this long after this rank is skipped, if it lives: it
            takes no part in this operation, on all ranks, and does again in the next one. -1, 0
            or None: it is waited for until the Buffer's timeout. One that is lost is waited for
            only until the survivors know it
        use_fp8: True if None

        Returns (recv_x, recv_count, handle, event, hook): the rows of each of this rank's L
        experts [L, R * T, h], with FP8 and their scales as a pair; how many they are, int32 [L];
        what combine needs; what waits with async_finish; what waits with return_recv_hook.
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
        """Brings each token's rows back and adds them, weighted; all ranks call it.

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
        """bfloat16 [L, R * T, h]: what is written there, the next combine need not copy."""
        return self._runtime.next_combine_buffer(handle)

    def _hook(self, hook: Hook | None) -> Hook | None:
        """Upstream's fallback always returns one."""
        return _nothing_left if hook is None and self._use_fallback else hook


def _nothing_left() -> None:
    pass
