"""Every collective against a plain model: sizes, types, operations, memory layouts, transports."""

from __future__ import annotations

import harness
import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import ALL_LAYOUTS, DEVICE_LAYOUT, LAYOUT_NAMES, SMALL_EAGER, marks_of

SIZES = [1, 2, 3, 4, 5, 8]
SIM_SIZES = [2, 5]  # where nothing comes at once, and on a device


@pytest.fixture(
    params=[
        *(
            pytest.param((name, n), marks=marks_of(name))
            for name in LAYOUT_NAMES
            for n in (SIM_SIZES if name == "sim" else SIZES)
        ),
        *(pytest.param(("fabric", n), marks=pytest.mark.slow) for n in SIM_SIZES),
        *(pytest.param(("device", n), marks=pytest.mark.ci) for n in SIM_SIZES),
    ],
    ids=lambda p: f"{p[0]}-{p[1]}",
    scope="module",
)
def spec(request):
    return request.param


@pytest.fixture
def crew(spec, crews):
    return crews.get(*spec)


@pytest.fixture(params=[*ALL_LAYOUTS, DEVICE_LAYOUT], scope="module")
def layout(request):
    return request.param


def around_the_switch(size):
    """Counts of float32 per rank on both sides of what fits a slot, for a slot that holds one
    rank's data
    (all_reduce), everybody's (reduce_scatter) or everybody's and a table (all_to_all)."""
    slot = SMALL_EAGER + 64 * size
    edges = [slot // 4, slot // 4 // size, (slot - 16 - 16 * size) // 4 // size]
    return sorted({1, 7, 10_007, *(edge + d for edge in edges for d in (-1, 0, 1))})


# ---- ranks


def sizes_on_rank(me, verb, counts, asynchronous=False):
    return [
        oracle.exercise(
            verb, count=count, root=count % me.size, seed=count, asynchronous=asynchronous
        )
        for count in counts
    ]


def types_on_rank(me, verb, cases):
    return [
        oracle.exercise(verb, dtype=dtype, op=op, count=count, root=me.size - 1, seed=seed)
        for seed, (dtype, op, count) in enumerate(cases)
    ]


def memory_on_rank(me, verb, layouts, counts):
    for layout in layouts:
        for count in counts:
            oracle.exercise(verb, layout=layout, count=count, seed=count)
            oracle.exercise(verb, layout=layout, count=count, dtype=torch.int16, root=me.size - 1)


def splits_on_rank(me, verb, counts):
    for count in counts:
        table = oracle.splits_of(count, me.size, count)
        oracle.exercise(verb, splits=table, seed=count)
    nothing = [[0] * me.size] * me.size
    oracle.exercise(verb, splits=nothing)
    # Everything goes to the last rank: most ranks send, one receives.
    to_one = [[0] * (me.size - 1) + [max(counts)]] * me.size
    oracle.exercise(verb, splits=to_one)


def rows_on_rank(me):
    """Splits count rows, whatever a row is."""
    rows = [r + 1 for r in range(me.size)]
    given = torch.arange(sum(rows) * 6).view(-1, 2, 3) + 1000 * me.rank
    taken = torch.zeros(me.size * (me.rank + 1), 2, 3, dtype=torch.int64)
    dist.all_to_all_single(taken, given, [me.rank + 1] * me.size, rows)
    start = sum(rows[: me.rank])
    for r in range(me.size):
        theirs = torch.arange(sum(rows) * 6).view(-1, 2, 3) + 1000 * r
        expected = theirs[start : start + me.rank + 1]
        got = taken[r * (me.rank + 1) : (r + 1) * (me.rank + 1)]
        assert torch.equal(got, expected)


def shapes_on_rank(me):
    """0-dim tensors, empty ones, and outputs of more dimensions than the input."""
    scalar = torch.tensor(float(me.rank))
    dist.all_reduce(scalar)
    assert scalar.shape == ()
    assert scalar.item() == sum(range(me.size))
    scalar = torch.tensor(me.rank)
    dist.broadcast(scalar, me.size - 1)
    assert scalar.item() == me.size - 1
    gathered = torch.zeros(me.size, dtype=torch.int64)
    dist.all_gather_into_tensor(gathered, torch.tensor(me.rank + 5))
    assert gathered.tolist() == [r + 5 for r in range(me.size)]
    outputs = [torch.tensor(-1) for _ in range(me.size)]
    dist.all_gather(outputs, torch.tensor(me.rank))
    assert [o.item() for o in outputs] == list(range(me.size))
    for shape in [(0,), (0, 5), (3, 0, 2)]:
        for dtype in (torch.float32, torch.bool):
            empty = torch.empty(shape, dtype=dtype)
            dist.all_reduce(empty, op=dist.ReduceOp.MAX)
            dist.broadcast(empty, 0)
            dist.reduce(empty, 0, op=dist.ReduceOp.MAX)
            dist.all_gather([torch.empty_like(empty) for _ in range(me.size)], empty)
            dist.all_gather_into_tensor(torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype))
            dist.reduce_scatter_tensor(
                torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype), op=dist.ReduceOp.MAX
            )
            dist.all_to_all_single(torch.empty(0, 3, dtype=dtype), torch.empty(0, 3, dtype=dtype))
            dist.all_to_all([empty.clone() for _ in range(me.size)], [empty] * me.size)
    matrix = torch.arange(12.0).view(3, 4) + me.rank
    stacked = torch.empty(me.size, 3, 4)
    dist.all_gather_into_tensor(stacked, matrix)
    for r in range(me.size):
        assert torch.equal(stacked[r], torch.arange(12.0).view(3, 4) + r)


