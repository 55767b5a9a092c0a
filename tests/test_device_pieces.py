"""Operations on device tensors of more than 1 MiB, which begin while inputs are still copied."""

from __future__ import annotations

import devices
import harness
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from harness import until

SIZE = 3
ROOT = 1
MIB = 1 << 20
KEPT = -99.0
FORMS = ["words", "host"]
# Those with one part for each rank: the lengths below are those of a part.
EACH_TO_EACH = ["all_to_all", "all_to_all_list"]
IN_PARTS = ["reduce_scatter", "reduce_scatter_list", "scatter", *EACH_TO_EACH]
WITH_ROOT = ["broadcast", "gather", "scatter"]
VERBS = ["broadcast", "all_gather", "all_gather_list", "gather", *IN_PARTS]


def crew(form, **options):
    devices.prepare(DEVICE)
    env = {
        "MOONCAKE_TRANSPORTS": "shm",
        "MOONCAKE_STREAM_WORDS": str(int(form == "words")),
        devices.VARIABLE: DEVICE,
        **options.pop("env", {}),
    }
    if form == "words":
        devices.skip_without_queues(env)
    return harness.Crew(SIZE, env=env, **options)


@pytest.fixture(params=FORMS)
def ranks(request):
    with crew(request.param) as crew_of_form:
        yield crew_of_form


def parts_of(verb):
    return SIZE if verb in IN_PARTS else 1


def given(verb, rank, salt, count):
    """Small whole numbers, so that sums are exact. They differ by rank, call and place."""
    places = torch.arange(parts_of(verb) * count, device="cpu")
    return ((places + 7 * rank + 13 * salt) % 31 - 15).float()


def expected(verb, rank, ranks, salt, count):
    """The outputs in a row, if the given ranks take part."""
    each = [given(verb, r, salt, count) for r in range(SIZE)]
    if verb == "broadcast":
        return each[ROOT]
    if verb == "scatter":
        return each[ROOT].view(SIZE, -1)[rank]
    if verb.startswith("reduce_scatter"):
        return sum(each[r].view(SIZE, -1)[rank] for r in ranks)
    if verb == "gather" and rank != ROOT:
        return torch.empty(0, device="cpu")
    if verb in EACH_TO_EACH:
        each = [x.view(SIZE, -1)[rank] for x in each]
    return torch.cat([each[r] * (r in ranks) for r in range(SIZE)])


def begin(verb, rank, x):
    """Calls the operation. Returns the work and the outputs in a row, which hold KEPT before."""
    count = x.numel() // parts_of(verb)
    if verb == "broadcast":
        out = x.clone() if rank == ROOT else torch.full_like(x, KEPT)
        return dist.broadcast(out, ROOT, async_op=True), out
    if verb == "all_gather":
        out = torch.full((SIZE * count,), KEPT)
        return dist.all_gather_into_tensor(out, x, async_op=True), out
    if verb == "all_gather_list":
        out = torch.full((SIZE, count), KEPT)
        return dist.all_gather(list(out), x, async_op=True), out.view(-1)
    if verb == "gather":
        out = torch.full((SIZE * (rank == ROOT), count), KEPT)
        return dist.gather(x, list(out) if rank == ROOT else None, ROOT, async_op=True), out.view(
            -1
        )
    if verb in EACH_TO_EACH:
        out = torch.full((SIZE, count), KEPT)
        if verb == "all_to_all":
            return dist.all_to_all_single(out.view(-1), x, async_op=True), out.view(-1)
        rows = list(x.view(SIZE, count))
        return dist.all_to_all(list(out), rows, async_op=True), out.view(-1)
    out = torch.full((count,), KEPT)
    if verb == "reduce_scatter":
        return dist.reduce_scatter_tensor(out, x, async_op=True), out
    rows = list(x.view(SIZE, count))
    if verb == "reduce_scatter_list":
        return dist.reduce_scatter(out, rows, async_op=True), out
    return dist.scatter(out, rows if rank == ROOT else None, ROOT, async_op=True), out


def values_on_rank(me, verb):
    for salt, count in enumerate(
        length // 4 // parts_of(verb)
        for length in (MIB - 64, MIB, MIB + 64 * SIZE, 2 * MIB + 4, 9 * MIB + 308)
    ):
        work, out = begin(verb, me.rank, given(verb, me.rank, salt, count).to(me_device()))
        work.wait()
        assert torch.equal(out.cpu(), expected(verb, me.rank, range(SIZE), salt, count)), count


