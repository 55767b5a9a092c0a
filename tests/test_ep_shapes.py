"""Dispatch and combine of all shapes, against the reference. HYPOTHESIS_PROFILE=long for many."""

from __future__ import annotations

import os

import ep_crew
import pytest
import torch
from conftest import ALL_LAYOUTS
from ep_crew import SIZE
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = 25 if os.environ.get("HYPOTHESIS_PROFILE", "ci") == "ci" else 10_000
MOST_TOKENS, MOST_HIDDEN, MOST_EXPERTS = 40, 1100, 9
MOST_SENT = 6
_buffers = {}  # of a rank's process


def buffer_of(kind):
    if kind not in _buffers:
        _buffers[kind] = ep_crew.deepep_buffer(MOST_TOKENS, MOST_HIDDEN, MOST_EXPERTS)
    return _buffers[kind]


def on_rank(me, kind, case):
    tokens, experts = case["tokens"], case["experts"]
    inputs = ep_crew.inputs(
        case["seed"], case["counts"], case["hidden"], case["topk"], experts, case["duplicates"]
    )
    if case["to_one_expert"] is not None:
        for one in inputs:
            one.topk_idx.fill_(-1)
            one.topk_idx[:, 0] = case["to_one_expert"]
    buffer = buffer_of(kind)
    for _ in range(2):  # both memories
        ep_crew.round_trip(me, buffer, inputs, tokens, experts, **case["how"], **case["cast"])
    # Nothing of it is left: neither masks nor rows.
    ep_crew.round_trip(me, buffer, inputs, tokens, experts, **case["cast"])


CASTS = [
    {"use_fp8": False},
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
]


MASKS = st.lists(
    st.one_of(st.none(), st.none(), st.none(), st.integers(0, SIZE - 1)),
    min_size=SIZE,
    max_size=SIZE,
)
HOWS = st.fixed_dictionaries(
    {
        "masks": st.one_of(st.none(), st.tuples(MASKS, MASKS)),
        "drops": st.one_of(st.none(), st.integers(0, 7)),
        "zero_copy": st.booleans(),
    }
)


@st.composite
def cases(draw):
    tokens = draw(st.integers(1, MOST_TOKENS))
    experts = draw(st.integers(1, MOST_EXPERTS))
    topk = draw(st.one_of(st.integers(1, 8), st.just(32)))
    duplicates = draw(st.booleans()) or topk > experts
    # An expert has room for R * T rows: with duplicates not all tokens fit.
    most = min(MOST_SENT, tokens // topk if duplicates else tokens)
    counts = draw(st.lists(st.integers(0, most), min_size=SIZE, max_size=SIZE))
    edges = st.sampled_from([1, 2, 127, 128, 129, 255, 512, 513, 1024])
    return {
        "seed": draw(st.integers(0, 2**16)),
        "tokens": tokens,
        "experts": experts,
        "topk": topk,
        "hidden": draw(st.one_of(edges, st.integers(1, MOST_HIDDEN))),
        "duplicates": duplicates,
        "counts": counts,
        "to_one_expert": draw(st.one_of(st.none(), st.none(), st.integers(0, experts - 1))),
        "cast": draw(st.sampled_from(CASTS)),
        "how": draw(HOWS),
    }


@settings(max_examples=EXAMPLES)
@given(case=cases())
def test_shapes(ep, case):
    ep.call(on_rank, ep.layout, case)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@settings(max_examples=EXAMPLES)
@given(case=cases())
def test_shapes_over_wires(layout, crews, case):
    native = ep_crew.EpCrew(layout, lambda: crews.get(layout, SIZE))
    native.call(on_rank, layout, case)


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: "-".join(cast))
@pytest.mark.parametrize(
    "case",
    [
        {"hidden": 7168, "tokens": 3, "counts": [3, 0, 1, 2], "experts": 8, "topk": 8},
        {"hidden": 3584, "tokens": 2, "counts": [2, 2, 2, 2], "experts": 18, "topk": 16},
        {"hidden": 1, "tokens": 4, "counts": [0, 0, 0, 0], "experts": 3, "topk": 2},
        {"hidden": 130, "tokens": 4, "counts": [4, 4, 4, 4], "experts": 2, "topk": 2},
        {"hidden": 130, "tokens": 4, "counts": [4, 0, 0, 0], "experts": 1, "topk": 1},
        {"hidden": 130, "tokens": 32, "counts": [1, 1, 1, 0], "experts": 3, "topk": 32},
    ],
    ids=lambda case: f"h{case['hidden']}-e{case['experts']}-k{case['topk']}",
)
def test_chosen_shapes(ep, case, cast):
    ep.call(chosen_on_rank, case, cast)


