"""Wrong arguments: an error before anything is sent, and the buffer goes on."""

from __future__ import annotations

import re

import ep_crew
import pytest
import torch
import torch.distributed as dist
from ep_crew import SIZE, round_trip
from harness import raised

from mooncake.ep import Buffer, reference

TOKENS, HIDDEN, TOPK, EXPERTS = 4, 256, 3, 8
LOCAL = EXPERTS // SIZE
ROWS = SIZE * TOKENS
OWNERS = reference.default_owners(EXPERTS, SIZE)
TABLE_TOKENS = 16_000  # with top-32
TABLE_EXPERTS = 32_768  # of a rank


def empty(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def routes(value, tokens=TOKENS):
    return torch.full((tokens, TOPK), value)


DISPATCH = {
    "x is no tensor": ({"x": [[1.0]]}, "TypeError", r"\bx\b"),
    "x is None": ({"x": None}, "TypeError", r"\bx\b"),
    "x has one dimension": ({"x": empty(HIDDEN)}, "ValueError", r"\bx\b"),
    "x is float32": ({"x": empty(TOKENS, HIDDEN, dtype=torch.float32)}, "ValueError", "float"),
    "x is FP8": (
        {"x": empty(TOKENS, HIDDEN).to(torch.float8_e4m3fn)}, "ValueError", "(?i)float8"
    ),
    "x is not contiguous": ({"x": empty(HIDDEN, TOKENS).t()}, "ValueError", "contiguous"),
    "x is elsewhere": (
        {"x": torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="meta")}, "ValueError",
        "meta",
    ),
    "more tokens than there may be": (
        {"x": empty(TOKENS + 1, HIDDEN), "topk_idx": routes(0, TOKENS + 1)}, "ValueError",
        f"{TOKENS + 1}.*{TOKENS}",
    ),
    "other tokens in topk_idx": ({"topk_idx": routes(0, TOKENS - 1)}, "ValueError", "topk_idx"),
    "topk_idx is int16": (
        {"topk_idx": routes(0).short()}, "ValueError", "topk_idx is int16, expected int64 or int32"
    ),
    "topk_idx is float": ({"topk_idx": routes(0.5)}, "ValueError", "topk_idx"),
    "topk_idx has one dimension": (
        {"topk_idx": torch.zeros(TOKENS, dtype=torch.int64)}, "ValueError", "topk_idx"
    ),
    "topk_idx is not contiguous": (
        {"topk_idx": torch.zeros(TOPK, TOKENS, dtype=torch.int64).t()}, "ValueError", "topk_idx"
    ),
    "an expert that is not there": ({"topk_idx": routes(EXPERTS)}, "ValueError", f"{EXPERTS}"),
    "an expert below -1": ({"topk_idx": routes(-2)}, "ValueError", "-2"),
    "no experts": ({"num_experts": 0}, "ValueError", "num_experts|experts"),
    "more experts than there is room for": ({"num_experts": 1000}, "ValueError", "NEED"),
    "more tokens than numbers have": (
        {"num_max_dispatch_tokens_per_rank": 2**62}, "ValueError",
        f"num_max_dispatch_tokens_per_rank is {2**62}",
    ),
    "more experts than numbers have": (
        {"num_experts": 2**62}, "ValueError", f"num_experts is {2**62}"
    ),
    "tokens in words": (
        {"num_max_dispatch_tokens_per_rank": "24"}, "TypeError",
        "num_max_dispatch_tokens_per_rank must be an int",
    ),
    "more tokens than there is room for": (
        {"num_max_dispatch_tokens_per_rank": 1000}, "ValueError", "NEED"
    ),
    "rows that are too long": ({"x": empty(TOKENS, 100 * HIDDEN)}, "ValueError", "NEED"),
    "ue8m0 without round_scale": (
        {"use_fp8": True, "use_ue8m0": True}, "ValueError", "round_scale"
    ),
    "two ways to wait": (
        {"async_finish": True, "return_recv_hook": True}, "ValueError", "return_recv_hook"
    ),
    "statistics of other experts": (
        {"cumulative_local_expert_recv_stats": empty(LOCAL + 1, dtype=torch.int32)}, "ValueError",
        f"{LOCAL}",
    ),
    "statistics as int64": (
        {"cumulative_local_expert_recv_stats": empty(LOCAL, dtype=torch.int64)}, "ValueError", ""
    ),
    "waits as int32": (
        {"dispatch_wait_recv_cost_stats": empty(SIZE, dtype=torch.int32)}, "ValueError", ""
    ),
    "a short mask": ({"active_ranks": torch.ones(SIZE - 1).int()}, "ValueError", "active_ranks"),
    "a float mask": ({"active_ranks": torch.ones(SIZE)}, "ValueError", "active_ranks"),
    "a square mask": (
        {"active_ranks": torch.ones(SIZE, SIZE).int()}, "ValueError", "active_ranks"
    ),
}  # fmt: skip