def in_place_on_rank(me, count):
    """The input may be a part of the output, as FSDP does it."""
    output = torch.full((me.size, count), -1.0)
    output[me.rank] = me.rank
    dist.all_gather_into_tensor(output, output[me.rank])
    for r in range(me.size):
        assert (output[r] == r).all()
    pieces = torch.full((me.size, count), float(me.rank))
    dist.reduce_scatter_tensor(pieces[me.rank], pieces)
    assert (pieces[me.rank] == sum(range(me.size))).all()
    assert all((pieces[r] == me.rank).all() for r in range(me.size) if r != me.rank)


def nan_on_rank(me, count):
    nan, inf = float("nan"), float("inf")
    for dtype in oracle.FLOATS:
        for op, rest in ((dist.ReduceOp.MIN, 0), (dist.ReduceOp.MAX, me.size - 1)):
            tensor = torch.full((count,), float(me.rank), dtype=dtype)
            tensor[me.rank] = nan
            tensor[me.size] = -inf if op == dist.ReduceOp.MIN and me.rank == 0 else tensor[me.size]
            dist.all_reduce(tensor, op=op)
            assert tensor[: me.size].isnan().all(), (dtype, op)
            assert (tensor[me.size + 1 :] == rest).all(), (dtype, op)
            assert tensor[me.size] == (-inf if op == dist.ReduceOp.MIN else rest)
        tensor = torch.tensor(
            [inf, inf if me.rank == 0 else -inf, nan if me.rank == 0 else 1.0], dtype=dtype
        )
        dist.all_reduce(tensor)
        assert tensor[0] == inf
        assert tensor[1] == inf if me.size == 1 else tensor[1].isnan()
        assert tensor[2].isnan()


def bool_on_rank(me):
    first = torch.tensor([True, False, me.rank == 0, me.rank != 0])
    some = me.size > 1
    for op, expected in {
        dist.ReduceOp.SUM: [True, False, True, some],
        dist.ReduceOp.MAX: [True, False, True, some],
        dist.ReduceOp.PRODUCT: [True, False, not some, False],
        dist.ReduceOp.MIN: [True, False, not some, False],
    }.items():
        tensor = first.clone()
        dist.all_reduce(tensor, op=op)
        assert tensor.tolist() == expected, op
        assert set(tensor.view(torch.uint8).tolist()) <= {0, 1}