def chosen_on_rank(me, case, cast):
    tokens, hidden, experts = case["tokens"], case["hidden"], case["experts"]
    inputs = ep_crew.inputs(1, case["counts"], hidden, case["topk"], experts)
    buffer = ep_crew.deepep_buffer(tokens, hidden, experts)
    assert buffer.runtime.num_bytes >= buffer.num_rdma_bytes
    for _ in range(3):
        ep_crew.round_trip(me, buffer, inputs, tokens, experts, **cast)
    buffer.destroy()


def dropped_on_rank(me, place):
    """Experts of a rank that misses the combine: what names them is missing, but for what the
    combine wants no more."""
    inputs = ep_crew.inputs(3, [8, 3, 8, 8], 256, 2, 8)
    buffer = ep_crew.deepep_buffer(8, 256, 8)
    nobody, without2 = [None] * SIZE, [None, 2, None, None]
    for zero_copy in (False, True):
        ep_crew.round_trip(
            me, buffer, inputs, 8, 8, masks=(nobody, without2), drops=place, zero_copy=zero_copy
        )
        if me.rank in (0, 3):
            names = inputs[me.rank].topk_idx // 2 == 2
            assert torch.equal(buffer.missing_contributions, names[:, 1 - place])
            assert (names[:, place] & ~names[:, 1 - place]).any(), "the case shows nothing"
    buffer.destroy()


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_wanted_no_more_is_not_missing(ep, place):
    ep.call(dropped_on_rank, place)


LARGE = {"tokens": 24, "seed": 5}


@pytest.mark.parametrize("cast", CASTS[:2], ids=lambda cast: "-".join(map(str, cast.values())))
@pytest.mark.parametrize("counts", [[24, 24, 24, 24], [24, 0, 3, 17]], ids=lambda n: str(sum(n)))
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_what_does_not_go_with_a_table(layout, crews, counts, cast):
    """Rows that are pushed, or fetched where there is no room for that; between hosts they come to
    one rank for all of its host."""
    native = ep_crew.EpCrew(layout, lambda: crews.get(layout, SIZE))
    for experts, hidden in ((8, 7168), (3, 4096)):
        case = {**LARGE, "experts": experts, "hidden": hidden, "counts": counts, "cast": cast}
        native.call(large_on_rank, {**case, "topk": min(4, experts)})


@pytest.mark.parametrize("layout", ["mixed", "tcp"])
def test_more_than_is_pushed(layout, crews):
    """5 MB for a host: they are fetched, by one rank for all of its host."""
    native = ep_crew.EpCrew(layout, lambda: crews.get(layout, SIZE))
    case = {**LARGE, "experts": 4, "hidden": 100_000, "counts": [24, 24, 0, 24], "topk": 4}
    native.call(large_on_rank, {**case, "cast": CASTS[0]})


def large_on_rank(me, case):
    inputs = ep_crew.inputs(
        case["seed"], case["counts"], case["hidden"], case["topk"], case["experts"]
    )
    buffer = ep_crew.deepep_buffer(case["tokens"], case["hidden"], case["experts"])
    for _ in range(3):
        ep_crew.round_trip(me, buffer, inputs, case["tokens"], case["experts"], **case["cast"])
    buffer.destroy()


def special_on_rank(me, cast):
    """What is no usual number travels as it is, or as the cast has it."""
    hidden, experts = 384, SIZE
    inputs = ep_crew.inputs(2, [2] * SIZE, hidden, 2, experts)
    for one in inputs:
        one.x[0, :128] = 0
        one.x[0, 128:256] = torch.finfo(torch.bfloat16).max
        one.x[1, :128] = torch.finfo(torch.bfloat16).tiny
        one.x[1, 7] = -0.0
    buffer = ep_crew.deepep_buffer(2, hidden, experts)
    mine = inputs[me.rank]
    found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, 2, experts, **cast)
    ep_crew.check_dispatch(me, found, inputs, 2, experts, **cast)
    buffer.destroy()


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: "-".join(cast))
def test_zeros_large_and_tiny_numbers(ep, cast):
    ep.call(special_on_rank, cast)