COMBINE = {
    "x of other experts": ({"x": empty(LOCAL + 1, ROWS, HIDDEN)}, "ValueError", r"\bx\b"),
    "x of fewer rows": ({"x": empty(LOCAL, ROWS - 1, HIDDEN)}, "ValueError", r"\bx\b"),
    "x of other length": ({"x": empty(LOCAL, ROWS, HIDDEN + 1)}, "ValueError", r"\bx\b"),
    "x has two dimensions": ({"x": empty(ROWS, HIDDEN)}, "ValueError", r"\bx\b"),
    "x is float32": ({"x": empty(LOCAL, ROWS, HIDDEN).float()}, "ValueError", "float"),
    "x is not contiguous": (
        {"x": empty(LOCAL, HIDDEN, ROWS).transpose(1, 2)}, "ValueError", "contiguous"
    ),
    "weights are bfloat16": ({"topk_weights": empty(TOKENS, TOPK)}, "ValueError", "topk_weights"),
    "weights of other tokens": (
        {"topk_weights": torch.zeros(TOKENS + 1, TOPK)}, "ValueError", "topk_weights"
    ),
    "fewer weights": (
        {"topk_weights": torch.zeros(TOKENS, TOPK - 1)}, "ValueError", "topk_weights"
    ),
    "an expert that is not there": ({"topk_idx": routes(EXPERTS)}, "ValueError", f"{EXPERTS}"),
    "out of other tokens": ({"out": empty(TOKENS + 1, HIDDEN)}, "ValueError", "out"),
    "out is float32": ({"out": empty(TOKENS, HIDDEN).float()}, "ValueError", "out"),
    "out is not contiguous": ({"out": empty(HIDDEN, TOKENS).t()}, "ValueError", "out"),
    "a short mask": ({"active_ranks": torch.ones(SIZE - 1).int()}, "ValueError", "active_ranks"),
    "logfmt and zero copy": (
        {"use_logfmt": True, "zero_copy": True}, "ValueError", "logfmt.*zero_copy|zero_copy.*logfmt"
    ),
    "two ways to wait": (
        {"async_finish": True, "return_recv_hook": True}, "ValueError", "return_recv_hook"
    ),
    "copied parts of the handle": ({"handle": "parts"}, "TypeError", "keep the handle as it is"),
    "a handle of another buffer": ({"handle": "other"}, "ValueError", "handle"),
}  # fmt: skip


# Values are read after the call has begun if they are on a device. A wrong one ends the buffer:
# tests/test_ep_device.py and tests/test_ep_kernels.py. Where the host waits, it ends only the call,
# on all ranks.
VALUES = [
    "an expert that is not there",
    "an expert below -1",
    "rows of one expert",
    "rows of one expert in the background",
]


def skip_values_of_a_device(ep, mistake, by):
    if ep.layout == "device-host" and len(by) < SIZE and mistake in VALUES:
        pytest.skip("on a device it is an error of all ranks")
    if ends_buffers(ep) and mistake in VALUES:
        pytest.skip("it ends the buffer")


def ends_buffers(ep):
    """An error of an operation does."""
    return ep.layout not in ("shm", "device-host")


def at_home(changes):
    """The arguments, with tensors on the default device."""
    there = torch.get_default_device()
    return {
        name: value.to(there) if isinstance(value, torch.Tensor) and value.is_cpu else value
        for name, value in changes.items()
    }


def wrong_dispatch_on_rank(me, by, mistake):
    inputs = ep_crew.inputs(1, [TOKENS] * SIZE, HIDDEN, TOPK, EXPERTS)
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    changes, kind, text = DISPATCH[mistake]
    arguments = {
        "x": inputs[me.rank].x,
        "topk_idx": inputs[me.rank].topk_idx,
        "num_max_dispatch_tokens_per_rank": TOKENS,
        "num_experts": EXPERTS,
        "use_fp8": False,
    }
    arguments.update(at_home(changes))
    if me.rank in by:
        check_refusal(me, buffer, buffer.low_latency_dispatch, arguments, kind, text)
    round_trip(me, buffer, inputs, TOKENS, EXPERTS)
    buffer.destroy()