def order_on_rank(me, count):
    """1e8 + 1 - 1e8 - 1: any other order than that of the ranks gives other bits."""
    value = [1e8, 1.0, -1e8, -1.0][me.rank % 4]
    expected = torch.zeros((), dtype=torch.float32)
    expected += torch.tensor([1e8, 1.0, -1e8, -1.0])[0]
    for r in range(1, me.size):
        expected += torch.tensor([1e8, 1.0, -1e8, -1.0])[r % 4]
    tensor = torch.full((count,), value)
    dist.all_reduce(tensor)
    assert (tensor == expected).all(), (tensor[0], expected)
    output, given = torch.empty(count), torch.full((count * me.size,), value)
    dist.reduce_scatter_tensor(output, given)
    assert (output == expected).all()


def half_on_rank(me, dtype, count):
    """One rounding at the end: summed step by step in half precision, 1 would be lost beside
    2**k each time."""
    large = 2.0 ** (8 if dtype == torch.bfloat16 else 11)
    tensor = torch.full((count,), large if me.rank == 0 else 1.0, dtype=dtype)
    dist.all_reduce(tensor)
    expected = torch.tensor(large + me.size - 1).to(dtype)
    assert (tensor == expected).all(), (tensor[0], expected)


def barrier_on_rank(me, name):
    last = me.size - 1
    if me.rank != last:
        work = dist.barrier(async_op=True)
        me.board.set(f"{name}-called-{me.rank}")
        me.board.wait_all(f"{name}-called", range(last))
        assert not work.is_completed()
        me.board.set(f"{name}-looked-{me.rank}")
        work.wait()
        assert me.board.has(f"{name}-last")
    else:
        me.board.wait_all(f"{name}-looked", range(last))
        me.board.set(f"{name}-last")
        dist.barrier()


def transports_on_rank(me):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return [backend.transport_to(r) for r in range(me.size)]


def huge_on_rank(me):
    """More than 2**31 bytes, and elements beyond 2**31."""
    count = (11 << 28) // me.size * me.size // 4  # 2.75 GiB in all, in pieces beyond 32 bits
    tensor = torch.full((count * 4,), me.rank + 1, dtype=torch.uint8)
    tensor[-1] = 7 * (me.rank + 1)
    dist.broadcast(tensor, me.size - 1)
    assert tensor[-1] == 7 * me.size
    assert tensor[0] == me.size
    assert bool((tensor[:: 1 << 20] == me.size).all())
    del tensor
    mine = torch.full((1_181_116_007,), me.rank + 1, dtype=torch.uint8)
    everybody = torch.zeros(me.size * mine.numel(), dtype=torch.uint8)
    dist.all_gather_into_tensor(everybody, mine)
    for r in range(me.size):
        part = everybody[r * mine.numel() : (r + 1) * mine.numel()]
        assert int(part.min()) == int(part.max()) == r + 1
    output = torch.zeros_like(mine)
    dist.reduce_scatter_tensor(output, everybody)
    assert int(output.min()) == int(output.max()) == me.size * (me.rank + 1)


# ---- tests


def test_layouts_use_the_transports_that_they_name(spec, crew):
    layout, size = spec
    table = crew.call(transports_on_rank)
    for a in range(size):
        for b in range(size):
            near = layout in ("shm", "shm-no-cma", "device")
            near = near or (layout == "mixed" and _share_a_host(crew, a, b))
            far = layout if layout in ("sim", "fabric") else "tcp"
            expected = "self" if a == b else "shm" if near else far
            assert table[a][b] == expected, (a, b)


def _share_a_host(crew, a, b):
    namespaces = crew.namespaces
    return namespaces[a] == namespaces[b] if namespaces else max(a, b) < 2


@pytest.mark.parametrize("verb", oracle.VERBS)
def test_sizes(crew, verb):
    counts = around_the_switch(crew.size)
    first = crew.call(sizes_on_rank, verb, counts)
    again = crew.call(sizes_on_rank, verb, counts, True)
    assert first == again, "two runs gave different bits"
    if verb in oracle.SAME_ON_ALL:
        assert all(digests == first[0] for digests in first), "ranks hold different bits"


