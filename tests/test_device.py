"""Operations on device tensors: the streams of their results, and their ends when a rank is lost.
What they compute is in the suites that run on layout `device`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta

import devices
import harness
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from harness import until
from mistakes import SPLITS
from test_surface import merge_on_rank, sparse_on_rank, split_on_rank

SIZE = 3
SHARED = {"MOONCAKE_TRANSPORTS": "shm", devices.VARIABLE: DEVICE}
# Without words, wait() waits on the host.
FORMS = ["words", "host"]


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


def crew(form, size=SIZE, **options):
    devices.prepare(DEVICE)
    env = {**SHARED, "MOONCAKE_STREAM_WORDS": str(int(form == "words")), **options.pop("env", {})}
    if form == "words":
        devices.skip_without_queues(env)
    return harness.Crew(size, env=env, **options)


def held():
    from fake_device import control

    return control.held()


def total(size):
    return float(sum(range(1, size + 1)))


# ---- streams


@devices.on_fake_only
def wait_orders_the_stream(me, waits_on_host):
    """wait() puts the results before later work of the current stream. With words it returns while
    the operation has not even begun."""
    tensor = torch.full((1000,), float(me.rank + 1))
    with held() as gate:
        work = dist.all_reduce(tensor, async_op=True)
        if waits_on_host:
            gate.open()
        work.wait()
        result = tensor.clone()
        assert waits_on_host or not work.is_completed()
    assert result.tolist() == [total(me.size)] * 1000
    until(work.is_completed, "the end of the operation")
    assert work.is_success()


@devices.on_fake_only
def without_wait_the_old_data(me):
    """A stream that does not wait reads what was there before: nothing else may order it."""
    tensor = torch.full((1000,), float(me.rank + 1))
    torch.accelerator.synchronize()
    dist.barrier()
    other = torch.Stream(device=torch.accelerator.current_accelerator())
    with held():
        work = dist.all_reduce(tensor, async_op=True)
        with other:
            early = tensor.clone()
        other.synchronize()
    assert early.tolist() == [float(me.rank + 1)] * 1000
    work.wait()
    assert tensor.tolist() == [total(me.size)] * 1000


def calls_in_a_row(me):
    """Each operation reads the results of the one before it, without a wait between them."""
    tensor = torch.full((100,), 1.0)
    waits_on_host = os.environ["MOONCAKE_STREAM_WORDS"] == "0"
    with held() if DEVICE == "fake" and not waits_on_host else contextlib.nullcontext():
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(4)]
        gathered = torch.empty(me.size * 100)
        works.append(dist.all_gather_into_tensor(gathered, tensor, async_op=True))
    for work in works:
        work.wait()
    assert gathered.tolist() == [float(me.size**4)] * 100 * me.size


def several_streams(me):
    """The order of a group's operations is that of the calls, whatever their streams wait for."""
    streams = [torch.Stream(device=torch.accelerator.current_accelerator()) for _ in range(3)]
    tensors, works = [], []
    for round in range(12):
        with streams[round % 3]:
            tensors.append(torch.full((300,), float(me.rank + round)))
            works.append(dist.all_reduce(tensors[-1], async_op=True))
    # The first stream waits for the last operation, and so for all others.
    for work in reversed(works):
        work.wait()
    for round, tensor in enumerate(tensors):
        expected = float(sum(r + round for r in range(me.size)))
        assert tensor.tolist() == [expected] * 300


def groups_in_any_order(me):
    """The streams of groups are their own: no group's operation waits behind another group's."""
    groups = [dist.new_group() for _ in range(2)]
    tensors = [torch.full((100,), float(me.rank + g)) for g in range(2)]
    order = [0, 1] if me.rank == 0 else [1, 0]
    works = [dist.all_reduce(tensors[g], group=groups[g], async_op=True) for g in order]
    for work in works:
        work.wait()
    for g, tensor in enumerate(tensors):
        assert tensor.tolist() == [float(sum(r + g for r in range(me.size)))] * 100
    for group in groups:
        dist.destroy_process_group(group)


def callbacks_on_streams(me):
    tensor = torch.full((1000,), float(me.rank + 1))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [2 * total(me.size)] * 1000


def callbacks_in_the_programs_order(me):
    """With words a callback runs where it is attached, so the operations that it calls come between
    the program's on all ranks alike."""
    if os.environ["MOONCAKE_STREAM_WORDS"] == "0":
        return
    tensor, order = torch.ones(100), []

    def callback(future):
        order.append("callback")
        return dist.all_reduce(tensor, async_op=True)

    for round in range(10):
        first = dist.all_reduce(torch.ones(100), async_op=True)
        if me.rank == round % me.size:
            until(first.is_completed, "the end of the operation")
        called = first.get_future().then(callback)
        order.append("program")
        dist.all_reduce(torch.zeros(100))
        called.wait().wait()
    assert order == ["callback", "program"] * 10
    assert tensor.tolist() == [float(me.size**10)] * 100


@devices.on_fake_only
def batch_that_is_refused(me):
    """A call that is refused ends its batch."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    there = torch.accelerator.current_device_index()

    def refused():
        with _coalescing_manager(device=torch.device("fake", there)):
            dist.all_reduce(torch.ones(4))
            dist.all_reduce(torch.ones(4, device=torch.device("fake", 1 - there)))

    kind, text = harness.raised(refused)
    assert (kind, "tensors of one device" in text) == ("ValueError", True), text
    tensor = torch.full((3,), float(me.rank))
    if me.rank == 0:
        dist.send(tensor, 1)
    if me.rank == 1:
        dist.recv(tensor, 0)
        assert tensor.tolist() == [0.0] * 3
    dist.all_reduce(tensor.fill_(1))
    assert tensor.tolist() == [float(me.size)] * 3


def one_callback_of_several(me):
    """Its parts are waited for one by one, as torch asks."""
    for round in range(20):
        buffer = torch.full((2000,), float(me.rank + round))
        futures = [
            dist.all_reduce(half, async_op=True).get_future() for half in buffer.div_(2).chunk(2)
        ]
        done = torch.futures.collect_all(futures)
        for part in done.then(lambda parts: parts.value()).wait():
            part.wait()
        expected = sum(r + round for r in range(me.size)) / 2
        assert buffer.tolist() == [expected] * 2000, round


def dropped_tensors(me):
    """The inputs and outputs of operations under way outlive the caller's references."""
    kept = []
    for round in range(20):
        tensor = torch.full((5000,), float(me.rank + round))
        output = torch.empty(me.size * 5000)
        work = dist.all_gather_into_tensor(output, tensor, async_op=True)
        del tensor
        torch.full((5000,), -1.0)  # in the memory of the input, were that free
        work.wait()
        kept.append(output.view(me.size, 5000))
        del output, work
    for round, rows in enumerate(kept):
        for r in range(me.size):
            assert rows[r].tolist() == [float(r + round)] * 5000


def messages(me):
    right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    given = torch.arange(1000.0) + me.rank
    taken = torch.empty(1000)
    operations = [dist.P2POp(dist.isend, given, right), dist.P2POp(dist.irecv, taken, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(taken, torch.arange(1000.0) + left)
    # A message that another rank needs before it comes to a collective under way here.
    if me.rank == 0:
        tensor = torch.ones(10)
        work = dist.all_reduce(tensor, async_op=True)
        dist.send(given, 1)
        work.wait()
    else:
        if me.rank == 1:
            dist.recv(taken, 0)
            assert torch.equal(taken, torch.arange(1000.0))
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
    assert tensor.tolist() == [float(me.size)] * 10


@devices.on_fake_only
def barrier_waits_for_the_stream(me):
    flag = torch.zeros(1, device="cpu").pin_memory()
    dist.all_reduce(torch.ones(1))  # the group knows of the device
    with held() as gate:
        flag.copy_(torch.ones(1), non_blocking=True)
        work = dist.barrier(async_op=True)
        assert not work.is_completed()
        gate.open()
        work.wait()
    assert flag.item() == 1


@devices.on_fake_only
def refused(me):
    there = torch.accelerator.current_device_index()
    other = torch.ones(4, device=torch.device("fake", 1 - there))
    kind, text = harness.raised(dist.all_gather, [torch.empty(4)] * me.size, other)
    assert kind == "ValueError", text
    assert "tensors of one device" in text
    kind, text = harness.raised(
        dist.all_gather_into_tensor, torch.empty(me.size * 4), torch.ones(4, device="cpu")
    )
    assert (kind, "must be a CPU tensor" in text) == ("ValueError", True), text
    shared = torch.empty(4)
    kind, text = harness.raised(dist.all_gather, [shared] * me.size, torch.ones(4))
    assert (kind, "share memory" in text) == ("ValueError", True), text
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(me.size)] * 3


@devices.on_fake_only
def refused_in_a_capture(me):
    from fake_device import control

    tensor = torch.ones(3)
    torch.accelerator.synchronize()
    stream = torch.Stream(device=torch.accelerator.current_accelerator())
    with control.recorded(stream):
        for call, reason in (
            (lambda: dist.send(tensor, (me.rank + 1) % me.size), "no graph takes this operation"),
            (dist.new_group, "the construction of a process group cannot be recorded"),
        ):
            kind, text = harness.raised(call)
            assert "is being recorded into a graph" in text, (kind, text)
            assert reason in text, (kind, text)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(me.size)] * 3


def premultiplied_by_a_tensor(me):
    """A factor that is a tensor of the device."""
    factor = torch.full((1,), 2.0)
    tensor = torch.full((10,), float(me.rank + 1))
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(factor))
    assert tensor.tolist() == [2 * total(me.size)] * 10


ON_ALL = [
    without_wait_the_old_data,
    calls_in_a_row,
    several_streams,
    groups_in_any_order,
    callbacks_on_streams,
    callbacks_in_the_programs_order,
    batch_that_is_refused,
    one_callback_of_several,
    dropped_tensors,
    messages,
    barrier_waits_for_the_stream,
    refused,
    refused_in_a_capture,
    premultiplied_by_a_tensor,
]


@pytest.mark.parametrize("function", ON_ALL, ids=lambda f: f.__name__)
def test_streams(form, function):
    # With one queue, a stream of the program that is held holds up its other one.
    env = devices.OWN_QUEUES if function is without_wait_the_old_data else {}
    with crew(form, env=env) as ranks:
        ranks.call(function)


def test_wait_orders_the_stream(form):
    with crew(form) as ranks:
        ranks.call(wait_orders_the_stream, form == "host")


@devices.on_fake_only
def waits_for_the_outputs(me):
    tensor = torch.full((1000,), float(me.rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    with held() as gate:  # the copies cannot end: no result is taken for one that is there
        work = dist.all_reduce(tensor, async_op=True)
        kind, text = harness.raised(work.wait, timedelta(milliseconds=100))
        gate.open()
    assert "100 ms" in text or "after the timeout" in text, (kind, text)
    work.wait()
    assert tensor.tolist() == [total(me.size) * me.size] * 1000


def test_wait_that_blocks(form):
    with crew(form, env={"MOONCAKE_BLOCKING_WAIT": "1"}) as ranks:
        ranks.call(waits_for_the_outputs)


# ---- groups


@pytest.mark.skipif(not SPLITS, reason="torch splits groups since 2.9")
def test_split_and_merged_groups(form):
    with crew(form) as ranks:
        ranks.call(split_on_rank, f"split-{form}")
    with crew(form) as ranks:
        ranks.call(merge_on_rank)


# ---- sparse tensors


def sparse_sum_under_way(me):
    """wait() orders the sum before later work of the stream. If the operation fails, the tensor
    keeps its contents."""
    given = torch.sparse_coo_tensor([[0, 2, 2], [1, me.rank, me.rank]], torch.ones(3), (3, 4))
    work = dist.all_reduce(given, async_op=True)
    work.wait()
    expected = torch.zeros(3, 4)
    expected[0, 1] = me.size
    expected[2, : me.size] = 2
    assert torch.equal(given.to_dense(), expected)
    assert given.is_coalesced()
    kind, text = harness.raised(dist.all_reduce, torch.ones(7 + (me.rank == 1)).to_sparse())
    assert (kind, "rank 1 [8]" in text) == ("DistBackendError", True), text
    kept = torch.ones(7 + (me.rank == 1)).to_sparse()
    harness.raised(dist.all_reduce, kept)
    assert torch.equal(kept.to_dense(), torch.ones(7 + (me.rank == 1)))


def test_sparse_tensors(form):
    with crew(form) as ranks:
        ranks.call(sparse_sum_under_way)
        for dtype in (torch.float32, torch.bfloat16):
            ranks.call(sparse_on_rank, dtype, 300)


# ---- losses

STEPS = ["marked", "copies-in", "words", "fetched", "ran", "given-back"]
ROUNDS = 12
PASS = 5  # of the step at which a rank ends


def ends_at_a_step(me, victim, step, stops):
    from mooncake_backend import _C, get_active_ranks

    if me.rank == victim:
        _C.arm_failpoint(f"stage-{step}", PASS, stops)
    results = []
    for round in range(ROUNDS):
        tensor = torch.full((5000,), float((me.rank + 1) * (round + 1)))
        dist.all_reduce(tensor)
        results.append(set(tensor.tolist()))
    torch.accelerator.synchronize()
    return results, get_active_ranks(dist.group.WORLD).tolist()


@pytest.mark.ci
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stops", [False, True], ids=["killed", "stopped"])
@pytest.mark.parametrize("step", STEPS)
def test_a_rank_ends_between_two_steps(form, step, stops, victim):
    """The survivors have the same result of each operation: that of all ranks, or that of the
    survivors. No stream is left waiting."""
    if form == "host" and step == "words":
        pytest.skip("only streams with words have this step")
    env = {"MOONCAKE_FAILURE_TIMEOUT_MS": "1500"}
    with crew(form, env=env) as ranks:
        ranks.start(ends_at_a_step, victim, step, stops)
        outcomes = [one for one in ranks.results(dead=[victim]) if one]
        ranks.broken = True
    assert outcomes[0] == outcomes[1]
    results, active = outcomes[0]
    assert active == [int(rank != victim) for rank in range(SIZE)]
    lost = 0
    for round, seen in enumerate(results):
        of_all, of_survivors = (
            (round + 1) * total(SIZE),
            (round + 1) * (total(SIZE) - (victim + 1)),
        )
        assert seen in ({of_all}, {of_survivors}), (round, seen)
        assert seen == {of_survivors} or not lost, "a lost rank took part"
        lost += seen == {of_survivors}
    assert ROUNDS - PASS <= lost <= ROUNDS - PASS + 1


def ends_between_pieces(me, victim, stops, reduces):
    """Large tensors are reduced in pieces, while later ones are still copied."""
    from mooncake_backend import _C, get_active_ranks

    if me.rank == victim:
        _C.arm_failpoint("fed-piece", 11, stops)  # in the second operation of eight pieces
    results = []
    base = torch.arange(2_000_003, dtype=torch.float32) % 1000
    for round in range(4):
        tensor = base * ((me.rank + 1) * (round + 1))
        if reduces:
            dist.reduce(tensor, 1)
        else:
            dist.all_reduce(tensor)
        factors = (tensor[1:] / (base[1:] * (round + 1))).cpu()
        results.append(sorted(set(factors[~factors.isnan()].tolist())))
    torch.accelerator.synchronize()
    return results, get_active_ranks(dist.group.WORLD).tolist()


@pytest.mark.ci
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("stops", [False, True], ids=["killed", "stopped"])
@pytest.mark.parametrize("reduces", [False, True], ids=["all_reduce", "reduce"])
def test_a_rank_ends_between_two_pieces(form, stops, victim, reduces):
    """A call has one set of contributors, the same on all survivors. Inputs are not lost."""
    with crew(form, env={"MOONCAKE_FAILURE_TIMEOUT_MS": "1500"}) as ranks:
        ranks.start(ends_between_pieces, victim, stops, reduces)
        outcomes = {rank: one for rank, one in enumerate(ranks.results(dead=[victim])) if one}
        ranks.broken = True
    survivors = total(SIZE) - (victim + 1)
    for rank, (results, active) in outcomes.items():
        assert active == [int(rank != victim) for rank in range(SIZE)]
        own = [float(rank + 1)]
        if reduces and rank != 1:
            assert results == [own] * 4
        else:
            assert results == [[total(SIZE)]] + [[survivors]] * 3


def shows_active_ranks(me):
    """The tensor of the device shows a loss before the outputs of the operation are there."""
    import mooncake_backend

    active = torch.zeros(me.size + 1, dtype=torch.int32)
    me.init(options=mooncake_backend.MooncakeBackendOptions(active_ranks=active))
    shown = mooncake_backend.get_active_ranks(dist.group.WORLD)
    on_host = mooncake_backend.get_active_ranks(dist.group.WORLD, on_host=True)
    assert shown is active or shown.data_ptr() == active.data_ptr()
    assert active.tolist() == [1] * me.size + [0]
    assert on_host.device.type == "cpu"
    assert on_host.is_pinned()
    dist.all_reduce(torch.ones(10))  # sets the kernels up, where they are asked for
    dist.barrier()
    if me.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.ones(10)
    while True:
        tensor.fill_(1)
        dist.all_reduce(tensor)
        seen = active.clone()
        if tensor[0].item() == 2:
            break
    assert seen.tolist() == [1, 1, 0, 0]
    assert on_host.tolist() == [1, 1, 0]


@pytest.mark.parametrize("peer_bytes", [0, 65536], ids=["staged", "kernels"])
def test_active_ranks_on_the_device(form, peer_bytes):
    with crew(form, backend=None, env={"MOONCAKE_PEER_BYTES": str(peer_bytes)}) as ranks:
        ranks.start(shows_active_ranks)
        ranks.results(dead=[2])
        ranks.broken = True


@devices.on_fake_only
def shows_a_loss_while_streams_wait(me, half):
    """Streams of the program wait in half of the queues: the tensor is copied in another one."""
    import mooncake_backend

    active = torch.ones(me.size, dtype=torch.int32)
    me.init(options=mooncake_backend.MooncakeBackendOptions(active_ranks=active))
    on_host = mooncake_backend.get_active_ranks(dist.group.WORLD, on_host=True)
    dist.barrier()
    if me.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: not on_host[2], "the loss")
    streams = [torch.Stream() for _ in range(8)]  # one in each queue
    with held() as gate:
        reached = torch.accelerator.current_stream().record_event()
        for stream in streams[half::2]:
            stream.wait_event(reached)
        began = time.monotonic()
        mooncake_backend.get_active_ranks(dist.group.WORLD)
        took = time.monotonic() - began
        gate.open()
    torch.accelerator.synchronize()
    assert active.tolist() == [1, 1, 0]
    assert took < 0.9, took


@pytest.mark.parametrize("half", [0, 1])
def test_active_ranks_while_streams_wait(half):
    with crew("words", backend=None, env={devices.QUEUES: "8"}) as ranks:
        ranks.start(shows_a_loss_while_streams_wait, half)
        ranks.results(dead=[2])
        ranks.broken = True


def killed_between(me, rounds):
    results = []
    for round in range(rounds):
        tensor = torch.full((20_000,), float((me.rank + 1) * (round + 1)))
        dist.all_reduce(tensor)
        results.append(tensor[0].item())
        if round == 3:
            me.board.set(f"running-{me.rank}")
    torch.accelerator.synchronize()
    return results


def test_a_killed_rank_is_left_out(form):
    """The survivors go on, with the same results, and no stream waits for ever."""
    rounds = 3000
    with crew(form) as ranks:
        ranks.start(killed_between, rounds)
        ranks.board.wait_all("running", range(SIZE))
        ranks.signal(2, signal.SIGKILL)
        first, second, _ = ranks.results(dead=[2])
        ranks.broken = True
    assert first == second
    assert first[0] == total(SIZE)
    assert first[-1] == total(2) * rounds


def loss_in_mode_raise(me):
    """The error comes where the program looks: wait(), or the next call."""
    from mooncake_backend import acknowledge_loss

    dist.barrier()
    if me.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    output = torch.full((me.size * 10,), -7.0)

    def gathers():
        for _ in range(1000):
            dist.all_gather_into_tensor(output, torch.full((10,), float(me.rank)))

    kind, text = harness.raised(gathers)
    assert kind == "PeerLostError", text
    torch.accelerator.synchronize()
    # With words the ranks have gone on for different numbers of calls.
    acknowledge_loss(dist.group.WORLD)
    kept = output.tolist()
    assert kept in ([-7.0] * 30, [0.0] * 10 + [1.0] * 10 + [2.0] * 10), kept
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 10


def test_a_loss_is_raised(form):
    with crew(form, env={"MOONCAKE_ON_FAILURE": "raise"}) as ranks:
        ranks.start(loss_in_mode_raise)
        ranks.results(dead=[2])
        ranks.broken = True


@devices.on_fake_only
def mismatch_comes_with_the_next_call(me):
    output = torch.full((me.size * 8,), -7.0)
    tensor = torch.ones(8)
    with held() as gate:
        if me.rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
        else:
            work = dist.all_gather_into_tensor(output, tensor, async_op=True)
        work.wait()
        gate.open()
    torch.accelerator.synchronize()  # the stream goes on
    until(lambda: work.exception() is not None, "the error")
    kind, text = harness.raised(work.wait)
    assert "different operations" in text, (kind, text)
    assert output.tolist() == [-7.0] * 8 * me.size
    assert tensor.tolist() == [1.0] * 8
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(me.size)] * 8


def test_outputs_of_a_failed_operation_are_kept():
    with crew("words") as ranks:
        ranks.call(mismatch_comes_with_the_next_call)


@devices.on_fake_only
def late_rescue(me):
    """The rescue of three outputs is given up after its second copy, which comes late.
    The next call does not get that memory, or it would have other inputs."""
    from fake_device import control

    tensor = torch.ones(8)
    outputs = [torch.full((count,), -7.0) for count in (5120, 6144, 8)]
    with held() as gate:
        if me.rank == 2:
            work = dist.all_gather(outputs, tensor, async_op=True)
            control.slow_copies(outputs[0].nbytes / 1.5)
            control.inject("copy", n=3)
        else:
            work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        gate.open()
    torch.accelerator.current_stream().synchronize()  # the stream goes on
    control.slow_copies(0)
    until(work.exception, "the error")
    assert "different operations" in harness.raised(work.wait)[1]
    del work
    for _ in range(2):
        dist.all_reduce(torch.ones(2048))  # forgets the error, and takes memory of another size
    time.sleep(0.3 if me.rank == 2 else 2.5)  # the stream has passed the memory's last use
    later = torch.full((6144,), float(me.rank + 1))
    dist.all_reduce(later)
    assert later.unique().tolist() == [total(me.size)]


def test_a_rescue_that_is_given_up_spoils_no_later_call():
    with crew("words") as ranks:
        ranks.call(late_rescue)
        logged = ranks.log(2)
    assert "the outputs of an operation that failed are undefined" in logged


@devices.on_fake_only
def unseen_error(me):
    """The wait() of a later call raises it, once. That call is made, so the ranks stay together."""
    with held() as gate:
        operation = dist.all_reduce if me.rank == 0 else dist.broadcast
        first = operation(torch.ones(8), *([] if me.rank == 0 else [0]), async_op=True)
        first.wait()
        gate.open()
    until(first.is_completed, "the end of the operation")
    tensor = torch.full((8,), float(me.rank + 1))
    kind, text = harness.raised(dist.all_reduce, tensor)
    assert "different operations" in text, (kind, text)
    assert tensor.tolist() == [total(me.size)] * 8
    dist.all_reduce(tensor)
    assert tensor.tolist() == [total(me.size) * me.size] * 8


def test_an_error_that_no_wait_has_seen_is_raised_by_the_next_one():
    with crew("words") as ranks:
        ranks.call(unseen_error)


@devices.on_fake_only
def unseen_error_in_a_future(me):
    """DDP looks at futures only."""
    with held() as gate:
        operation = dist.all_reduce if me.rank == 0 else dist.broadcast
        first = operation(torch.ones(8), *([] if me.rank == 0 else [0]), async_op=True)
        first.get_future().wait()
        gate.open()
    until(first.is_completed, "the end of the operation")
    tensor = torch.full((8,), float(me.rank + 1))
    kind, text = harness.raised(dist.all_reduce(tensor, async_op=True).get_future().wait)
    assert "different operations" in text, (kind, text)
    dist.all_reduce(tensor, async_op=True).get_future().wait()
    assert tensor.tolist() == [total(me.size) * me.size] * 8


def test_an_error_that_no_wait_has_seen_is_raised_by_the_next_future():
    with crew("words") as ranks:
        ranks.call(unseen_error_in_a_future)


@devices.on_fake_only
def error_nobody_asked_for(me):
    operation = dist.all_reduce if me.rank == 0 else dist.broadcast
    with held() as gate:
        work = operation(torch.ones(8), *([] if me.rank == 0 else [0]), async_op=True)
        work.wait()
        gate.open()
    until(work.is_completed, "the end of the operation")
    del work
    dist.destroy_process_group()


def test_an_error_that_no_call_has_raised_is_logged():
    with crew("words") as ranks:
        ranks.call(error_nobody_asked_for)
        ranks.broken = True
        logged = ranks.log(0)
    assert "no later call raised the error" in logged
    assert "different operations" in logged


@devices.on_fake_only
def stuck_stream(me):
    """A stream that does not come to the operation in time: an error that says so."""
    tensor = torch.ones(8)
    with held() as gate:
        work = dist.all_reduce(tensor, async_op=True)
        until(lambda: work.exception() is not None, "the error")
        kind, text = harness.raised(work.wait)
        assert "has not come to the operation after 500 ms" in text, (kind, text)
        gate.open()
    torch.accelerator.synchronize()


def test_a_stream_that_hangs_is_named():
    with crew("words", timeout=0.5) as ranks:
        ranks.call(stuck_stream)
        ranks.broken = True


@devices.on_fake_only
def short_timeout(me):
    """A call's own timeout counts from the moment that its stream has come to it."""
    options = dist.AllreduceOptions()
    options.timeout = timedelta(milliseconds=500 if me.rank == 0 else 20_000)
    tensor = torch.full((8,), float(me.rank + 1))
    with held() as gate:
        work = dist.group.WORLD.allreduce([tensor], options)
        if me.rank == 0:
            me.board.wait_all("open", range(1, me.size))
            time.sleep(0.7)  # longer than the timeout
        gate.open()
        me.board.set(f"open-{me.rank}")
    work.wait()
    assert tensor.tolist() == [sum(range(1, me.size + 1))] * 8
    dist.all_reduce(tensor)
    assert tensor.tolist() == [me.size * sum(range(1, me.size + 1))] * 8


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_that_comes_after_a_call_s_own_timeout_ends_no_group(form):
    with crew(form) as ranks:
        ranks.call(short_timeout)


# ---- messages


def receive_waits_on_the_stream(me, form):
    """wait() of a receive puts the data before later work of the current stream. With words it
    returns before the message has been sent."""
    if me.rank == 0:
        if form == "words":
            me.board.wait("waits")
        dist.send(torch.arange(1000.0), 1)
    if me.rank == 1:
        taken = torch.full((1000,), -7.0)
        work = dist.irecv(taken, 0)
        work.wait()
        result = taken.clone()
        if form == "words":
            assert not work.is_completed()
            me.board.set("waits")
        assert torch.equal(result, torch.arange(1000.0))
        until(work.is_completed, "the end of the message")
        assert work.is_success()
    dist.barrier()


@devices.on_fake_only
def send_goes_when_its_data_is_there(me, form):
    """The call returns ahead of the data. The tensor may be changed after wait(). Later messages of
    the same tag wait, those of CPU tensors too, and those of other tags do not."""
    if me.rank == 0:
        given = torch.zeros(5000)
        torch.accelerator.synchronize()
        with held() as gate:
            given.fill_(3)
            work = dist.isend(given, 1, tag=1)
            last = dist.isend(torch.full((3,), 4.0, device="cpu"), 1, tag=1)
            dist.send(torch.full((3,), 5.0, device="cpu"), 1, tag=2)
            me.board.wait("taken")
            assert not work.is_completed()
            if form == "words":
                work.wait()
                given.fill_(-1)
            gate.open()
        work.wait()
        last.wait()
    if me.rank == 1:
        other, taken, last = torch.empty(3, device="cpu"), torch.empty(5000), torch.empty(3)
        dist.recv(other, 0, tag=2)
        me.board.set("taken")
        dist.recv(taken, 0, tag=1)
        dist.recv(last, 0, tag=1)
        assert (other[0], taken[0], taken[-1], last[0]) == (5, 3, 3, 4)
    dist.barrier()


def messages_in_any_order(me):
    """A message that the stream waits for holds up no message that comes before it."""
    right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    for round in range(30):
        first, second, third = (torch.full((700,), -1.0) for _ in range(3))
        other = torch.Stream(device=torch.accelerator.current_accelerator())
        other.wait_stream(torch.accelerator.current_stream())  # for `third` as it is now
        early = dist.irecv(first, left, tag=1)
        dist.irecv(second, left, tag=2).wait()
        answer = dist.isend(second + 1, right, tag=3)  # needs what comes next
        with other:
            works = [dist.isend(torch.full((700,), float(round)), right, tag=2)]
            dist.irecv(third, left, tag=3).wait()
            works.append(dist.isend(third + 1, right, tag=1))
            seen = third.clone()
        early.wait()
        for work in [answer, *works]:
            work.wait()
        torch.accelerator.current_stream().wait_stream(other)
        assert (first[0], second[0], seen[0]) == (round + 2, round, round + 1)
        assert first.unique().numel() == second.unique().numel() == 1


def dropped_messages(me):
    """A receive that the program has dropped still fills its tensor. A dropped send still goes."""
    right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    for round in range(20):
        taken = torch.full((3000,), -1.0)
        dist.irecv(taken, left)
        given = torch.full((3000,), float(me.rank + round))
        dist.isend(given, right)
        del given
        torch.full((3000,), -2.0)  # in the memory of the input, were that free
        dist.barrier()
        until(lambda t=taken: t[0].item() != -1, "the data")
        assert taken.tolist() == [float(left + round)] * 3000


def failed_receive(me, form):
    """The tensor keeps its contents, and the error is raised: by wait(), or by a later call."""
    if me.rank == 0:
        me.board.wait("waits")
        dist.send(torch.ones(5), 1)
    if me.rank == 1:
        taken = torch.full((8,), -7.0)
        work = dist.irecv(taken, 0)
        if form == "words":
            work.wait()
            kept = taken.clone()
            me.board.set("waits")
            until(work.exception, "the error")
            assert kept.tolist() == [-7.0] * 8
        else:
            me.board.set("waits")
            kind, text = harness.raised(work.wait)
            assert "20 bytes" in text, (kind, text)
        assert taken.tolist() == [-7.0] * 8
        dist.recv(torch.empty(5), 0)  # the message is kept
    dist.barrier()


def unseen_failure_of_a_message(me):
    if me.rank == 0:
        me.board.wait("waits")
        dist.send(torch.ones(5), 1)
    if me.rank == 1:
        taken = torch.full((8,), -7.0)
        dist.irecv(taken, 0).wait()
        kept = taken.clone()
        me.board.set("waits")
        assert kept.tolist() == [-7.0] * 8  # waits for the end of the message
        tensor = torch.full((8,), float(me.rank + 1))
        kind, text = harness.raised(dist.all_reduce, tensor)
        assert (kind, "20 bytes" in text) == ("ValueError", True), text
        dist.recv(torch.empty(5), 0)
    else:
        tensor = torch.full((8,), float(me.rank + 1))
        dist.all_reduce(tensor)
    assert tensor.tolist() == [total(me.size)] * 8
    dist.all_reduce(tensor)
    assert tensor.tolist() == [total(me.size) * me.size] * 8


@devices.on_fake_only
def late_message(me, form):
    """One that comes too late: the stream goes on after the message's timeout."""
    harness.set_timeout(0.5)
    if me.rank == 1:
        taken = torch.full((8,), -7.0)
        work = dist.irecv(taken, 0)
        if form == "words":
            work.wait()
            assert taken.tolist() == [-7.0] * 8
            kind, text = harness.raised(dist.send, torch.ones(1), 2)
        else:
            kind, text = harness.raised(work.wait)
        assert (kind, "receive from rank 0 timed out" in text) == ("DistBackendError", True), text
        with held() as gate:
            work = dist.isend(torch.ones(1), 2, tag=1)
            until(work.exception, "the error")
            gate.open()
        kind, text = harness.raised(work.wait)
        assert "its data is not there: earlier work on the caller's stream" in text, (kind, text)


def batch_of(*calls):
    """One work for several calls."""
    here = torch.device(DEVICE, torch.accelerator.current_device_index())
    with dist._coalescing_manager(device=here, async_ops=True) as batch:
        for call, *arguments in calls:
            call(*arguments)
    return batch


def batch_of_which_one_fails(me, form):
    """The other receives of the batch have their data."""
    if me.rank == 0:
        taken, short = torch.full((4000,), -7.0), torch.full((3,), -7.0)
        batch = batch_of((dist.irecv, short, 2), (dist.irecv, taken, 1))
        if form == "words":
            batch.wait()
            me.board.set("waits")
            assert taken.tolist() == [1.0] * 4000
            kind, text = harness.raised(dist.all_reduce, torch.ones(1))
        else:
            me.board.set("waits")
            kind, text = harness.raised(batch.wait)
            assert taken.tolist() == [1.0] * 4000
            dist.all_reduce(torch.ones(1))
        assert (kind, "20 bytes" in text) == ("ValueError", True), text
        assert short.tolist() == [-7.0] * 3
        dist.recv(torch.empty(5), 2)
        return
    me.board.wait("waits")
    dist.send(torch.ones(4000) if me.rank == 1 else torch.ones(5), 0)
    dist.all_reduce(torch.ones(1))


def batch_waits_on_the_stream(me):
    """A batch of calls on a device: wait() returns before the other ranks have called theirs."""
    right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    given, taken = torch.full((2000,), float(me.rank)), torch.full((2000,), -1.0)
    if me.rank != 0:
        me.board.wait("waits")
    batch = batch_of((dist.irecv, taken, left), (dist.isend, given, right))
    batch.wait()
    result = taken.clone()
    given.fill_(-1)
    if me.rank == 0:
        assert not batch.works[0].is_completed()
        me.board.set("waits")
    assert result.tolist() == [float(left)] * 2000


def destroyed_while_a_stream_waits(me):
    """The stream goes on, and the log has the error."""
    if me.rank == 1:
        taken = torch.full((8,), -7.0)
        work = dist.irecv(taken, 0)
        work.wait()
        kept = taken.clone()
        me.board.set("waits")
    me.board.wait("waits")  # a receive from a rank that has left raises in wait()
    dist.destroy_process_group()
    if me.rank == 1:
        assert kept.tolist() == [-7.0] * 8
        del work


def from_any_source(me):
    """The caller asks for the sender after wait()."""
    if me.rank == 0:
        taken = torch.empty(3)
        assert [dist.recv(taken) for _ in range(2)] in ([1, 2], [2, 1])
    else:
        dist.send(torch.ones(3), 0)
    dist.barrier()


@pytest.mark.parametrize("function", [dropped_messages, from_any_source], ids=lambda f: f.__name__)
def test_messages(form, function):
    with crew(form) as ranks:
        ranks.call(function)


@pytest.mark.parametrize(
    "function",
    [receive_waits_on_the_stream, send_goes_when_its_data_is_there, failed_receive,
     batch_of_which_one_fails],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_messages_of_each_form(form, function):
    with crew(form) as ranks:
        ranks.call(function, form)


@pytest.mark.parametrize(
    "function",
    [unseen_failure_of_a_message, batch_waits_on_the_stream, messages_in_any_order],
    ids=lambda f: f.__name__,
)
def test_messages_that_streams_wait_for(function):
    with crew("words", env=devices.OWN_QUEUES) as ranks:
        ranks.call(function)


def test_a_message_that_is_late(form):
    with crew(form) as ranks:
        ranks.call(late_message, form)
        ranks.broken = True


def test_destroy_while_a_stream_waits():
    with crew("words") as ranks:
        ranks.call(destroyed_while_a_stream_waits)
        ranks.broken = True
        assert "no later call raised the error" in ranks.log(1)


@devices.on_fake_only
def outputs_are_late(me):
    """The message has come, and its tensor's stream has not. wait() has the group's timeout."""
    harness.set_timeout(1)
    if me.rank == 0:
        dist.send(torch.ones(8), 1)
    if me.rank == 1:
        taken = torch.full((8,), -7.0)
        torch.accelerator.synchronize()
        with held() as gate:
            work = dist.irecv(taken, 0)
            kind, text = harness.raised(work.wait)
            gate.open()
        assert "are not on fake:1 after the timeout of wait()" in text, (kind, text)
        work.wait()
        assert taken.tolist() == [1.0] * 8


def test_outputs_that_are_late(form):
    with crew(form, env={"MOONCAKE_BLOCKING_WAIT": "1"}) as ranks:
        ranks.call(outputs_are_late)
        ranks.broken = True


# ---- signals


def calls_in_a_handler(me):
    """The call that the handler interrupts waits for the end of an earlier one. All calls are
    alike, as the handler may come anywhere on another rank."""
    tensors, works = [], []

    def reduce():
        tensors.append(torch.ones(8))
        works.append(dist.all_reduce(tensors[-1], async_op=True))

    reduce()
    works[0].wait()
    torch.accelerator.synchronize()
    opened = threading.Event()
    with held() as gate:

        def handler(*_):
            threading.Thread(target=gate.open).start()
            reduce()
            opened.set()

        signal.signal(signal.SIGUSR1, handler)
        main = threading.get_ident()

        def interrupt():
            seen = 0
            while seen < 400 or seen != len(works):  # until no call returns
                seen = len(works)
                time.sleep(0.3)
            signal.pthread_kill(main, signal.SIGUSR1)

        watcher = threading.Thread(target=interrupt)
        watcher.start()
        for _ in range(600):
            reduce()
        watcher.join()
        assert opened.wait(30)
    for work in works:
        work.wait()
    torch.accelerator.synchronize()
    assert {tuple(tensor.tolist()) for tensor in tensors} == {(2.0,) * 8}
    assert len(works) == 602


def test_a_handler_that_calls_while_a_call_waits(form):
    with crew(form, size=2) as ranks:
        ranks.call(calls_in_a_handler)


@devices.on_fake_only
def interrupted(me, what):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if me.rank == 1:
        if what == "outputs":
            dist.send(tensor, 0)
        me.board.wait("interrupted")
        return

    def calls():
        for _ in range(600):
            dist.all_reduce(tensor, async_op=True)

    waits = {
        "operation": lambda: dist.all_reduce(tensor),
        "outputs": lambda: dist.recv(tensor, 1),
        "call": calls,
    }
    with held() as gate:
        me.board.set("going")
        with pytest.raises(KeyboardInterrupt):
            waits[what]()
        me.board.set("interrupted")
        gate.open()


@pytest.mark.parametrize("what", ["operation", "outputs", "call"])
def test_ctrl_c_ends_a_wait_for_a_stream(what):
    env = {"MOONCAKE_BLOCKING_WAIT": "1"}
    with crew("words", size=2, env=env) as ranks:
        ranks.start(interrupted, what)
        ranks.board.wait("going")
        time.sleep(0.5)
        ranks.signal(0, signal.SIGINT)
        ranks.board.wait("interrupted", 10)
        ranks.results(10)
        ranks.broken = True


# ---- training


def trains(me, kind):
    from torch.nn.parallel import DistributedDataParallel

    losses = []
    for device in ("cpu", kind):
        torch.manual_seed(1)
        with torch.device("cpu"):
            model = torch.nn.Sequential(
                torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
            )
            data = torch.rand(30, 8, 16) + me.rank
        model = DistributedDataParallel(model.to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run = []
        for batch in data.to(device):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            run.append(loss.item())
        losses.append(run)
    # Only the device `fake` sums in the CPU's order.
    assert losses[1] == (losses[0] if kind == "fake" else pytest.approx(losses[0], rel=1e-3))
    return losses[0]


def test_ddp_trains_as_on_the_cpu(form):
    with crew(form) as ranks:
        ranks.call(trains, DEVICE)


def bound_to_a_device(me, backend):
    """torch binds the group to the device, and later groups to it, too."""
    device = torch.device(DEVICE, 0)
    me.init(backend=backend, device_id=device)
    later = dist.new_group()
    for group in (dist.group.WORLD, later):
        assert group.bound_device_id == device
        for kind in ("cpu", DEVICE):
            tensor = torch.full((8,), float(me.rank + 1), device=kind)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [total(me.size)] * 8
    dist.barrier()


@pytest.mark.parametrize(
    "backend",
    [f"cpu:{of_cpu},{DEVICE}:mooncake" for of_cpu in ("mooncake", "mooncake-cpu", "gloo")],
)
def test_a_device_of_the_group(backend):
    with crew("words", 2, backend=None) as ranks:
        ranks.call(bound_to_a_device, backend)