def check_refusal(me, buffer, function, arguments, kind, text):
    found, message = raised(function, **arguments)
    assert found == kind, message
    if text == "NEED":  # both numbers are told
        need = Buffer.get_low_latency_rdma_size_hint(
            arguments["num_max_dispatch_tokens_per_rank"],
            arguments["x"].size(1),
            SIZE,
            arguments["num_experts"],
        )
        text = rf"(?s)(?=.*\b{need}\b)(?=.*\b{buffer.num_rdma_bytes}\b)"
    assert re.search(text, message), message


@pytest.mark.parametrize("by", [[0], list(range(SIZE))], ids=["one", "all"])
@pytest.mark.parametrize("mistake", DISPATCH)
def test_a_wrong_dispatch(ep, mistake, by):
    skip_values_of_a_device(ep, mistake, by)
    ep.call(wrong_dispatch_on_rank, by, mistake)


def wrong_combine_on_rank(me, by, mistake):
    inputs = ep_crew.inputs(1, [TOKENS] * SIZE, HIDDEN, TOPK, EXPERTS)
    mine = inputs[me.rank]
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    other = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    of_other = other.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False)
    found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False)
    rows = ep_crew.check_dispatch(me, found, inputs, TOKENS, EXPERTS)
    changes, kind, text = COMBINE[mistake]
    arguments = {
        "x": ep_crew.my_answers(me, rows, OWNERS),
        "topk_idx": mine.topk_idx,
        "topk_weights": mine.weights,
        "handle": found[2],
    }
    right = dict(arguments)
    arguments.update(at_home(changes))
    if arguments["handle"] == "parts":
        arguments["handle"] = (found[2][0].clone(), *found[2][1:])
    elif arguments["handle"] == "other":
        arguments["handle"] = of_other[2]
    if me.rank in by:
        check_refusal(me, buffer, buffer.low_latency_combine, arguments, kind, text)
    combined, event, _ = buffer.low_latency_combine(**right)
    missing = event.missing_contributions
    ep_crew.check_combine(me, combined, missing, inputs, TOKENS, EXPERTS)
    round_trip(me, buffer, inputs, TOKENS, EXPERTS)
    buffer.destroy()
    other.destroy()


@pytest.mark.parametrize("by", [[0], list(range(SIZE))], ids=["one", "all"])
@pytest.mark.parametrize("mistake", COMBINE)
def test_a_wrong_combine(ep, mistake, by):
    skip_values_of_a_device(ep, mistake, by)
    ep.call(wrong_combine_on_rank, by, mistake)


def other_wrongs_on_rank(me):
    inputs = ep_crew.inputs(1, [TOKENS] * SIZE, HIDDEN, TOPK, EXPERTS)
    mine = inputs[me.rank]
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    assert raised(lambda: buffer.missing_contributions)[0] == "RuntimeError"
    found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False)
    assert not hasattr(found[3], "missing_contributions")
    for rank in (-1, SIZE):
        kind, text = raised(buffer.low_latency_update_mask_buffer, rank, True)
        assert kind == "ValueError"
        assert str(rank) in text
    for status in (torch.zeros(SIZE), torch.zeros(SIZE + 1, dtype=torch.int32)):
        assert raised(buffer.low_latency_query_mask_buffer, status)[0] == "ValueError"
    parts = (found[2][0].clone(), *found[2][1:])
    assert raised(buffer.get_next_low_latency_combine_buffer, parts)[0] == "TypeError"
    kind, text = raised(buffer.clean_low_latency_buffer, 1000, HIDDEN, EXPERTS)
    assert kind == "ValueError"
    assert str(buffer.num_rdma_bytes) in text
    kind, text = raised(buffer.clean_low_latency_buffer, TOKENS, 2**62, EXPERTS)
    assert (kind, f"hidden is {2**62}" in text) == ("ValueError", True), text
    for place, name in enumerate(
        ("num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts")
    ):
        sizes = [TOKENS, HIDDEN, SIZE, EXPERTS]
        sizes[place] = 2**62
        kind, text = raised(Buffer.get_low_latency_rdma_size_hint, *sizes)
        assert (kind, f"{name} is {2**62}" in text) == ("ValueError", True), text
    kind, text = raised(buffer.get_dispatch_layout, mine.topk_idx.short(), EXPERTS)
    assert (kind, "topk_idx is int16" in text) == ("ValueError", True), text
    with torch.device("meta"):
        buffer.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS)
    round_trip(me, buffer, inputs, TOKENS, EXPERTS)
    buffer.destroy()
    buffer.destroy()
    kind, text = raised(buffer.low_latency_query_mask_buffer, torch.zeros(SIZE).int())
    assert kind == "RuntimeError"
    assert "destroyed" in text


