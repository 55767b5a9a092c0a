"""Mooncake's ElasticBuffer: `from mooncake.mooncake_elastic_buffer import ElasticBuffer`."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import torch

from . import elastic, elastic_handle
from .arguments import Rows
from .events import EventOverlap
from .runtime import OnFailure

Tensor = torch.Tensor


@dataclasses.dataclass
class EPHandle(elastic_handle.EPHandle):
    """mooncake.ep.EPHandle with Mooncake's further attributes."""

    native_handle: bool = True
    generation: int = 0  # see ElasticBuffer.update_ep_member()


class ElasticBuffer(elastic.ElasticBuffer):
    """mooncake.ep.ElasticBuffer with Mooncake's arguments. Making one is collective over the group.

    allow_multiple_reduction: must be True
    transport: must be "auto"
    The other arguments are as in mooncake.ep.ElasticBuffer.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        transport: str = "auto",
        *,
        timeout: timedelta | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        if not allow_multiple_reduction:
            raise NotImplementedError(
                "allow_multiple_reduction=False: use mooncake.ep.ElasticBuffer"
            )
        if transport.strip().lower() != "auto":
            raise NotImplementedError(
                f"transport={transport!r}: the buffer runs over the engine's transports. Leave it "
                "at 'auto'"
            )
        super().__init__(
            group,
            num_bytes,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            deterministic=deterministic,
            allow_hybrid_mode=allow_hybrid_mode,
            prefer_overlap_with_compute=prefer_overlap_with_compute,
            sl_idx=sl_idx,
            num_allocated_qps=num_allocated_qps,
            num_cpu_timeout_secs=num_cpu_timeout_secs,
            num_gpu_timeout_secs=num_gpu_timeout_secs,
            explicitly_destroy=explicitly_destroy,
            timeout=timeout,
            on_failure=on_failure,
        )
        self.backend = group
        self.transport = transport
        self._generation = 0

    def update_ep_member(self) -> None:
        """Begins a new generation: handles of earlier dispatches are refused from now on. If the
        group has let new processes in (mooncake.pg.recover_ranks), the next dispatch begins with
        them: all members have called this, and the new process makes its buffer. Local. Raises if
        this buffer cannot be used any more. Lost ranks need no such call."""
        self._runtime.update_members()
        self._generation += 1

    def dispatch(  # type: ignore[override]
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        handle: EPHandle | None = None,
        do_expand: bool = False,
        do_cpu_sync: bool | None = None,
        num_sms: int | None = None,
        async_with_compute_stream: bool = False,
        *,
        active_ranks: Tensor | None = None,
        timeout_us: int | None = -1,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """As mooncake.ep.ElasticBuffer.dispatch(). recv_topk_idx is there with do_expand, too."""
        self._check_generation(handle)
        recv_x, recv_topk_idx, weights, found, event = super().dispatch(
            x,
            topk_idx,
            topk_weights,
            num_experts=num_experts,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            expert_alignment=expert_alignment,
            handle=handle,
            do_expand=do_expand,
            do_cpu_sync=do_cpu_sync,
            num_sms=num_sms or 0,
            async_with_compute_stream=async_with_compute_stream,
            active_ranks=active_ranks,
            timeout_us=timeout_us,
        )
        if handle is None:
            parts = {one.name: getattr(found, one.name) for one in dataclasses.fields(found)}
            handle = EPHandle(**parts, generation=self._generation)
        if recv_topk_idx is None:
            recv_topk_idx = found.way.local.to(found.topk_idx.device, copy=True)
        return recv_x, recv_topk_idx, weights, handle, event

    def combine(  # type: ignore[override]
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        num_sms: int | None = None,
        async_with_compute_stream: bool = False,
        *,
        active_ranks: Tensor | None = None,
        timeout_us: int | None = -1,
    ) -> tuple[Tensor, None, EventOverlap]:
        """As mooncake.ep.ElasticBuffer.combine(), without weights: topk_weights has no effect."""
        self._check_generation(handle)
        combined, _, event = super().combine(
            x,
            handle,
            async_with_compute_stream=async_with_compute_stream,
            active_ranks=active_ranks,
            timeout_us=timeout_us,
        )
        return combined, None, event

    def _check_generation(self, handle: Any) -> None:
        """Before anything is sent: members have such handles, a new process has none."""
        generation = getattr(handle, "generation", None)
        if generation is not None and generation != self._generation:
            raise RuntimeError(
                f"rank {self.rank_idx}: the handle is of an obsolete generation, "
                f"{generation}, and this is {self._generation}: update_ep_member() was called "
                "since. Dispatch again. (Mooncake: obsolete NCCL ElasticBuffer generation)"
            )
