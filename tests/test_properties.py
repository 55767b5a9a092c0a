"""Random programs over everything that c10d offers, against the model. HYPOTHESIS_PROFILE=long
for 10,000 per layout."""

from __future__ import annotations

import random

import composite_calls
import mistakes
import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import BLOCKING_DEVICE_LAYOUT, LAYOUTS, SMALL_EAGER
from harness import raised, ranks_in
from hypothesis import given
from hypothesis import strategies as st

SIZE = 4
SLOT = (SMALL_EAGER + 64 * SIZE) // 4
# Each is made once. Most overlap, and two are of everybody.
MEMBERS = [
    [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2], [3, 1], [1, 2, 3], [0, 3], [2, 3], [0], [2],
]  # fmt: skip

_groups: list[dist.ProcessGroup] = []  # of a rank's process


def run_on_rank(me, seed, steps):
    """Every rank takes the steps of each group in their order, and those of different groups in an
    order of its own, as far as c10d allows: what waits for others stays where it is."""
    if not _groups:
        _groups.extend(dist.new_group(members) for members in MEMBERS)
    drawn = random.Random(f"{seed}-{me.rank}")
    mine = [(i, step) for i, step in enumerate(steps) if me.rank in MEMBERS[step["group"]]]
    digests, under_way = {}, []
    while mine:
        free = next((i for i, (_, step) in enumerate(mine) if step["waits"]), len(mine))
        started = [
            (number, start(me, number, step)) for number, step in shuffled(drawn, mine[:free])
        ]
        under_way += started
        drawn.shuffle(under_way)
        for number, finish in under_way[free // 2 :]:
            digests[number] = finish()
        del under_way[free // 2 :]
        for number, step in mine[free : free + 1]:
            digests[number] = start(me, number, step)()
        mine = mine[free + 1 :]
    digests.update({number: finish() for number, finish in under_way})
    return digests


def shuffled(drawn, steps):
    """One list of steps after the other is looked into at random: one list for each group."""
    queues = {}
    for one in steps:
        queues.setdefault(one[1]["group"], []).append(one)
    while queues:
        group = drawn.choice(list(queues))
        yield queues[group].pop(0)
        if not queues[group]:
            del queues[group]


def start(me, number, step):
    kind, group = step["kind"], _groups[step["group"]]
    if kind == "verb":
        return oracle.start(**{**step["call"], "group": group})
    if kind == "other":
        return composite_calls.start(**{**step["call"], "group": group, "tag": number})
    if kind == "mistake":
        if step["by"] in (None, group.rank()):
            mistakes.check(group, step["number"])
        return lambda: None
    return disagree(group, step["odd"], step["count"], step["how"])


def disagree(group, odd, count, how):
    """One rank calls something else: everybody learns who called what, and nothing is changed."""
    is_odd = group.rank() == odd
    tensor = torch.full((count + (is_odd and how == "size"),), float(group.rank()))
    before = tensor.clone()
    op = dist.ReduceOp.MAX if is_odd and how == "op" else dist.ReduceOp.SUM
    given = tensor.double() if is_odd and how == "dtype" else tensor
    if is_odd and how == "verb":
        work = dist.broadcast(given, dist.get_global_rank(group, odd), group=group, async_op=True)
    elif is_odd and how == "list":
        options = dist.AllreduceCoalescedOptions()
        work = group.allreduce_coalesced([given, given.clone()], options)
    else:
        work = dist.all_reduce(given, op, group=group, async_op=True)

    def finish():
        error, message = raised(work.wait)
        assert error == "DistBackendError", message
        assert "the ranks called different operations" in message, message
        assert ranks_in(message) >= set(range(group.size())), message
        assert torch.equal(tensor, before)

    return finish


counts = st.one_of(
    st.integers(0, 40),
    st.integers(0, 6_000),
    st.sampled_from([SLOT + d for d in (-1, 0, 1)]),
    st.sampled_from([SLOT // n + d for n in (2, 3, 4) for d in (-17, -1, 0, 1)]),
)
NUMBERS = [*oracle.REAL, *oracle.COMPLEX]


@st.composite
def calls(draw, size):
    verb = draw(st.sampled_from([*oracle.VERBS, *composite_calls.VERBS]))
    reducing = verb in (*oracle.REDUCING, *composite_calls.REDUCING)
    dtype = draw(st.sampled_from(NUMBERS if reducing else [*NUMBERS, *oracle.MOVED_ONLY]))
    ops = [op for op in oracle.OPS if oracle.reducible(dtype, op)]
    count = draw(counts)
    call = {
        "verb": verb,
        "dtype": dtype,
        "op": draw(st.sampled_from(ops)) if reducing else "SUM",
        "count": count,
        "root": draw(st.integers(0, size - 1)),
        "seed": draw(st.integers(0, 2**16)),
        "layout": draw(st.sampled_from(oracle.INPUT_LAYOUTS)),
        "asynchronous": verb not in composite_calls.BLOCKING and draw(st.booleans()),
    }
    if verb.startswith("all_to_all") and draw(st.booleans()):
        row = st.lists(st.integers(0, max(count, 1)), min_size=size, max_size=size)
        call["splits"] = draw(st.lists(row, min_size=size, max_size=size))
    return call


@st.composite
def steps(draw):
    group = draw(st.integers(0, len(MEMBERS) - 1))
    size = len(MEMBERS[group])
    what = draw(st.integers(0, 19))
    if what == 0:
        by = draw(st.one_of(st.none(), st.integers(0, size - 1)))
        number = draw(st.integers(0, 10_000))
        return {"group": group, "kind": "mistake", "waits": False, "by": by, "number": number}
    if what == 1 and size > 1:
        return {
            "group": group,
            "kind": "disagreement",
            "waits": False,
            "odd": draw(st.integers(0, size - 1)),
            "count": draw(counts),
            "how": draw(st.sampled_from(["size", "dtype", "op", "verb", "list"])),
        }
    call = draw(calls(size))
    kind = "verb" if call["verb"] in oracle.VERBS else "other"
    return {"group": group, "kind": kind, "waits": not call["asynchronous"], "call": call}


programs = st.tuples(st.integers(0, 2**16), st.lists(steps(), min_size=1, max_size=6))


@pytest.mark.parametrize("layout", [*LAYOUTS, BLOCKING_DEVICE_LAYOUT])
@given(program=programs)
def test_programs(layout, crews, program):
    seed, steps = program
    found = crews.get(layout, SIZE).call(run_on_rank, seed, steps)
    for i, step in enumerate(steps):
        if step["kind"] == "verb" and step["call"]["verb"] in oracle.SAME_ON_ALL:
            digests = [found[rank][i] for rank in MEMBERS[step["group"]]]
            assert len(set(digests)) == 1, step


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
    for layout in oracle.SURROUNDED:
        held = oracle.Placed(right, layout)
        held.base.view(-1)[0] = 0
        with pytest.raises(AssertionError, match="around"):
            held.check(right.clone(), "neighbour")
    held = oracle.Placed(right[:1].expand(30), "expanded")
    held.check(right[:1].expand(30), "right")
    with pytest.raises(AssertionError, match="30 of 30 elements differ"):
        held.check(right[1:2].expand(30), "wrong")
    parts = [torch.tensor([v]) for v in (1e8, 1.0, -1e8)]
    assert oracle.reduced("SUM", parts).item() == 0.0
    assert oracle.reduced("SUM", [parts[0], parts[2], parts[1]]).item() == 1.0
    assert oracle.reduced("AVG", [torch.tensor([-3]), torch.tensor([0])]).item() == -1
    ints = [torch.tensor([200], dtype=torch.uint8)] * 2
    assert oracle.reduced("SUM", ints).item() == 144


def test_programs_are_shuffled_within_the_law():
    """Each group keeps its order, and ranks differ in the rest."""
    steps = [(i, {"group": i % 3}) for i in range(12)]
    orders = {tuple(i for i, _ in shuffled(random.Random(s), steps)) for s in range(20)}
    assert len(orders) > 5
    for order in orders:
        assert sorted(order) == list(range(12))
        for group in range(3):
            of_group = [i for i in order if i % 3 == group]
            assert of_group == sorted(of_group)