@pytest.mark.parametrize("verb", ["all_to_all", "all_to_all_single"])
def test_splits(crew, verb):
    crew.call(splits_on_rank, verb, [1, 5, 300, 3_000])


def test_splits_of_rows(crew):
    crew.call(rows_on_rank)


def test_shapes(crew):
    crew.call(shapes_on_rank)


@pytest.mark.parametrize("count", [10, 5_000])
def test_input_inside_the_output(crew, count):
    crew.call(in_place_on_rank, count)


def test_barrier(crew):
    for i in range(3):
        crew.call(barrier_on_rank, f"barrier{i}")
        for name in crew.board.folder.glob(f"barrier{i}-*"):
            name.unlink()


@pytest.mark.parametrize("count", [10, 5_000])
def test_sums_in_rank_order(crew, count):
    crew.call(order_on_rank, count)


@pytest.mark.parametrize("verb", oracle.REDUCING)
@pytest.mark.parametrize("size", [3])
def test_types_and_operations(layout, size, crews, verb):
    cases = [
        (dtype, op, count)
        for dtype in (*oracle.REAL, *oracle.COMPLEX)
        for op in oracle.OPS
        for count in (37, 9_001)
        if oracle.reducible(dtype, op)
    ]
    digests = crews.get(layout, size).call(types_on_rank, verb, cases)
    if verb in oracle.SAME_ON_ALL:
        assert all(one == digests[0] for one in digests)


@pytest.mark.parametrize("verb", [v for v in oracle.VERBS if v not in oracle.REDUCING])
def test_types_that_are_moved(layout, crews, verb):
    cases = [
        (dtype, "SUM", count)
        for dtype in (*oracle.REAL, *oracle.COMPLEX, *oracle.MOVED_ONLY)
        for count in (37, 9_001)
    ]
    crews.get(layout, 3).call(types_on_rank, verb, cases)


@pytest.mark.parametrize("verb", oracle.VERBS)
def test_memory(layout, crews, verb):
    crews.get(layout, 3).call(memory_on_rank, verb, oracle.LAYOUTS, [1, 24, 6_000])


@pytest.mark.parametrize("count", [20, 5_000])
def test_nan_wins(layout, crews, count):
    crews.get(layout, 3).call(nan_on_rank, count)


def test_bool(layout, crews):
    crews.get(layout, 3).call(bool_on_rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [5, 9_000])
def test_half_precision_is_rounded_once(layout, crews, dtype, count):
    crews.get(layout, 8).call(half_on_rank, dtype, count)


@pytest.mark.parametrize("verb", oracle.VERBS)
def test_beyond_32_mib(layout, crews, verb):
    """Reductions are cut into pieces there. The last piece is odd."""
    if layout == "sim" and verb not in oracle.REDUCING:
        pytest.skip("takes seconds, and nothing is cut")
    count = (33 << 20) // 4 + 11
    if verb.startswith(("reduce_scatter", "scatter")):
        count //= 2
    digests = crews.get(layout, 2).call(sizes_on_rank, verb, [count])
    assert len(digests) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shm", "shm-no-cma", "tcp"])
def test_beyond_2_gib(crews, name):
    crews.get(name, 2).call(huge_on_rank, deadline=900)


def test_default_slot_size():
    """The switch where the code puts it by itself: 64 KiB."""
    counts = [64 * 1024 // 4 // 2 + d for d in (-20, -1, 0, 1)] + [
        64 * 1024 // 4 + d for d in (-1, 0, 1)
    ]
    with harness.Crew(2) as crew:
        for verb in oracle.VERBS:
            crew.call(sizes_on_rank, verb, counts)


def test_both_names_of_the_backend():
    for name in ("mooncake", "mooncake-cpu", "cpu:mooncake"):
        harness.run_ranks(2, sizes_on_rank, "all_reduce", [5, 50_000], backend=name)
