"""ElasticBuffer: dispatch and combine with the signatures of DeepEP 2."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch

from mooncake_backend.membership import not_yet

from . import elastic_mode, one_rounding, reference, runtime
from .arguments import Rows, check_number, check_sizes, check_tensor
from .elastic_handle import EPHandle
from .elastic_mode import Form
from .events import EventHandle, EventOverlap, current_stream, profiled
from .exchange import Exchange
from .expansion import aligned
from .runtime import OnFailure, Runtime

Tensor = torch.Tensor
_MOST_SMS = 128
_ALIGNMENT = 2 << 20  # a buffer's size is a multiple of it, as in DeepEP


class ElasticBuffer:
    """Dispatch and combine with the signatures of DeepEP 2's `deep_ep.ElasticBuffer`. Making one is
    collective over the group. In all shapes n is the number of this rank's tokens, h their
    channels, k the experts of a token, R the number of ranks, L of this rank's experts.

    group: a process group of any backend. With a group of ours, the buffer shares its connections
    and its view of the active ranks
    num_bytes: bytes of memory, a multiple of 2 MiB. Calls that need more run in several pieces.
    None: get_buffer_size_hint() of num_max_tokens_per_rank, hidden and num_topk
    num_cpu_bytes: must be 0
    num_max_tokens_per_rank: most tokens of a rank in a call (T), unless the call gives another
    hidden, num_topk: channels of a token, and its experts, for num_bytes None
    num_cpu_timeout_secs: longest time of every operation, in seconds
    allow_multiple_reduction: False: the combine of an expanded dispatch rounds once, and sends each
    expert's row by itself
    deterministic, allow_hybrid_mode, prefer_overlap_with_compute, sl_idx, num_allocated_qps,
    num_gpu_timeout_secs, use_fp8_dispatch, explicitly_destroy: accepted without effect. Rows and
    sums have the same order in every run and on any hosts

    timeout, on_failure: beyond DeepEP's; see mooncake.ep.runtime.Runtime. timeout replaces
    num_cpu_timeout_secs

    Errors are as in mooncake.ep.Buffer's normal mode: a call raises on all ranks, and the buffer
    goes on.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
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
        *,
        timeout: timedelta | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        if num_cpu_bytes != 0:
            raise NotImplementedError("num_cpu_bytes is for Engram, which is not available")
        members = runtime.members_of(group)
        if num_bytes is None:
            num_bytes = _size_hint(members.size, num_max_tokens_per_rank, hidden, num_topk)
        if num_bytes <= 0 or num_bytes % _ALIGNMENT:
            raise ValueError(f"num_bytes must be a multiple of {_ALIGNMENT}, not {num_bytes}")
        self.group = group
        self.rank_idx, self.num_ranks = members.rank, members.size
        self.num_bytes = num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.explicitly_destroy = explicitly_destroy
        self.num_allocated_qps = num_allocated_qps or (65 if allow_hybrid_mode else 17)
        self._runtime = Runtime(
            members,
            num_bytes,
            timeout=timeout or timedelta(seconds=num_cpu_timeout_secs),
            renormalize=False,
            on_failure=on_failure,
            is_normal=True,
        )
        self._exchange = Exchange(self._runtime)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx

    # ---- dispatch and combine

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        *,
        active_ranks: Tensor | None = None,
        timeout_us: int | None = -1,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Sends each token once to each rank that has one of its experts. All ranks call it.

        x: [n, h] of any dtype, bfloat16 as a rule, or a pair of such rows (FP8) and their scales,
            [n, any] or [n], which are sent as they are. Dtypes, h and k are the same on all ranks
        topk_idx: int64 or int32 [n, k]; -1 is no expert; topk_weights: float32 [n, k]
        cumulative_local_expert_recv_stats: int32 [L]; the counts are added
        num_experts: of all ranks; needed without a handle
        num_max_tokens_per_rank: the same on all ranks (T); None: the buffer's
        num_sms: kept in the handle; num_qps, allocate_on_comm_stream: without effect
        previous_event, previous_event_before_epilogue: are waited for first
        expert_alignment: the count of each expert is rounded up to a multiple of it. With do_expand
            each expert's rows begin at such a multiple, and rows between experts are zeros, also
            without do_zero_padding
        handle: from an earlier dispatch: the tokens go to the same ranks and rows again. It
            replaces topk_idx
        do_handle_copy: the handle keeps a copy of topk_idx. False: it keeps the tensor itself, so
            do not change it
        do_cpu_sync: the results have as many rows as were received. False: R * T, or with do_expand
            the most that there can be; rows behind the received ones are not written. None: True
            without a handle, and with one as in its dispatch
        do_expand: a row for each expert of a token, expert by expert
        use_tma_aligned_col_major_sf: received scales stand column by column
        active_ranks, timeout_us: beyond DeepEP's, see Buffer.dispatch()

        Returns (recv_x, recv_topk_idx, recv_topk_weights, handle, event). Rows are in the order of
        source rank and token. recv_topk_idx has numbers among this rank's experts, and -1 for
        other experts; None with do_expand. The weights are [rows, k], or [rows] with do_expand.
        With a handle, rows of ranks that have gone since its dispatch are zeros. The call returns
        as Buffer.dispatch() does; `async_with_compute_stream` only adds an event.
        """
        is_fixed = handle is not None or do_cpu_sync is False
        is_alone = self._exchange.is_alone(x, topk_idx) and is_fixed
        with self._exchange.call("dispatch", 1 if handle is not None else 2, is_alone):
            for event in (previous_event, previous_event_before_epilogue):
                if event is not None:
                    event.current_stream_wait()
            if do_zero_padding and not do_expand:
                raise ValueError("do_zero_padding needs do_expand")
            participation = self._exchange.participation(active_ranks, timeout_us)
            by_column, stats = use_tma_aligned_col_major_sf, cumulative_local_expert_recv_stats
            if handle is not None:
                self._check_handle(handle)
                if topk_idx is not None:
                    raise ValueError("give either topk_idx or a handle: the handle has its own")
                if do_cpu_sync:
                    raise ValueError("do_cpu_sync has no use with a handle: it has the sizes")
                _check_same(
                    handle,
                    do_expand=do_expand,
                    num_experts=num_experts,
                    num_max_tokens_per_rank=num_max_tokens_per_rank,
                    expert_alignment=expert_alignment,
                )
                self._check_stats(stats, handle.num_experts)
                found = elastic_mode.dispatch_again(
                    self._exchange, x, topk_weights, handle, by_column, participation
                )
            else:
                if topk_idx is None or num_experts is None:
                    raise ValueError("give a handle, or topk_idx and num_experts")
                check_tensor("topk_idx", topk_idx)
                check_number("num_experts", num_experts, 1)
                most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
                if most == 0:
                    raise ValueError("give num_max_tokens_per_rank, in the call or to the buffer")
                form = Form(
                    num_experts,
                    most,
                    1 if expert_alignment is None else expert_alignment,
                    num_sms or self.get_theoretical_num_sms(num_experts, topk_idx.size(-1)),
                    do_handle_copy,
                    do_cpu_sync is not False,
                    do_expand,
                )
                self._check_stats(stats, num_experts)
                found = elastic_mode.dispatch(
                    self._exchange, x, topk_idx, topk_weights, form, by_column, participation
                )
        if stats is not None:
            stats += found.handle.num_unaligned_recv_tokens_per_expert.to(stats.device)
        ended = EventOverlap(EventHandle() if async_with_compute_stream else None)
        return found.rows, found.topk_idx, found.topk_weights, found.handle, ended

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        active_ranks: Tensor | None = None,
        timeout_us: int | None = -1,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Brings the rows back and adds each token's rows, without weights. All ranks call it.

        x: bfloat16 [rows, h], in the order of recv_x; rows behind the received ones are not read
        topk_weights: float32, in the form of recv_topk_weights; brought back beside the rows
        async_with_compute_stream: the call returns before it has ended. Do not read the results, or
            change x, before `event.current_stream_wait()`, which raises its errors. Without
            allow_multiple_reduction the combine of an expanded dispatch of CPU tensors has ended
        bias: bfloat16 [n, h], or two of them: the sum of a token begins with them
        active_ranks, timeout_us: beyond DeepEP's, see Buffer.combine()
        num_sms, num_qps, allocate_on_comm_stream: without effect

        Returns (combined_x, combined_topk_weights, event): bfloat16 [n, h] and float32 [n, k] or
        None. Sums are made in float32, in the order of the last place in top-k at which each rank
        occurs, and rounded once. Before that each rank adds its rows of a token of an expanded
        dispatch, in the order of top-k, and rounds. Without allow_multiple_reduction all rows of
        such a token are added in the order of top-k, and rounded once.
        """
        is_expanded = getattr(handle, "do_expand", True)
        rounds_once = is_expanded and not self.allow_multiple_reduction
        is_alone = self._exchange.is_alone(x, topk_weights)
        if is_alone and rounds_once:
            is_alone = one_rounding.is_at_worst(self._exchange, x, handle, timeout_us)
        with self._exchange.call("combine", 2 if rounds_once else 1, is_alone):
            for event in (previous_event, previous_event_before_epilogue):
                if event is not None:
                    event.current_stream_wait()
            self._check_handle(handle)
            return elastic_mode.combine(
                self._exchange,
                x,
                handle,
                topk_weights,
                [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias],
                self.allow_multiple_reduction,
                self._exchange.participation(active_ranks, timeout_us),
                async_with_compute_stream,
            )

    @property
    def missing_contributions(self) -> Tensor:
        """bool [n] of the last combine, see Buffer.missing_contributions."""
        return self._exchange.missing_contributions()

    def _check_handle(self, handle: Any) -> None:
        elastic_mode.way_of(self._exchange, handle)

    def _check_stats(self, stats: Any, num_experts: int) -> None:
        if stats is not None:
            owners = reference.default_owners(num_experts, self.num_ranks)
            name = "cumulative_local_expert_recv_stats"
            check_sizes(name, stats, torch.int32, (owners.count(self.rank_idx),))

    # ---- settings

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes for calls of these sizes: R * T rows of bfloat16 with k weights, rounded up to
        2 MiB. The last three arguments have no effect."""
        return _size_hint(group.size(), num_max_tokens_per_rank, hidden, num_topk)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Hosts and ranks of a host. If the hosts differ in size: the number of ranks, and 1."""
        return _physical_domain_size(self._runtime.native.hosts)

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(1, R): no sum is made for a host, so results do not depend on the hosts."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """The SMs of a GPU whose copies keep up with its links: an even number, at least 4. Here
        it has no effect.

        nvlink_gbs, rdma_gbs: bandwidths in GB/s; 0: 400 and 50
        sm_read_gbs, sm_write_gbs: the same for an SM
        """
        if num_scaleout_topk != 0:
            raise ValueError("num_scaleout_topk must be 0")
        ranks, hosts = self.num_ranks, self.num_rdma_ranks
        others = num_experts - num_experts // ranks
        misses = math.comb(others, num_topk) / max(1, math.comb(num_experts, num_topk))
        copies = max(ranks * (1 - misses), 1e-9)  # of a token
        far = (hosts - 1) / hosts  # the part that crosses the network
        link = min(
            (rdma_gbs or 50) / far if far > 0 else math.inf,
            (nvlink_gbs or 400) / max(1 - far, 1e-9),
        )
        count = 1.25 * max(link / copies / sm_read_gbs, link / sm_write_gbs)
        least = 4 if self.prefer_overlap_with_compute else 64
        return min(aligned(max(least, math.ceil(count)), 2), _MOST_SMS)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """The queue pairs of a GPU's network card for this many SMs. Here it has no effect."""
        wanted = 16 * num_sms + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Collective: waits for all ranks that are not lost."""
        stream = current_stream()
        if with_cpu_sync and stream is not None:
            stream.synchronize()
        with profiled("barrier"):
            self._runtime.native.normal_barrier()

    @staticmethod
    def capture() -> EventHandle:
        """An event at the present place of the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.Stream | torch.cpu.Stream:
        """The current stream: copies from and to a device run there."""
        return current_stream() or torch.cpu.current_stream()

    @property
    def runtime(self) -> Any:
        """The native buffer."""
        return self._runtime.native

    def destroy(self) -> None:
        """Waits for operations in the background, and frees the memory, also that kept for results.
        Results that the program has stay valid."""
        self._runtime.close()
        self._exchange.let_go()

    # ---- not supported

    _ENGRAM, _PIPELINE, _SESSIONS = "Engram", "sends between stages", "all-gather sessions"
    get_engram_storage_size_hint = staticmethod(not_yet("get_engram_storage_size_hint", _ENGRAM))
    engram_write = not_yet("engram_write", _ENGRAM)
    engram_fetch = not_yet("engram_fetch", _ENGRAM)
    get_pp_buffer_size_hint = staticmethod(not_yet("get_pp_buffer_size_hint", _PIPELINE))
    pp_set_config = not_yet("pp_set_config", _PIPELINE)
    pp_send = not_yet("pp_send", _PIPELINE)
    pp_recv = not_yet("pp_recv", _PIPELINE)
    get_agrs_num_max_session_bytes = staticmethod(
        not_yet("get_agrs_num_max_session_bytes", _SESSIONS)
    )
    get_agrs_buffer_size_hint = staticmethod(not_yet("get_agrs_buffer_size_hint", _SESSIONS))
    create_agrs_session = not_yet("create_agrs_session", _SESSIONS)
    destroy_agrs_session = not_yet("destroy_agrs_session", _SESSIONS)
    agrs_new_session = not_yet("agrs_new_session", _SESSIONS)
    agrs_set_config = not_yet("agrs_set_config", _SESSIONS)
    agrs_get_inplace_tensor = not_yet("agrs_get_inplace_tensor", _SESSIONS)
    all_gather = not_yet("all_gather", _SESSIONS)


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Collective over the group: hosts and ranks of a host. If the hosts differ in size: the number
    of ranks, and 1."""
    members = runtime.members_of(group)
    found = Runtime(
        members, _ALIGNMENT, timeout=None, renormalize=False, on_failure=None, is_normal=True
    )
    try:
        return _physical_domain_size(found.native.hosts)
    finally:
        found.close()


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """(1, R), see ElasticBuffer.get_logical_domain_size()."""
    return 1, group.size()


def _physical_domain_size(hosts: list[list[int]]) -> tuple[int, int]:
    size = sum(len(host) for host in hosts)
    are_equal = len({len(host) for host in hosts}) == 1
    return (len(hosts), len(hosts[0])) if are_equal else (size, 1)


def _size_hint(num_ranks: int, num_max_tokens: int, hidden: int, num_topk: int) -> int:
    if num_max_tokens <= 0 or hidden <= 0:
        raise ValueError(
            "give num_bytes, or num_max_tokens_per_rank and hidden, not "
            f"{num_max_tokens} and {hidden}"
        )
    row = aligned(2 * hidden, 16) + aligned(4 * num_topk, 16)
    return aligned(num_ranks * num_max_tokens * row, _ALIGNMENT)


def _check_same(handle: EPHandle, **given: int | None) -> None:
    for name, value in given.items():
        if value is not None and value != getattr(handle, name):
            raise ValueError(
                f"{name} is {value}, in the handle's dispatch it was {getattr(handle, name)}"
            )