def me_device():
    return torch.get_default_device()


@pytest.mark.parametrize("verb", VERBS)
def test_values(ranks, verb):
    """Lengths around the shortest cut, and some that no number of whole pieces makes up."""
    ranks.call(values_on_rank, verb)


def odd_inputs_on_rank(me):
    """The pieces are those of the tensor's elements, wherever they lie in memory."""
    count = 500_001
    square = torch.arange(2 * count).view(count, 2).double().mul(me.rank + 1)
    out = torch.full((SIZE, 2, count), KEPT, dtype=torch.float64)
    dist.all_gather_into_tensor(out.view(-1, count), square.t())
    rows = torch.arange(2 * count).view(count, 2).double().t()
    assert all(torch.equal(out[r], rows * (r + 1)) for r in range(SIZE))

    # A view that negates.
    turned = torch.complex(torch.full((count,), 3.0), torch.full((count,), 5.0)).conj().imag
    if me.rank != ROOT:
        turned = torch.zeros(count)
    dist.broadcast(turned, ROOT)
    assert turned.unique().tolist() == [-5.0]

    # A factor is multiplied with the whole tensor.
    x = torch.full((SIZE * count,), 2.0)
    sums = torch.empty(count)
    dist.reduce_scatter_tensor(sums, x, op=dist._make_nccl_premul_sum(0.5))
    assert sums.unique().tolist() == [float(SIZE)]

    # The output holds the input.
    whole = torch.full((SIZE, count), KEPT)
    whole[me.rank] = float(me.rank)
    dist.all_gather_into_tensor(whole, whole[me.rank])
    assert [row.unique().tolist() for row in whole] == [[0.0], [1.0], [2.0]]


def test_odd_inputs(ranks):
    ranks.call(odd_inputs_on_rank)


COUNT = 2_000_003  # eight pieces


def ends_between_pieces(me, verb, stops, victim):
    from mooncake_backend import _C

    if me.rank == victim:
        _C.arm_failpoint("fed-piece", 11, stops)  # in the second operation
    count = COUNT // parts_of(verb)
    found = []
    for salt in range(3):
        work, out = begin(verb, me.rank, given(verb, me.rank, salt, count).to(me_device()))
        until(work.is_completed, "the end of the operation")
        if work.exception() is not None:
            kind, _ = harness.raised(work.wait)
            found.append((kind, out.cpu().unique().tolist()))
            break
        work.wait()
        fits = [
            active
            for active in ([0, 1, 2], [r for r in range(SIZE) if r != victim])
            if torch.equal(out.cpu(), expected(verb, me.rank, active, salt, count))
        ]
        found.append((work.contributors, work.contributors in fits))
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 10
    return found


@pytest.mark.ci
@pytest.mark.parametrize("stops", [False, True], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [0, ROOT])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_rank_ends_between_two_pieces(form, verb, victim, stops):
    """A call has one set of contributors, the same on all survivors. Without its root it fails on
    all of them, and the outputs keep their contents."""
    with crew(form, env={"MOONCAKE_FAILURE_TIMEOUT_MS": "1500"}) as ranks:
        ranks.start(ends_between_pieces, verb, stops, victim)
        outcomes = {rank: one for rank, one in enumerate(ranks.results(dead=[victim])) if one}
        ranks.broken = True
    survivors = [rank for rank in range(SIZE) if rank != victim]
    assert list(outcomes) == survivors
    for found in outcomes.values():
        assert found[0] == ([0, 1, 2], True)
        if victim == ROOT and verb in WITH_ROOT:
            kept = [] if verb == "gather" else [KEPT]
            assert found[1:] == [("PeerLostError", kept)]
        else:
            assert found[1:] == [(survivors, True)] * 2


