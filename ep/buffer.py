"""Buffer: dispatch and combine, with the signatures of DeepEP's `deep_ep.Buffer`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from . import normal, runtime
from .arguments import Rows, check_choices, check_room
from .config import Config, combine_config, dispatch_config
from .events import EventHandle, EventOverlap, current_device
from .exchange import Exchange
from .layout import CPU, layout_of
from .normal import Shown
from .normal_handle import NormalHandle
from .runtime import Handle, Hook, OnFailure, Received, Runtime

_ALIGNMENT = 128


class Buffer:
    """Dispatch and combine in both of DeepEP's modes. Making one is collective over the group. In
    all shapes n is the number of this rank's tokens, h their channels, k the experts of a token
    (top-k), R the number of ranks, E of all experts, L of this rank's experts.

    group: a process group of any backend. With a group of ours, the Buffer shares its connections
    and its view of the active ranks
    num_nvl_bytes: bytes of the normal mode, a multiple of 128. Calls that need more run in several
    pieces
    num_rdma_bytes: bytes of the low latency mode, a multiple of 128, see
    get_low_latency_rdma_size_hint(); without low_latency_mode, more memory of the normal mode
    comm: an mpi4py-like communicator instead of a group
    num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl,
    explicitly_destroy, enable_shrink: accepted without effect. Masks work, and lost ranks are
    survived, without enable_shrink too

    timeout, renormalize, on_failure: beyond DeepEP's; see mooncake.ep.runtime.Runtime

    Calls raise ValueError or TypeError for wrong arguments, DistBackendError for an operation that
    timed out or that the ranks called differently, and PeerLostError for a loss with on_failure
    "raise". In the normal mode these are errors of the call on all ranks, and the Buffer goes on.
    In the low latency mode wrong arguments are an error of their caller alone, and nothing is sent.
    After destroy() calls raise RuntimeError.
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
        self._normal_runtime: Runtime | None = None
        self._normal: Exchange | None = None
        self._has_combined_normally = False
        normal_bytes = num_nvl_bytes + (0 if low_latency_mode else num_rdma_bytes)
        if low_latency_mode:
            self._runtime = Runtime(
                members,
                num_rdma_bytes,
                timeout=timeout,
                renormalize=renormalize,
                on_failure=on_failure,
                bytes_beside=normal_bytes,
            )
        if normal_bytes > 0:
            try:
                self._normal_runtime = Runtime(
                    members,
                    normal_bytes,
                    timeout=timeout,
                    renormalize=False,
                    on_failure=on_failure,
                    is_normal=True,
                    beside=self._runtime,
                )
            except BaseException:
                self.destroy()
                raise
            self._normal = Exchange(self._normal_runtime)

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
        num_experts: of all ranks (E), the same on all ranks, as T is
        use_fp8: sends float8_e4m3fn, with a float32 scale for each 128 channels
        round_scale: scales are powers of two
        use_ue8m0: packs four exponents of scales into an int32; needs round_scale
        async_finish, return_recv_hook: the call returns at once, and `event` or `hook` waits. Not
            both
        active_ranks: int32, at least as many elements as ranks: a mask for this call. A rank with 0
            gets nothing, and nothing of it is received. Afterwards lost ranks are 0
        timeout_us: microseconds after this rank's call. A living rank that has not called the
            operation by then is skipped: it takes no part in this operation, on all ranks, but
            does in the next one. -1, 0 or None: living ranks are waited for until the Buffer's
            timeout. A lost rank is waited for only until the survivors know the loss

        Returns (recv_x, recv_count, handle, event, hook)
        recv_x: rows of this rank's L experts, bfloat16 [L, R * T, h]. With FP8 a pair of
            float8_e4m3fn rows and scales, float32 [L, R * T, ceil(h / 128)], or int32
            [L, R * T, ceil(h / 512)] with use_ue8m0
        recv_count: number of rows of each expert, int32 [L]; further rows are undefined
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
        topk_idx, topk_weights: [n, k], int64 as in the dispatch, or -1 for a contribution that is
            not wanted; the weights float32
        handle: from the dispatch; it serves any number of combines
        use_logfmt: sends 10 bits for each channel; not with zero_copy
        zero_copy: x was written into get_next_low_latency_combine_buffer(handle)
        out: bfloat16 [n, h] for the result
        combine_wait_recv_cost_stats: int64 [R]; the time waited for each rank is added, in us

        Returns (combined_x, event, hook), combined_x is bfloat16 [n, h].
        """
        found = self._low_latency().combine(
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
        self._has_combined_normally = False
        return found

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """bfloat16 [L, R * T, h]: rows written there need no copy in the next combine."""
        return self._low_latency().next_combine_buffer(handle)

    @property
    def missing_contributions(self) -> torch.Tensor:
        """bool [n] of the last combine. True for a token if one of its experts is on a rank that
        did not take part in the dispatch or in the combine. Waits for the combine to end. The
        event of a combine has the same property for that combine."""
        if self._has_combined_normally:
            return self._normal_mode().missing_contributions()
        return self._low_latency().missing_contributions()

    # ---- masks

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank, or unmasks it. A masked rank gets nothing, and nothing of it is received.
        Takes effect on all ranks with the next operation."""
        self._low_latency().mask_rank(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes int32 [R] to mask_status: 1 for each rank that is masked here or lost. The
        opposite of active_ranks."""
        self._low_latency().native.show_masked_ranks(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks all masked ranks. Lost ranks stay masked."""
        self._low_latency().unmask_all()

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Collective: waits for all ranks, so that the masks are up to date afterwards. There is
        nothing to clean: no operation leaves data that the next one could take for its own."""
        check_room(
            1,
            num_max_dispatch_tokens_per_rank=num_max_dispatch_tokens_per_rank,
            hidden=hidden,
            num_experts=num_experts,
        )
        nothing = torch.empty((0, hidden), dtype=torch.bfloat16, device=CPU)
        nowhere = torch.empty((0, 1), dtype=torch.int64, device=CPU)
        self._low_latency().native.dispatch(
            nothing, nowhere, num_max_dispatch_tokens_per_rank, num_experts, use_fp8=False,
            keeps_rows=False,
        )  # fmt: skip

    # ---- members

    def update_ep_member(self) -> None:
        """Beyond DeepEP's calls. If the group has let new processes in (mooncake.pg.recover_ranks),
        the next dispatch of either mode begins with them: all members have called this, and the new
        process makes its Buffer. Handles from before are refused then, masks stay. Local. Raises if
        this Buffer cannot be used any more. Lost ranks need no such call."""
        (self._runtime or self._normal_mode().runtime).update_members()

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
        overwrite it.

        use_rdma_buffer: the memory of the low latency mode; False: the normal mode's
        ValueError: `size` has more elements than there are from `offset` on
        """
        if use_rdma_buffer:
            memory = self._low_latency().native.local_buffer()[offset:]
        else:
            self._normal_mode()
            assert self._normal_runtime is not None
            memory = self._normal_runtime.native.local_buffer()[offset:]
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
        """The native buffer of the low latency mode, or else of the normal mode."""
        found = self._runtime or self._normal_runtime
        return None if found is None else found.native

    def destroy(self) -> None:
        """Waits for operations in the background, and frees the memory, also that kept for results.
        Results that the program has stay valid, except results in the Buffer's memory: recv_x of
        the low latency mode keeps it alive."""
        try:
            if self._runtime is not None:
                self._runtime.close()
        finally:
            if self._normal_runtime is not None:
                self._normal_runtime.close()
            if self._normal is not None:
                self._normal.let_go()

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
        """DeepEP's settings of a dispatch for up to 160 ranks. Beyond: ValueError."""
        return dispatch_config(Buffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """DeepEP's settings of a combine, see get_dispatch_config()."""
        return combine_config(Buffer.num_sms, num_ranks)

    # ---- the normal mode

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts the tokens for each rank and expert. Sends nothing.

        topk_idx: int64 or int32 [n, k]; -1 is no expert
        previous_event: is waited for first
        async_finish: adds an event; the results are there when the call returns
        allocate_on_comm_stream: without effect

        Returns (num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert,
        is_token_in_rank, event): int32 [R], int32 [ceil(R / 8)] or None up to 8 ranks, int32 [E],
        bool [n, R]. ValueError, on this rank only: topk_idx names an expert from num_experts on. On
            a device, where the host does not wait, that is no expert.
        """
        if previous_event is not None:
            previous_event.current_stream_wait()
        check_choices(topk_idx)
        check_room(1, num_experts=num_experts)
        found = layout_of(topk_idx, num_experts, self.group_size)
        return (
            found.num_tokens_per_rank,
            found.num_tokens_per_rdma_rank,
            found.num_tokens_per_expert,
            found.is_token_in_rank,
            _ended(async_finish),
        )

    def dispatch(
        self,
        x: Rows,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int | None = -1,
    ) -> tuple[
        Rows,
        torch.Tensor | None,
        torch.Tensor | None,
        list[int] | None,
        NormalHandle | None,
        EventOverlap,
    ]:
        """Sends each token once to each rank that has one of its experts. All ranks call it.

        x: [n, h] of any dtype, bfloat16 as a rule, or a pair of such rows (FP8) and their scales,
            [n, any] or [n], which are sent as they are. Dtypes, h and k are the same on all ranks
        handle: of an earlier dispatch, whose way the tokens take again. Then the four layouts and
            topk are not used
        is_token_in_rank, num_tokens_per_expert: bool [n, R] and int32 [E], of
            get_dispatch_layout(). num_tokens_per_rank and num_tokens_per_rdma_rank are not needed
        topk_idx, topk_weights: int64 or int32 [n, k], and float32 [n, k]; both or none
        expert_alignment: the numbers of tokens per expert are rounded up to a multiple of it
        num_worst_tokens: if not 0, the number of the results' rows; rows behind the received ones
            have -1 in recv_topk_idx. Fewer than a rank receives is a ValueError
        config: decides the number of channels of DeepEP's handle
        previous_event: is waited for first
        allocate_on_comm_stream: without effect
        active_ranks, timeout_us: as in low_latency_dispatch(), a timeout on all ranks or on none.
            By kernels no living rank is skipped: the Buffer's calls end with an error that names
            it. A dispatch has two steps, so ranks that are late may be waited for twice

        Returns (recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle,
        event): [rows, h], [rows, k], float32 [rows, k], a list of L. Rows are in the order of
        source rank and token. recv_topk_idx has numbers among this rank's experts, and -1 for
        other experts. With a handle the second to fifth are None, and rows have the places of the
        handle's dispatch: rows of ranks that have gone since are zeros. The call returns when it
        has ended. By kernels, and on a device with a handle or num_worst_tokens, it returns when it
        is enqueued, and the current stream waits for the results. `async_finish` only adds an
        event.
        """
        exchange = self._normal_mode()
        if handle is not None:
            normal.refuse_old(exchange, "dispatch", handle)
        steps = 1 if handle is not None else 2
        is_fixed = handle is not None or num_worst_tokens != 0
        is_alone = exchange.is_alone(x, topk_idx, is_token_in_rank) and is_fixed
        with exchange.call("dispatch", steps, is_alone):
            if previous_event is not None:
                previous_event.current_stream_wait()
            participation = exchange.participation(active_ranks, timeout_us)
            if handle is not None:
                again = normal.dispatch_again(exchange, x, handle, participation)
                return again, None, None, None, None, _ended(async_finish)
            if is_token_in_rank is None or num_tokens_per_expert is None:
                raise ValueError("give a handle, or the results of get_dispatch_layout()")
            num_sms = Buffer.num_sms if config is None else config.num_sms
            shown = Shown(expert_alignment, num_worst_tokens, max(1, num_sms // 2))
            found = normal.dispatch(
                exchange, x, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights,
                shown, participation,
            )  # fmt: skip
        return (
            found.rows, found.topk_idx, found.topk_weights, found.num_per_expert, found.handle,
            _ended(async_finish),
        )  # fmt: skip

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int | None = -1,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Brings the rows back and adds each token's rows, without weights. All ranks call it.

        x: bfloat16 [rows, h], in the order of recv_x; further rows are not read
        topk_weights: float32 [rows, k], summed beside the rows
        bias: bfloat16 [n, h], or two of them: the sum of a token begins with them
        previous_event: is waited for first
        async_finish: the call returns before it has ended. Do not read the results, or change x,
            before `event.current_stream_wait()`, which raises its errors
        active_ranks, timeout_us: as in low_latency_dispatch(), a timeout on all ranks or on none
        config, allocate_on_comm_stream: without effect

        Returns (combined_x, combined_topk_weights, event): bfloat16 [n, h] and float32 [n, k] or
        None. Sums are made in float32 in the order of ranks, and rounded once. The handle serves
        any number of combines, also after a loss or an error.
        """
        exchange = self._normal_mode()
        normal.refuse_old(exchange, "combine", handle)
        self._has_combined_normally = True
        with exchange.call("combine", is_alone=exchange.is_alone(x, topk_weights)):
            if previous_event is not None:
                previous_event.current_stream_wait()
            biases = [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias]
            participation = exchange.participation(active_ranks, timeout_us)
            route = normal.route_of(exchange, handle)
            return exchange.combine(x, route, topk_weights, biases, participation, async_finish)

    # One path serves all hosts: these have the same signatures and results.
    internode_dispatch = dispatch
    internode_combine = combine

    def _low_latency(self) -> Runtime:
        if self._runtime is None:
            raise RuntimeError(
                f"rank {self.rank}: this Buffer was made without low_latency_mode=True"
            )
        return self._runtime

    def call_of_normal_mode(
        self, name: str, steps: int, x: Any, is_fixed: bool
    ) -> contextlib.AbstractContextManager[None]:
        """For calls that are made of other calls: see Exchange.call(). is_fixed: on a device, it
        needs no counts."""
        exchange = self._normal_mode()
        return exchange.call(name, steps, exchange.is_alone(x) and is_fixed)

    def _normal_mode(self) -> Exchange:
        if self._normal is None:
            raise RuntimeError(
                f"rank {self.rank}: this Buffer has no memory for the normal mode: make it with "
                "num_nvl_bytes"
            )
        return self._normal


def _ended(async_finish: bool) -> EventOverlap:
    """The event of a call that has ended."""
    return EventOverlap(EventHandle() if async_finish else None)
