"""Random programs of collectives against the model. HYPOTHESIS_PROFILE=long for 10,000 per
layout."""

from __future__ import annotations

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import LAYOUTS, SMALL_EAGER
from hypothesis import given
from hypothesis import strategies as st

SIZE = 4
SLOT = (SMALL_EAGER + 64 * SIZE) // 4

_groups: dict[int, dist.ProcessGroup] = {}  # of a rank's process, by size


def run_on_rank(me, size, steps):
    if size not in _groups:
        # All ranks make all groups, once: ranks 0 .. size - 1 each.
        for n in range(1, me.size + 1):
            _groups[n] = dist.new_group(range(n))
    if me.rank >= size:
        return []
    return [oracle.exercise(**{**step, "group": _groups[size]}) for step in steps]


counts = st.one_of(
    st.integers(0, 40),
    st.integers(0, 6_000),
    st.sampled_from([SLOT + d for d in (-1, 0, 1)]),
    st.sampled_from([SLOT // n + d for n in (2, 3, 4) for d in (-17, -1, 0, 1)]),
)


@st.composite
def steps(draw, size):
    verb = draw(st.sampled_from(oracle.VERBS))
    reducing = verb in oracle.REDUCING
    numbers = [*oracle.REAL, *oracle.COMPLEX]
    dtype = draw(st.sampled_from(numbers if reducing else [*numbers, *oracle.MOVED_ONLY]))
    ops = [op for op in oracle.OPS if oracle.reducible(dtype, op)]
    count = draw(counts)
    step = {
        "verb": verb,
        "dtype": dtype,
        "op": draw(st.sampled_from(ops)) if reducing else "SUM",
        "count": count,
        "root": draw(st.integers(0, size - 1)),
        "seed": draw(st.integers(0, 2**16)),
        "layout": draw(st.sampled_from(oracle.LAYOUTS)),
        "asynchronous": draw(st.booleans()),
    }
    if verb.startswith("all_to_all") and draw(st.booleans()):
        row = st.lists(st.integers(0, max(count, 1)), min_size=size, max_size=size)
        step["splits"] = draw(st.lists(row, min_size=size, max_size=size))
    return step


@st.composite
def programs(draw):
    size = draw(st.integers(1, SIZE))
    return size, draw(st.lists(steps(size), min_size=1, max_size=4))


@pytest.mark.parametrize("layout", LAYOUTS)
@given(program=programs())
def test_programs(layout, crews, program):
    size, steps = program
    crew = crews.get(layout, SIZE)
    digests = crew.call(run_on_rank, size, steps)[:size]
    for i, step in enumerate(steps):
        if step["verb"] in oracle.SAME_ON_ALL:
            assert len({found[i] for found in digests}) == 1, step


def test_the_model_finds_wrong_results():
    """The oracle itself: one wrong bit, one changed neighbour, one wrong order must not pass."""
    right = oracle.contents(1, 2, 30, torch.float32)
    for layout in oracle.LAYOUTS:
        held = oracle.Placed(right, layout)
        held.check(right.clone(), "right")
        held = oracle.Placed(right, layout)
        wrong = right.clone()
        wrong[17] += 1e-6
        with pytest.raises(AssertionError, match=r"1 of 30 elements differ, the first is \[17\]"):
            held.check(wrong, "wrong")
    for layout in oracle.LAYOUTS[1:]:
        held = oracle.Placed(right, layout)
        if layout != "transposed":
            held.base.view(-1)[0] = 0
            with pytest.raises(AssertionError, match="around"):
                held.check(right.clone(), "neighbour")
    parts = [torch.tensor([v]) for v in (1e8, 1.0, -1e8)]
    assert oracle.reduced("SUM", parts).item() == 0.0
    assert oracle.reduced("SUM", [parts[0], parts[2], parts[1]]).item() == 1.0
    assert oracle.reduced("AVG", [torch.tensor([-3]), torch.tensor([0])]).item() == -1
    ints = [torch.tensor([200], dtype=torch.uint8)] * 2
    assert oracle.reduced("SUM", ints).item() == 144