def lost_input_on_rank(me, verb):
    """The ranks' calls differ: no output changes."""
    count = COUNT // parts_of(verb)
    x = given(verb, me.rank, 0, count).to(me_device())
    if me.rank == 0:
        work, out = dist.all_reduce(torch.zeros(COUNT), async_op=True), torch.full((1,), KEPT)
    else:
        work, out = begin(verb, me.rank, x)
    until(lambda: work.exception() is not None, "the error")
    kind, text = harness.raised(work.wait)
    assert "different operations" in text, (kind, text)
    is_input = verb == "broadcast" and me.rank == ROOT
    assert is_input or set(out.cpu().unique().tolist()) <= {KEPT}


@pytest.mark.parametrize("verb", VERBS)
def test_outputs_of_a_call_that_failed(ranks, verb):
    ranks.call(lost_input_on_rank, verb)


# ---- all_to_all, where each rank knows only its own splits

# Elements from each rank to each. The first ones come in pieces on all ranks, those of the second
# table on one rank: the others' inputs are short, or empty.
MANY = [[400_003, 0, 900_001], [300_000, 2, 450_007], [1_000_000, 700_000, 0]]
ONE = [[0, 800_001, 700_000], [1000, 0, 40_000], [0, 0, 0]]
CALLS = ["single", "list"]


def sent(source, target, count):
    return ((torch.arange(count, device="cpu") + 5 * source + 11 * target) % 97).float()


def exchange(me, call, splits, device):
    """Calls all_to_all with tensors of the device. Returns the work and the outputs."""
    inputs = [sent(me.rank, r, splits[me.rank][r]).to(device) for r in range(SIZE)]
    receives = [splits[r][me.rank] for r in range(SIZE)]
    out = torch.full((sum(receives),), KEPT, device=device)
    outputs = list(out.split(receives))
    if call == "list":
        return dist.all_to_all(outputs, inputs, async_op=True), outputs
    work = dist.all_to_all_single(out, torch.cat(inputs), receives, splits[me.rank], async_op=True)
    return work, outputs


def splits_on_rank(me, call, splits, with_cpu):
    devices_of = ["cpu" if rank in with_cpu else me_device() for rank in range(SIZE)]
    for _ in range(2):
        work, outputs = exchange(me, call, splits, devices_of[me.rank])
        work.wait()
        for r, output in enumerate(outputs):
            assert torch.equal(output.cpu(), sent(r, me.rank, splits[r][me.rank])), r


@pytest.mark.parametrize("with_cpu", [(), (0,), (1, 2)])
@pytest.mark.parametrize("splits", [MANY, ONE], ids=["many", "one"])
@pytest.mark.parametrize("call", CALLS)
def test_splits(ranks, call, splits, with_cpu):
    """Ranks with tensors of the CPU take part in the same call."""
    ranks.call(splits_on_rank, call, splits, with_cpu)


def misfit_on_rank(me, call):
    splits = [list(row) for row in MANY]
    if me.rank == 2:
        splits[2][1] += 1
    work, outputs = exchange(me, call, splits, me_device())
    until(lambda: work.exception() is not None, "the error")
    _, text = harness.raised(work.wait)
    assert "rank 2 sends 2800004 bytes to rank 1, which expects 2800000" in text, text
    assert all(set(output.cpu().unique().tolist()) <= {KEPT} for output in outputs)
    splits_on_rank(me, call, MANY, ())


@pytest.mark.parametrize("call", CALLS)
def test_splits_that_do_not_fit_change_nothing(ranks, call):
    ranks.call(misfit_on_rank, call)


def mixture_ends_between_pieces(me, stops, victim):
    from mooncake_backend import _C

    if me.rank == victim:
        _C.arm_failpoint("fed-piece", 4, stops)
    work, outputs = exchange(me, "single", MANY, "cpu" if me.rank == 0 else me_device())
    work.wait()
    alive = [r for r in range(SIZE) if r != victim]
    assert work.contributors == alive
    for r, output in enumerate(outputs):
        wanted = sent(r, me.rank, MANY[r][me.rank])
        assert torch.equal(output.cpu(), wanted if r in alive else torch.zeros_like(wanted)), r


@pytest.mark.ci
@pytest.mark.parametrize("stops", [False, True], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_of_a_mixed_call_ends_between_two_pieces(victim, stops):
    with crew("words", env={"MOONCAKE_FAILURE_TIMEOUT_MS": "1500"}) as ranks:
        ranks.start(mixture_ends_between_pieces, stops, victim)
        ranks.results(dead=[victim])
        ranks.broken = True