def test_other_mistakes(ep):
    ep.call(other_wrongs_on_rank)


# Too much for the buffer or for an expert: the arguments, and all that the error tells.
TOO_MUCH = {
    "rows of one expert": (
        {"topk_idx": routes(5)},
        f"rank 1 .*{TOKENS * TOPK} rows to expert 5 of rank 2, .* room for {TOKENS} ",
    ),
    "rows of one expert in the background": (
        {"topk_idx": routes(5), "async_finish": True},
        f"rank 1 .*{TOKENS * TOPK} rows to expert 5 of rank 2, .* room for {TOKENS} ",
    ),
    "tokens": ({"num_max_dispatch_tokens_per_rank": 1000}, "rank 1.*1000 tokens.*need.*bytes"),
    "a long table": (
        {
            "x": empty(TABLE_TOKENS, 1),
            "topk_idx": torch.full((TABLE_TOKENS, 32), -1),
            "num_max_dispatch_tokens_per_rank": TABLE_TOKENS,
            "num_experts": SIZE,
        },
        f"rank 1.*{TABLE_TOKENS} tokens.*bytes, there is room for",
    ),
    "the experts of a rank": (
        {
            "x": empty(1, 1),
            "topk_idx": routes(-1, 1),
            "num_max_dispatch_tokens_per_rank": 1,
            "num_experts": TABLE_EXPERTS * SIZE,
        },
        f"rank 1.*rows of {TABLE_EXPERTS} experts.*there is room for.*fewer experts",
    ),
}
# For tables that have to be too long for their place, not for the buffer.
ROOMY = {
    "a long table": (TABLE_TOKENS, 1, SIZE),
    "the experts of a rank": (1, 1, TABLE_EXPERTS * SIZE),
}


