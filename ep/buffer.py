"""Buffer: dispatch and combine, with DeepEP's signatures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from mooncake_backend.membership import not_yet

from . import runtime
from .config import Config, combine_config, dispatch_config
from .events import EventHandle, EventOverlap, current_device
from .runtime import Handle, Hook, OnFailure, Received, Runtime

_ALIGNMENT = 128
_NORMAL_MODE = "the normal mode of expert parallelism (low_latency_dispatch is available)"


class Buffer:
    """Dispatch and combine in DeepEP's low latency mode. Making one is collective over the group.

    group: a process group of any backend. With a group of ours, the Buffer shares its connections
    and its view of the active ranks
    num_rdma_bytes: see get_low_latency_rdma_size_hint()
    comm: an mpi4py-like communicator instead of a group
    num_nvl_bytes, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl,
    explicitly_destroy, enable_shrink: accepted without effect. Masks work, and lost ranks are
    survived, without enable_shrink too

    timeout, renormalize, on_failure: beyond DeepEP's; see mooncake.ep.runtime.Runtime
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        timeout: timedelta | None = None,
        renormalize: bool = False,
        on_failure: OnFailure | None = None,
    ) -> None:
        members = runtime.members_of(group, comm)
        for name, size in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
            if size < 0 or size % _ALIGNMENT:
                raise ValueError(f"{name} must be a multiple of {_ALIGNMENT}, not {size}")
        self.group = group
        self.rank, self.group_size = members.rank, members.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.nvshmem_qp_depth = 1024
        self._runtime: Runtime | None = None
        if low_latency_mode:
            self._runtime = Runtime(
                members,
                num_rdma_bytes,
                timeout=timeout,
                renormalize=renormalize,
                on_failure=on_failure,
            )

    # ---- dispatch and combine

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int | None = -1,
    ) -> tuple[Received, torch.Tensor, Handle, EventOverlap, Hook | None]:
        """Sends each token to the ranks of its experts. All ranks call it.

        x: bfloat16 [n, h], with n up to num_max_dispatch_tokens_per_rank (T)
        topk_idx: int64 [n, k]; -1 is no expert
        cumulative_local_expert_recv_stats: int32 [L]; the counts are added
        dispatch_wait_recv_cost_stats: int64 [R]; the time waited for each rank is added, in us
        use_fp8: sends float8_e4m3fn, with a float32 scale for each 128 channels
        round_scale: scales are powers of two
        use_ue8m0: packs four exponents of scales into an int32; needs round_scale
        active_ranks: int32, at least as many elements as ranks: a mask for this call. A rank with 0
            gets nothing, and nothing of it is received. Afterwards lost ranks are 0
        timeout_us: microseconds after this rank's call. A living rank that has not called the
            operation by then is skipped: it takes no part in this operation, on all ranks, but
            does in the next one. -1, 0 or None: living ranks are waited for until the Buffer's
            timeout. A lost rank is waited for only until the survivors know the loss

        Returns (recv_x, recv_count, handle, event, hook)
        recv_x: rows of this rank's L experts, [L, R * T, h]; with FP8 a pair of rows and scales
        recv_count: number of rows of each expert, int32 [L]
        handle: for combine, (src_info, layout_range, T, h, num_experts)
        event: waits for the operation if async_finish is set
        hook: waits for the operation if return_recv_hook is set
        Only the results of the last two calls are valid.
        """
        return self._low_latency().dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            active_ranks=active_ranks,
            timeout_us=timeout_us,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
            cumulative_recv_stats=cumulative_local_expert_recv_stats,
            wait_stats=dispatch_wait_recv_cost_stats,
        )

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        *,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int | None = -1,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Brings each token's rows back and adds them, weighted. All ranks call it.

        x: bfloat16 [L, R * T, h], in the order of recv_x
        topk_idx, topk_weights: [n, k], the weights float32
        use_logfmt: sends 10 bits for each channel
        zero_copy: x was written into get_next_low_latency_combine_buffer(handle)
        out: bfloat16 [n, h] for the result
        combine_wait_recv_cost_stats: int64 [R]; the time waited for each rank is added, in us

        Returns (combined_x, event, hook), combined_x is bfloat16 [n, h].
        """
        return self._low_latency().combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            use_logfmt=use_logfmt,
            zero_copy=zero_copy,
            out=out,
            active_ranks=active_ranks,
            timeout_us=timeout_us,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
            wait_stats=combine_wait_recv_cost_stats,
        )

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """bfloat16 [L, R * T, h]: rows written there need no copy in the next combine."""
        return self._low_latency().next_combine_buffer(handle)

    @property
    def missing_contributions(self) -> torch.Tensor:
        """bool [n] of the last combine. True for a token if one of its experts is on a rank that
        did not take part in the dispatch or in the combine. Waits for the combine to end. The
        event of a combine has the same property for that combine."""
        return self._low_latency().missing_contributions()

    # ---- masks

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank, or unmasks it. A masked rank gets nothing, and nothing of it is received.
        Takes effect on all ranks with the next operation."""
        self._low_latency().native.mask_rank(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes int32 [R]: 1 for each rank that is masked here or lost. The opposite of
        active_ranks."""
        self._low_latency().native.show_masked_ranks(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks all masked ranks. Lost ranks stay masked."""
        self._low_latency().native.unmask_all()

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Collective: waits for all ranks, so that the masks are up to date afterwards. There is
        nothing to clean: no operation leaves data that the next one could take for its own."""
        nothing = torch.empty((0, hidden), dtype=torch.bfloat16)
        nowhere = torch.empty((0, 1), dtype=torch.int64)
        self._low_latency().native.dispatch(
            nothing, nowhere, num_max_dispatch_tokens_per_rank, num_experts, use_fp8=False
        )

    # ---- memory, streams, settings

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Value of num_rdma_bytes that suffices for operations of these sizes."""
        return runtime.size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: Sequence[int] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """This rank's memory from byte `offset` on, in one dimension, or in `size`. Operations may
        overwrite it."""
        if not use_rdma_buffer:
            not_yet("get_local_buffer_tensor with use_rdma_buffer=False", _NORMAL_MODE)()
        memory = self._low_latency().native.local_buffer()[offset:]
        elements = memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
        if size is None:
            return elements
        count = torch.Size(size).numel()
        if count > len(elements):
            raise ValueError(
                f"size {list(size)} is {count} elements of {dtype}, and from byte {offset} on this "
                f"Buffer has {len(elements)}"
            )
        return elements[:count].view(torch.Size(size))

    @property
    def runtime(self) -> Any:
        """The native buffer; None without low_latency_mode."""
        return None if self._runtime is None else self._runtime.native

    def destroy(self) -> None:
        """Waits for operations in the background, and frees the memory."""
        if self._runtime is not None:
            self._runtime.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """False: this version has no GPU code."""
        return False

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Changes num_sms. That has no other effect: no GPU is used."""
        if new_num_sms % 2:
            raise ValueError(f"the number of SMs must be even, not {new_num_sms}")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event at the present place of the current stream."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> torch.Stream | torch.cpu.Stream:
        """The stream of the copies from and to the current device. Without devices, the CPU's."""
        device = current_device()
        if device is None:
            return torch.cpu.current_stream()
        if self._runtime is None:
            return torch.accelerator.current_stream(device)
        native = self._runtime.native.stream_on(device)
        stream: torch.Stream = torch.get_device_module(device).Stream(
            stream_id=native.stream_id,
            device_index=native.device_index,
            device_type=native.device_type,
        )
        return stream

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return dispatch_config(Buffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return combine_config(Buffer.num_sms, num_ranks)

    # ---- the normal mode

    get_dispatch_layout = not_yet("Buffer.get_dispatch_layout", _NORMAL_MODE)
    dispatch = not_yet("Buffer.dispatch", _NORMAL_MODE)
    combine = not_yet("Buffer.combine", _NORMAL_MODE)
    internode_dispatch = not_yet("Buffer.internode_dispatch", _NORMAL_MODE)
    internode_combine = not_yet("Buffer.internode_combine", _NORMAL_MODE)

    def _low_latency(self) -> Runtime:
        if self._runtime is None:
            raise RuntimeError(
                f"rank {self.rank}: this Buffer was made without low_latency_mode=True, and this "
                "version has only that mode"
            )
        return self._runtime


class ElasticBuffer:
    """DeepEP 2's second class. Not available in this version: making one raises an error."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        not_yet("ElasticBuffer", "DeepEP's unified interface")()
