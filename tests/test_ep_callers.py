"""SGLang's and vLLM's calls of both Buffers, argument by argument as they make them."""

from __future__ import annotations

import ep_crew
import pytest
import torch
import torch.distributed as dist
from ep_crew import SIZE, check_combine, check_dispatch, my_answers

from mooncake.ep import reference

TOKENS, HIDDEN, TOPK, EXPERTS = 16, 2048, 8, 32
OWNERS = reference.default_owners(EXPERTS, SIZE)
FIRST, LATER = -1, 10_000_000  # SGLang's timeouts, in microseconds


def batch(me, seed):
    inputs = ep_crew.inputs(seed, [16, 3, 0, 7], HIDDEN, TOPK, EXPERTS)
    return inputs, inputs[me.rank]


# ---- SGLang


def sglang_mooncake_on_rank(me, async_finish):
    from mooncake.mooncake_ep_buffer import Buffer

    group = dist.group.WORLD
    num_bytes = Buffer.get_ep_buffer_size_hint(TOKENS, HIDDEN, group.size(), EXPERTS)
    buffer = Buffer(group, num_bytes)
    assert buffer.group_size == SIZE
    return_recv_hook = not async_finish
    active_ranks = torch.ones(8, dtype=torch.int32)  # max_ep_size
    for number, timeout_us in enumerate((FIRST, LATER, LATER)):
        inputs, mine = batch(me, number)
        hidden, recv_count, handle, event, hook = buffer.dispatch(
            mine.x,
            mine.topk_idx,
            active_ranks,
            TOKENS,
            EXPERTS,
            timeout_us,
            use_fp8=True,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )
        hook() if return_recv_hook else event.current_stream_wait()
        found = (hidden, recv_count, handle, event, hook)
        rows = check_dispatch(me, found, inputs, TOKENS, EXPERTS, use_fp8=True)
        combined, event, hook = buffer.combine(
            my_answers(me, rows, OWNERS),
            mine.topk_idx,
            mine.weights,
            active_ranks,
            timeout_us,
            handle,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )
        hook() if return_recv_hook else event.current_stream_wait()
        missing = buffer.missing_contributions
        check_combine(me, combined, missing, inputs, TOKENS, EXPERTS, use_fp8=True)
        assert active_ranks.tolist() == [1] * 8
    buffer.update_ep_member()


@pytest.mark.parametrize("async_finish", [False, True])
def test_sglang_with_mooncake(ep, async_finish):
    ep.call(sglang_mooncake_on_rank, async_finish)


def sglang_deepep_on_rank(me, low_latency_only):
    from mooncake.ep.on_path.deep_ep import Buffer, Config

    group, hidden_bytes = dist.group.WORLD, HIDDEN * 2
    num_nvl_bytes = num_rdma_bytes = 0
    if not low_latency_only:
        for config in (
            Config(num_sms=24, num_max_nvl_chunked_send_tokens=8),
            Buffer.get_dispatch_config(group.size()),
            Buffer.get_combine_config(group.size()),
        ):
            num_nvl_bytes = max(
                config.get_nvl_buffer_size_hint(hidden_bytes, group.size()), num_nvl_bytes
            )
            num_rdma_bytes = max(
                config.get_rdma_buffer_size_hint(hidden_bytes, group.size()), num_rdma_bytes
            )
        assert num_nvl_bytes > 0
        assert num_rdma_bytes == 0
    num_rdma_bytes = max(
        Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, group.size(), EXPERTS),
        num_rdma_bytes,
    )
    buffer = Buffer(
        group,
        num_nvl_bytes,
        num_rdma_bytes,
        low_latency_mode=True,
        num_qps_per_rank=max(EXPERTS // group.size(), Buffer.num_sms // 2),
        allow_mnnvl=True,
    )
    assert buffer.low_latency_mode
    if not low_latency_only:
        buffer.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS)
    for number, return_recv_hook in enumerate((False, True, True)):
        inputs, mine = batch(me, number)
        rounded = bool(number)
        packed_recv_hidden, recv_count, handle, event, hook = buffer.low_latency_dispatch(
            mine.x,
            mine.topk_idx,
            TOKENS,
            EXPERTS,
            use_fp8=True,
            async_finish=not return_recv_hook,
            return_recv_hook=return_recv_hook,
            round_scale=rounded,
            use_ue8m0=rounded,
        )
        hook() if return_recv_hook else event.current_stream_wait()
        cast = {"use_fp8": True, "round_scale": rounded, "use_ue8m0": rounded}
        found = (packed_recv_hidden, recv_count, handle, event, hook)
        rows = check_dispatch(me, found, inputs, TOKENS, EXPERTS, **cast)
        combined, event, hook = buffer.low_latency_combine(
            x=my_answers(me, rows, OWNERS),
            topk_idx=mine.topk_idx,
            topk_weights=mine.weights,
            handle=handle,
            async_finish=not return_recv_hook,
            return_recv_hook=return_recv_hook,
        )
        hook() if return_recv_hook else event.current_stream_wait()
        missing = event.missing_contributions
        check_combine(me, combined, missing, inputs, TOKENS, EXPERTS, **cast)
    assert Buffer.capture().event is not None
    buffer.destroy()


@pytest.mark.parametrize("low_latency_only", [True, False])
def test_sglang_with_deepep(ep, low_latency_only):
    ep.call(sglang_deepep_on_rank, low_latency_only)


# ---- vLLM


def vllm_mooncake_on_rank(me, use_fp8):
    from mooncake.mooncake_ep_buffer import Buffer

    num_bytes = Buffer.get_ep_buffer_size_hint(TOKENS, HIDDEN, SIZE, EXPERTS)
    buffer = Buffer(dist.group.WORLD, num_bytes)
    for number, do_recv_hook in enumerate((True, False)):
        inputs, mine = batch(me, number)
        expert_x, recv_count, handle, _, hook = buffer.dispatch(
            mine.x,
            mine.topk_idx,
            torch.ones(SIZE, dtype=torch.int32),
            TOKENS,
            EXPERTS,
            timeout_us=-1,
            use_fp8=use_fp8,
            async_finish=False,
            return_recv_hook=True,
        )
        hook()
        found = (expert_x, recv_count, handle, _, hook)
        rows = check_dispatch(me, found, inputs, TOKENS, EXPERTS, use_fp8=use_fp8)
        output = torch.full_like(mine.x, float("nan"))
        _, _, recv_hook = buffer.combine(
            my_answers(me, rows, OWNERS),
            mine.topk_idx,
            mine.weights,
            torch.ones(SIZE, dtype=torch.int32),
            timeout_us=-1,
            handle=handle,
            zero_copy=False,
            async_finish=False,
            return_recv_hook=do_recv_hook,
            out=output,
        )
        if recv_hook is not None:
            recv_hook()
        missing = buffer.missing_contributions
        check_combine(me, output, missing, inputs, TOKENS, EXPERTS, use_fp8=use_fp8)


@pytest.mark.parametrize("use_fp8", [False, True])
def test_vllm_with_mooncake(ep, use_fp8):
    ep.call(vllm_mooncake_on_rank, use_fp8)


def vllm_deepep_on_rank(me):
    from mooncake.ep.on_path import deep_ep

    cpu_group = dist.new_group(backend="gloo")
    num_rdma_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, num_ranks=SIZE, num_experts=EXPERTS
    )
    handle_of_manager = deep_ep.Buffer(
        group=cpu_group,
        num_nvl_bytes=1024 * 1024 * 1024,
        num_rdma_bytes=num_rdma_bytes,
        low_latency_mode=True,
        num_qps_per_rank=EXPERTS // SIZE,
        explicitly_destroy=True,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        enable_shrink=True,
    )
    buffer, last_mask = handle_of_manager, torch.zeros(SIZE, dtype=torch.int32)
    micro_batches = [batch(me, number) for number in (1, 2)]
    dispatched = []
    for _, mine in micro_batches:
        dispatched.append(
            buffer.low_latency_dispatch(
                mine.x,
                mine.topk_idx,
                TOKENS,
                EXPERTS,
                use_fp8=True,
                round_scale=True,
                use_ue8m0=True,
                async_finish=False,
                return_recv_hook=True,
            )
        )
        dispatched[-1][4]()
    cast = {"use_fp8": True, "round_scale": True, "use_ue8m0": True}
    for (inputs, mine), found in zip(micro_batches, dispatched, strict=True):
        rows = check_dispatch(me, found, inputs, TOKENS, EXPERTS, **cast)
        output = torch.full_like(mine.x, float("nan"))
        _, _, recv_hook = buffer.low_latency_combine(
            my_answers(me, rows, OWNERS),
            mine.topk_idx,
            mine.weights,
            found[2],
            async_finish=False,
            zero_copy=False,
            return_recv_hook=True,
            out=output,
        )
        recv_hook()
        missing = buffer.missing_contributions
        check_combine(me, output, missing, inputs, TOKENS, EXPERTS, **cast)
    mask = torch.zeros(SIZE, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(mask)
    assert torch.equal(mask, last_mask)
    # After a fault.
    dist.barrier(cpu_group)
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    dist.barrier(cpu_group)
    buffer.low_latency_clean_mask_buffer()
    ep_crew.round_trip(me, buffer, micro_batches[0][0], TOKENS, EXPERTS)
    buffer.destroy()
    dist.destroy_process_group(cpu_group)


def test_vllm_with_deepep(ep):
    ep.call(vllm_deepep_on_rank)


def vllm_high_throughput_on_rank(me):
    """vLLM's backend for prefill: one buffer, two micro batches under way."""
    from mooncake.ep.on_path import deep_ep

    buffer = deep_ep.Buffer(
        group=dist.group.WORLD, num_nvl_bytes=2**30, num_rdma_bytes=0, low_latency_mode=False,
        num_qps_per_rank=1, explicitly_destroy=True,
    )  # fmt: skip
    before = deep_ep.Buffer.num_sms
    deep_ep.Buffer.set_num_sms(before)
    handles = []
    for number in (1, 2):
        _, mine = batch(me, number)
        previous_event = buffer.capture()
        per_rank, per_rdma_rank, per_expert, is_in_rank, event = buffer.get_dispatch_layout(
            topk_idx=mine.topk_idx, num_experts=EXPERTS, previous_event=previous_event,
            async_finish=False, allocate_on_comm_stream=False,
        )  # fmt: skip
        token_data, topk_ids, topk_weights, per_expert_list, handle, event = buffer.dispatch(
            x=mine.x, handle=None, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert, topk_idx=mine.topk_idx, topk_weights=mine.weights,
            expert_alignment=1, config=deep_ep.Buffer.get_dispatch_config(me.size),
            previous_event=previous_event, async_finish=True, allocate_on_comm_stream=False,
        )  # fmt: skip
        if event.event is not None:
            event.current_stream_wait()
        assert sum(per_expert_list) == (topk_ids >= 0).sum()
        handles.append((mine, handle, token_data, topk_ids, topk_weights))
    for mine, handle, token_data, topk_ids, topk_weights in handles:
        # Each expert gives the row itself; the weights are applied before the combine.
        scale = topk_weights.sum(dim=1, keepdim=True)
        combined, _, event = buffer.combine(
            x=(token_data * scale).bfloat16(), handle=handle, topk_weights=None,
            config=deep_ep.Buffer.get_combine_config(me.size), previous_event=buffer.capture(),
            async_finish=True, allocate_on_comm_stream=False,
        )  # fmt: skip
        event.current_stream_wait()
        scale = mine.weights.masked_fill(mine.topk_idx < 0, 0).sum(dim=1, keepdim=True)
        torch.testing.assert_close(combined, (mine.x * scale).bfloat16(), rtol=0.05, atol=0.05)
        assert (topk_ids < EXPERTS // SIZE + 1).all()
    with pytest.raises(RuntimeError, match="low_latency_mode=True"):
        buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS)
    buffer.destroy()


def test_vllm_in_normal_mode(ep):
    ep.call(vllm_high_throughput_on_rank)


def vllm_elastic_on_rank(me):
    """DeepEP 2's class: rows for each expert in decoding, for each token in prefill."""
    import mooncake.ep as deep_ep

    buffer = deep_ep.ElasticBuffer(
        group=dist.group.WORLD,
        num_max_tokens_per_rank=64,
        hidden=HIDDEN,
        num_topk=TOPK,
        use_fp8_dispatch=False,
        allow_hybrid_mode=True,
        prefer_overlap_with_compute=True,
        allow_multiple_reduction=True,
        num_cpu_timeout_secs=1800,
        num_gpu_timeout_secs=1800,
        explicitly_destroy=True,
    )
    assert buffer.get_theoretical_num_sms(num_experts=EXPERTS, num_topk=TOPK) >= 4
    for number, (most, do_expand) in enumerate(((16, True), (64, False), (32, True))):
        _, mine = batch(me, number)
        recv_x, recv_topk_idx, recv_weights, handle, _ = buffer.dispatch(
            x=mine.x,
            topk_idx=mine.topk_idx,
            topk_weights=mine.weights,
            num_experts=EXPERTS,
            num_max_tokens_per_rank=most,  # a power of two, by the batch
            do_expand=do_expand,
            do_cpu_sync=do_expand,
            async_with_compute_stream=False,
        )
        assert (recv_topk_idx is None) == do_expand
        rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        local = EXPERTS // SIZE
        answers = torch.zeros_like(recv_x)
        if do_expand:
            counts = handle.num_recv_tokens_per_expert_list
            assert (len(counts), sum(counts)) == (local, len(recv_x))
            scales = torch.arange(local).repeat_interleave(torch.tensor(counts)) + 1
            answers = (recv_x.float() * (scales * recv_weights).unsqueeze(1)).bfloat16()
        else:
            assert handle.num_recv_tokens_per_expert_list == []
            used = recv_topk_idx[:rows]
            scales = ((used + 1) * (used >= 0) * recv_weights[:rows]).sum(1, keepdim=True)
            answers[:rows] = (recv_x[:rows].float() * scales).bfloat16()
        combined, _, event = buffer.combine(
            x=answers,
            handle=handle,
            topk_weights=None,
            async_with_compute_stream=True,
            allocate_on_comm_stream=False,
        )
        event.current_stream_wait()
        there = mine.topk_idx >= 0
        scales = ((mine.topk_idx % local + 1) * there * mine.weights).sum(1, keepdim=True)
        torch.testing.assert_close(combined.float(), mine.x.float() * scales, rtol=0.03, atol=0.05)
    buffer.destroy()


def test_vllm_with_deepep_2(ep):
    ep.call(vllm_elastic_on_rank)


def sglang_normal_on_rank(me):
    """SGLang's dispatcher for prefill with DeepEP: FP8, aligned numbers for its matrix products."""
    from mooncake.ep import fp8
    from mooncake.ep.on_path import deep_ep

    buffer = deep_ep.Buffer(dist.group.WORLD, 2**24, 0, low_latency_mode=False)
    _, mine = batch(me, 3)
    there = mine.x.device
    x = tuple(one.to(there) for one in fp8.cast_to_fp8(mine.x.cpu(), False))
    previous_event = deep_ep.Buffer.capture()
    per_rank, per_rdma_rank, per_expert, is_in_rank, previous_event = buffer.get_dispatch_layout(
        mine.topk_idx, EXPERTS, previous_event=previous_event, async_finish=True,
        allocate_on_comm_stream=previous_event is not None,
    )  # fmt: skip
    recv_x, _, _, counts, handle, event = buffer.dispatch(
        x, topk_idx=mine.topk_idx, topk_weights=mine.weights, num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert, previous_event=previous_event, async_finish=True,
        allocate_on_comm_stream=True, expert_alignment=128,
        config=deep_ep.Config(num_sms=24),
    )  # fmt: skip
    event.current_stream_wait()
    assert all(count % 128 == 0 for count in counts)
    rows = recv_x[0].cpu().float().unflatten(1, (-1, 128)) * recv_x[1].cpu().unsqueeze(2)
    combined, _, event = buffer.combine(
        rows.flatten(1).bfloat16().to(there), handle, async_finish=True,
        previous_event=deep_ep.Buffer.capture(), allocate_on_comm_stream=True,
    )  # fmt: skip
    event.current_stream_wait()
    copies = is_in_rank.sum(dim=1, keepdim=True)
    torch.testing.assert_close(combined.float(), (mine.x * copies).float(), rtol=0.1, atol=0.1)


def test_sglang_in_normal_mode(ep):
    ep.call(sglang_normal_on_rank)