def too_much_on_rank(me, what):
    """Only one rank asks for too much, and nothing has happened then: not to the tensors that it
    gave, not to the rows of the dispatch before, and the others wait for its next call."""
    of_both = [ep_crew.inputs(seed, [TOKENS] * SIZE, HIDDEN, TOPK, EXPERTS) for seed in (1, 2)]
    changes, text = TOO_MUCH[what]
    buffer = ep_crew.deepep_buffer(*ROOMY.get(what, (TOKENS, HIDDEN, EXPERTS)))
    calls = [(one[me.rank].x, one[me.rank].topk_idx, TOKENS, EXPERTS) for one in of_both]
    found = [buffer.low_latency_dispatch(*calls[0], use_fp8=False)]
    arguments = {
        "x": calls[0][0],
        "topk_idx": calls[0][1],
        "num_max_dispatch_tokens_per_rank": TOKENS,
        "num_experts": EXPERTS,
        "use_fp8": False,
        **at_home(changes),
    }
    written = {
        "active_ranks": torch.arange(1, SIZE + 3, dtype=torch.int32),
        "cumulative_local_expert_recv_stats": torch.full(
            (arguments["num_experts"] // SIZE,), 7, dtype=torch.int32
        ),
        "dispatch_wait_recv_cost_stats": torch.full((SIZE,), 7),
    }
    before = {name: tensor.clone() for name, tensor in written.items()}
    for _ in range(3 if me.rank == 1 else 0):
        kind, message = raised(buffer.low_latency_dispatch, **arguments, **written)
        assert kind == "ValueError", message
        assert re.search(f"(?s){text}", message), message
        for name, tensor in written.items():
            assert torch.equal(tensor, before[name]), name
    found.append(buffer.low_latency_dispatch(*calls[1], use_fp8=False))
    rows = [
        ep_crew.check_dispatch(me, one, inputs, TOKENS, EXPERTS)
        for one, inputs in zip(found, of_both, strict=True)
    ]
    for one, inputs, mine in zip(found, of_both, rows, strict=True):
        given = (inputs[me.rank].topk_idx, inputs[me.rank].weights, one[2])
        answers = ep_crew.my_answers(me, mine, OWNERS)
        combined, event, _ = buffer.low_latency_combine(answers, *given)
        missing = event.missing_contributions
        ep_crew.check_combine(me, combined, missing, inputs, TOKENS, EXPERTS)
    buffer.destroy()


@pytest.mark.parametrize("what", TOO_MUCH)
def test_too_much_is_refused_before_anything_is_written(ep, what):
    skip_values_of_a_device(ep, what, [1])
    if "kernels" in ep.layout and what == "a long table":
        pytest.skip("kernels have room for it")
    ep.call(too_much_on_rank, what)


def mismatch_on_rank(me):
    inputs = ep_crew.inputs(1, [TOKENS] * SIZE, HIDDEN, TOPK, EXPERTS)
    mine = inputs[me.rank]
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    tokens = TOKENS - 1 if me.rank == 1 else TOKENS
    kind, text = raised(
        buffer.low_latency_dispatch, mine.x[:tokens], mine.topk_idx[:tokens], tokens, EXPERTS
    )
    assert kind in ("DistBackendError", "RuntimeError"), text
    assert "different" in text
    round_trip(me, buffer, inputs, TOKENS, EXPERTS)
    buffer.destroy()


def test_ranks_that_call_different_things(ep):
    if ends_buffers(ep):
        pytest.skip("it ends the buffer")
    ep.call(mismatch_on_rank)


def kept_over_a_mismatch_on_rank(me, cleans):
    both = [ep_crew.inputs(seed, [TOKENS] * SIZE, HIDDEN, TOPK, EXPERTS) for seed in (1, 2)]
    calls = [(given[me.rank].x, given[me.rank].topk_idx, TOKENS, EXPERTS) for given in both]
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    found = [buffer.low_latency_dispatch(*calls[0], use_fp8=False)]
    if cleans:
        buffer.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS)
    tokens = TOKENS - 1 if me.rank == 1 else TOKENS
    x, topk_idx = (tensor[:tokens] for tensor in calls[1][:2])
    kind, text = raised(buffer.low_latency_dispatch, x, topk_idx, tokens, EXPERTS, use_fp8=False)
    assert kind in ("DistBackendError", "RuntimeError"), text
    if cleans:
        buffer.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS)
    found.append(buffer.low_latency_dispatch(*calls[1], use_fp8=False))
    for one, given in zip(found, both, strict=True):
        rows = ep_crew.check_dispatch(me, one, given, TOKENS, EXPERTS)
        answers, mine = ep_crew.my_answers(me, rows, OWNERS), given[me.rank]
        combined, event, _ = buffer.low_latency_combine(
            answers, mine.topk_idx, mine.weights, one[2]
        )
        missing = event.missing_contributions
        ep_crew.check_combine(me, combined, missing, given, TOKENS, EXPERTS)
    buffer.destroy()


@pytest.mark.parametrize("cleans", [False, True])
def test_a_mismatch_leaves_the_rows_of_the_dispatch_before(ep, cleans):
    if ends_buffers(ep):
        pytest.skip("it ends the buffer")
    ep.call(kept_over_a_mismatch_on_rank, cleans)


# ---- without ranks


def test_what_a_buffer_cannot_be_made_of():
    with pytest.raises(ValueError, match="group or a comm"):
        Buffer(None)
    group = single_group()
    try:
        for named in ({"num_rdma_bytes": 100}, {"num_nvl_bytes": -128}):
            with pytest.raises(ValueError, match="multiple of 128"):
                Buffer(group, **named)
        with pytest.raises(ValueError, match="on_failure"):
            Buffer(group, low_latency_mode=True, on_failure="rise")
        without = Buffer(group)
        assert without.runtime is None
        topk_idx = torch.zeros(3, 1, dtype=torch.int64)
        _, _, per_expert, is_in_rank, _ = without.get_dispatch_layout(topk_idx, 2)
        with pytest.raises(RuntimeError, match="no memory for the normal mode"):
            without.dispatch(
                torch.zeros(3, 4), is_token_in_rank=is_in_rank, num_tokens_per_expert=per_expert
            )
        without.destroy()
    finally:
        dist.destroy_process_group()


def single_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD
