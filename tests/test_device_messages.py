"""Messages on tensors of a device between memory of devices (MOONCAKE_PEER_MESSAGES)."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import devices
import harness
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from harness import until

SIZE = 3
MIB = 1 << 20
POOL = 8 * MIB
LEAST = 64 << 10  # bytes of a message that goes so
KEPT = -99.0
FORMS = ["words", "host"]
VARIABLE = "MOONCAKE_PEER_MESSAGES"


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


def crew(form="words", size=SIZE, **options):
    devices.prepare(DEVICE)
    env = {
        "MOONCAKE_TRANSPORTS": "shm",
        "MOONCAKE_STREAM_WORDS": str(int(form == "words")),
        VARIABLE: str(POOL),
        devices.VARIABLE: DEVICE,
        **options.pop("env", {}),
    }
    if form == "words":
        devices.skip_without_queues(env)
    return harness.Crew(size, env=env, **options)


def data(seed, length):
    numbers = torch.arange(length, dtype=torch.int64, device="cpu")
    return ((numbers * 31 + seed * 7919) % 65521).float().to(DEVICE)


def same(tensor, seed):
    return torch.equal(tensor.to("cpu"), data(seed, tensor.numel()).view(tensor.shape).to("cpu"))


def room(length):
    return torch.full((length,), KEPT)


def ring(me):
    return (me.rank + 1) % me.size, (me.rank - 1) % me.size


def gets(call):
    """Whether a call ends well, and the text of its error."""
    try:
        call()
    except Exception as error:
        return False, str(error)
    return True, ""


@contextlib.contextmanager
def without_host_memory():
    """Any copy in pinned memory fails, at both ends, after the first messages."""
    if DEVICE == "fake":
        from fake_device import control

        torch.accelerator.synchronize()
        control.inject("allocatePinned", times=1 << 40)
    yield


def begun(me):
    """Messages that set everything up, one between each pair."""
    for other in range(me.size):
        if other == me.rank:
            continue
        taken = room(LEAST // 4)
        work = dist.isend(data(me.rank, LEAST // 4), other)
        dist.recv(taken, other)
        work.wait()
        assert same(taken, other)
    dist.barrier()


# ---- data


LENGTHS = [LEAST // 4 + more for more in (-1, 0, 1)] + [
    MIB // 4,
    POOL // 8,  # the largest that a rank may have under way
    POOL // 8 + 1,
    POOL // 2,
]


def in_all_orders(me):
    right, left = ring(me)
    seed = 0
    for length in LENGTHS:
        for order in ("receive first", "send first", "send first, late receive", "wait first"):
            seed += 10
            given = data(seed + me.rank, length)
            if order == "receive first":
                taken = room(length)
                first = dist.irecv(taken, left)
                second = dist.isend(given, right)
            elif order == "wait first":
                taken = room(length)
                other = torch.Stream(device=torch.accelerator.current_accelerator())
                other.wait_stream(torch.accelerator.current_stream())
                first = dist.irecv(taken, left)
                if os.environ["MOONCAKE_STREAM_WORDS"] == "1":
                    first.wait()
                    copy = taken + 1
                with other:  # the current stream waits for the receive
                    second = dist.isend(given, right)
            else:
                second = dist.isend(given, right)
                if order.endswith("late receive"):
                    dist.barrier()
                taken = room(length)
                first = dist.irecv(taken, left)
            first.wait()
            second.wait()
            given.fill_(-1)
            assert same(taken, seed + left), (length, order)
            if order == "wait first" and os.environ["MOONCAKE_STREAM_WORDS"] == "1":
                assert same(copy - 1, seed + left), length


def test_all_orders_and_sizes(form):
    with crew(form, env=devices.OWN_QUEUES) as ranks:
        ranks.call(in_all_orders)


@devices.on_fake_only
def between_devices_only(me):
    """No message has a copy in host memory, at either end."""
    begun(me)
    right, left = ring(me)
    with without_host_memory():
        for round in range(12):
            for length in (LEAST // 4, MIB // 8 + 3):
                taken = room(length)
                work = dist.irecv(taken, left, tag=round)
                send = dist.isend(data(round + me.rank, length), right, tag=round)
                work.wait()
                assert same(taken, round + left)
                until(send.is_completed, "the end of the send")
                time.sleep(0.02)  # a thread gives the memory back
        with pytest.raises(dist.DistBackendError):  # the check can fail
            dist.isend(data(0, POOL // 4), right)
        with pytest.raises(dist.DistBackendError):
            dist.irecv(room(LEAST // 4 - 1), left)


def test_no_copy_in_host_memory(form):
    with crew(form) as ranks:
        ranks.call(between_devices_only)
        ranks.broken = True


def of_other_shapes(me):
    right, left = ring(me)
    rows = 300
    for round in range(4):
        given = data(round + me.rank, 2 * rows * rows).view(rows, 2 * rows)
        taken = torch.full((rows, 2 * rows), KEPT)
        work = dist.irecv(taken.t()[::2], left)
        dist.isend(given.t()[::2], right).wait()
        work.wait()
        expected = data(round + left, 2 * rows * rows).view(rows, 2 * rows)
        assert torch.equal(taken.t()[::2], expected.t()[::2])
        assert torch.equal(taken.t()[1::2], torch.full((rows, rows), KEPT))
    for dtype in (torch.uint8, torch.float64, torch.bfloat16):
        given, taken = torch.ones(LEAST, dtype=dtype), torch.zeros(LEAST, dtype=dtype)
        work = dist.irecv(taken, left)
        dist.send(given * (me.rank + 1), right)
        work.wait()
        assert torch.equal(taken, given * (left + 1))


def from_any_source_with_tags(me):
    length = MIB // 8
    for round in range(4):
        if me.rank == 0:
            seen = []
            for _ in range(2):
                taken = room(length)
                seen.append(dist.recv(taken, tag=1))
                assert same(taken, 10 * round + seen[-1])
            assert sorted(seen) == [1, 2]
            for source in (2, 1):  # the later tag first
                for tag in (3, 2):
                    taken = room(length + tag)
                    dist.recv(taken, source, tag=tag)
                    assert same(taken, 100 * round + 10 * tag + source)
        else:
            works = [dist.isend(data(10 * round + me.rank, length), 0, tag=1)]
            for tag in (2, 3):
                given = data(100 * round + 10 * tag + me.rank, length + tag)
                works.append(dist.isend(given, 0, tag=tag))
            for work in works:
                work.wait()
        dist.barrier()  # a sender that is ahead would be taken for the other one


def in_batches(me):
    right, left = ring(me)
    for round in range(6):
        length = LEAST // 4 + 1000 * round
        takens = [room(length + part) for part in range(3)]
        calls = []
        for part in range(3):
            given = data(100 * round + 10 * part + me.rank, length + part)
            calls.append(dist.P2POp(dist.isend, given, right))
            calls.append(dist.P2POp(dist.irecv, takens[part], left))
        small = torch.full((4,), KEPT)
        calls.append(dist.P2POp(dist.isend, torch.full((4,), float(me.rank)), right))
        calls.append(dist.P2POp(dist.irecv, small, left))
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        for part, taken in enumerate(takens):
            assert same(taken, 100 * round + 10 * part + left)
        assert small.tolist() == [float(left)] * 4


def in_any_order_of_streams(me):
    """A message that a stream waits for holds up no message that comes before it."""
    right, left = ring(me)
    length = LEAST // 4
    for round in range(20):
        first, second, third = room(length), room(length), room(length)
        other = torch.Stream(device=torch.accelerator.current_accelerator())
        other.wait_stream(torch.accelerator.current_stream())  # for `third` as it is now
        early = dist.irecv(first, left, tag=1)
        dist.irecv(second, left, tag=2).wait()
        answer = dist.isend(second + 1, right, tag=3)  # needs what comes next
        with other:
            works = [dist.isend(torch.full((length,), float(round)), right, tag=2)]
            dist.irecv(third, left, tag=3).wait()
            works.append(dist.isend(third + 1, right, tag=1))
            seen = third.clone()
        early.wait()
        for work in [answer, *works]:
            work.wait()
        torch.accelerator.current_stream().wait_stream(other)
        assert (first[0], second[0], seen[0]) == (round + 2, round, round + 1)
        assert first.unique().numel() == second.unique().numel() == 1


def dropped(me):
    """A receive that the program has dropped still fills its tensor. A dropped send still goes."""
    right, left = ring(me)
    for round in range(10):
        taken = room(LEAST)
        dist.irecv(taken, left)
        given = data(round + me.rank, LEAST)
        dist.isend(given, right)
        del given
        torch.full((LEAST,), -2.0)  # in the memory of the input, were that free
        until(lambda t=taken: t[-1].item() != KEPT, "the data")
        torch.accelerator.synchronize()
        assert same(taken, round + left)


@pytest.mark.parametrize(
    "function",
    [of_other_shapes, from_any_source_with_tags, in_batches, dropped],
    ids=lambda f: f.__name__,
)
def test_messages(form, function):
    with crew(form) as ranks:
        ranks.call(function)


def test_streams_that_wait_for_messages():
    with crew(env=devices.OWN_QUEUES) as ranks:
        ranks.call(in_any_order_of_streams)


@devices.on_fake_only
def while_streams_are_busy(me):
    """The data of a send goes when it is there. A receive waits for no work of its stream: the next
    message, which that work needs, comes."""
    from fake_device import control

    right, left = ring(me)
    length = MIB // 4
    given, taken = torch.zeros(length), room(length)
    torch.accelerator.synchronize()
    source = data(me.rank, length)
    torch.accelerator.synchronize()
    with control.held() as gate:
        taken.fill_(KEPT - 1)  # before the data, in the order of the stream
        work = dist.irecv(taken, left)
        given.copy_(source)
        send = dist.isend(given, right)
        assert not send.is_completed()
        gate.open()
    send.wait()
    work.wait()
    dist.barrier()
    with control.held() as gate:
        work = dist.irecv(taken, left, tag=1)
        dist.isend(torch.ones(4, device="cpu"), right, tag=2)
        other = torch.Stream(device=torch.accelerator.current_accelerator())
        with other:
            sent = dist.isend(given, right, tag=1)
        until(sent.is_completed, "the receiver to fetch")
        dist.recv(torch.empty(4, device="cpu"), left, tag=2)
        gate.open()
    work.wait()
    assert same(taken, left)


def test_a_busy_stream_holds_no_message_up(form):
    with crew(form, env=devices.OWN_QUEUES) as ranks:
        ranks.call(while_streams_are_busy)


# ---- the other end has another choice


def with_the_cpu(me):
    right, left = ring(me)
    for round in range(4):
        for there, here in (("cpu", DEVICE), (DEVICE, "cpu")):
            length = MIB // 4 + round
            taken = room(length).to(here)
            work = dist.irecv(taken, left)
            dist.isend(data(round + me.rank, length).to(there), right).wait()
            work.wait()
            assert same(taken.to(DEVICE), round + left)


def test_tensors_of_the_cpu(form):
    with crew(form) as ranks:
        ranks.call(with_the_cpu)


def test_a_rank_without_the_setting():
    env = {"MOONCAKE_LOG_LEVEL": "info"}
    with crew(env=env, rank_env={1: {VARIABLE: "0"}}) as ranks:
        ranks.call(of_other_shapes)
        ranks.call(from_any_source_with_tags)
        assert "messages to rank 1 go through host memory" in ranks.log(0)
        assert "messages from rank 1 go through host memory" in ranks.log(2)
        assert "go through host memory" not in ranks.log(1)


def test_a_device_that_shares_no_memory():
    env = {"MOONCAKE_LOG_LEVEL": "info"}
    with crew(env=env) as ranks:
        ranks.call(shares_nothing)
        ranks.call(of_other_shapes)
        assert "messages go through host memory: " in ranks.log(0)


@devices.on_fake_only
def shares_nothing(me):
    from fake_device import control

    if me.rank == 0:
        control.inject("allocateShared")
        dist.send(data(1, LEAST), 1)
    if me.rank == 1:
        control.inject("mapShared", times=100)
        taken = room(LEAST)
        dist.recv(taken, 0)
        assert same(taken, 1)
    dist.barrier()


# ---- bounds


@devices.on_fake_only
def one_never_receives(me):
    """Its share is bounded. Messages to the others still find memory of the device."""
    begun(me)
    if me.rank == 0:
        with without_host_memory():
            for _ in range(4):
                dist.isend(data(3, MIB // 4), 1, tag=7)
            with pytest.raises(dist.DistBackendError):  # it would be staged
                dist.isend(data(3, MIB // 4), 1, tag=7)
            for round in range(20):
                work = dist.isend(data(round, MIB // 8), 2)
                until(work.is_completed, "the end of the send")
                time.sleep(0.02)  # a thread gives the memory back
            me.board.set("sent")
    if me.rank == 2:
        with without_host_memory():
            for round in range(20):
                taken = room(MIB // 8)
                dist.recv(taken, 0)
                assert same(taken, round)
    me.board.wait("sent")


def test_a_rank_that_never_receives():
    with crew() as ranks:
        ranks.call(one_never_receives)
        ranks.broken = True


def more_than_fits(me):
    """Far more is under way than the pools hold, in an order that no bounded queue passes."""
    right, left = ring(me)
    count, length = 40, MIB // 4
    for round in range(2):
        works = [dist.isend(data(round + i + me.rank, length), right, tag=i) for i in range(count)]
        dist.barrier()
        takens = [room(length) for _ in range(count)]
        for i in reversed(range(count)):
            works.append(dist.irecv(takens[i], left, tag=i))
        for work in works:
            work.wait()
        for i, taken in enumerate(takens):
            assert same(taken, round + i + left)
        takens = [room(length) for _ in range(count)]
        works = [dist.irecv(takens[i], left, tag=i) for i in range(count)]
        dist.barrier()
        works += [dist.isend(data(i + me.rank, length), right, tag=i) for i in range(count)]
        for work in works:
            work.wait()
        for i, taken in enumerate(takens):
            assert same(taken, i + left)


def test_more_than_fits(form):
    with crew(form, env={"MOONCAKE_LOG_LEVEL": "info"}) as ranks:
        ranks.call(more_than_fits)
        if DEVICE == "fake":
            log = ranks.log(0)
            assert "some messages to rank 1 go through host memory: MOONCAKE_PEER_MESSAGES" in log


# ---- errors


def failed_receive(me, form):
    """The tensor keeps its contents, and a later receive gets the message."""
    length = LEAST // 4
    for round in range(3):
        if me.rank == 0:
            me.board.wait(f"waits {round}")
            dist.send(data(round, length), 1)
        if me.rank == 1:
            taken = room(length + 1)
            work = dist.irecv(taken, 0)
            if form == "words":
                work.wait()
                kept = taken.clone()
                me.board.set(f"waits {round}")
                until(work.exception, "the error")
                assert kept.unique().tolist() == [KEPT]
            else:
                me.board.set(f"waits {round}")
                kind, text = harness.raised(work.wait)
                assert f"{4 * length} bytes" in text, (kind, text)
            assert taken.unique().tolist() == [KEPT]
            later = room(length)
            dist.recv(later, 0)
            assert same(later, round)
        dist.barrier()


def test_a_receive_that_fails(form):
    with crew(form) as ranks:
        ranks.start(failed_receive, form)
        outcomes = ranks.outcomes()
        for rank in (0, 2):
            assert outcomes[rank].error is None, outcomes[rank].text
        # With words, a later call raises the error that no wait() has seen.
        assert outcomes[1].error is None or form == "words", outcomes[1].text
        assert outcomes[1].error is None or "bytes" in outcomes[1].message, outcomes[1].text
        ranks.broken = True


@devices.on_fake_only
def late(me, form):
    """After its timeout nothing lands in a receive's tensor, and a send gives its memory back."""
    begun(me)
    harness.set_timeout(0.3)
    length = MIB // 4
    if me.rank == 1:
        taken = room(length)
        work = dist.irecv(taken, 0, tag=5)
        if form == "words":
            work.wait()
        until(work.exception, "the error")
        me.board.set("late")
        me.board.wait("sent")
        torch.accelerator.synchronize()
        assert taken.unique().tolist() == [KEPT]
        later = room(length)
        gets(lambda: dist.recv(later, 0, tag=5))
        assert later.unique().tolist() == [KEPT]  # its send has been given up by now
    if me.rank == 0:
        me.board.wait("late")
        with without_host_memory():
            for _ in range(POOL // MIB + 2):
                work = dist.isend(data(1, length), 1, tag=5)
                until(work.exception, "the error")
        me.board.set("sent")


def test_messages_that_are_late(form):
    with crew(form) as ranks:
        ranks.call(late, form)
        ranks.broken = True


def ends_with_messages_under_way(me):
    right, left = ring(me)
    works = [dist.isend(data(me.rank, MIB // 4), right, tag=1) for _ in range(3)]
    taken = room(MIB // 4)
    works.append(dist.irecv(taken, left, tag=2))
    if os.environ["MOONCAKE_STREAM_WORDS"] == "1":
        works[-1].wait()
    me.board.set(f"calls-{me.rank}")
    for rank in range(me.size):
        me.board.wait(f"calls-{rank}")
    dist.destroy_process_group()
    torch.accelerator.synchronize()
    assert taken.unique().tolist() == [KEPT]


def test_the_group_ends_with_messages_under_way(form):
    with crew(form) as ranks:
        ranks.call(ends_with_messages_under_way)


def in_two_lives(me):
    """The memory of an earlier group's messages is not in the way of the next group's."""
    dist.destroy_process_group()
    for life in range(3):
        me.init(name=f"store-{life}")
        begun(me)
        in_batches(me)
        # wait() of a send is the stream's: a rank that left now could take its last ones with it.
        dist.barrier()
        dist.destroy_process_group()


def test_groups_one_after_the_other():
    with crew() as ranks:
        ranks.call(in_two_lives)


# ---- losses

STEPS = {
    "data": 1,
    "announced": 1,
    "fetch": 0,
    "fetched": 0,
    "acknowledged": 0,
}  # rank that ends there: the sender is 1, the receiver 0
ROUNDS = 8
PASS = 3


def ends_at_a_step(me, step, stops):
    from mooncake_backend import _C

    if STEPS[step] == me.rank:
        _C.arm_failpoint(f"message-{step}", PASS, stops)
    seen = []
    length = MIB // 4
    for round in range(ROUNDS):
        tensor = room(length)
        if me.rank == 0:
            well, text = gets(lambda t=tensor: dist.irecv(t, 1).wait())
            torch.accelerator.synchronize()
            assert well or "rank 1" in text, text
        elif me.rank == 1:
            tensor = data(round, length)
            well, text = gets(lambda t=tensor: dist.isend(t, 0).wait())
            me.board.set(f"sent {round}")
        else:
            continue
        if me.rank == 0:
            seen.append(same(tensor, round) or tensor.unique().tolist())
    return seen


@pytest.mark.ci
@pytest.mark.parametrize("stops", [False, True], ids=["killed", "stopped"])
@pytest.mark.parametrize("step", list(STEPS))
def test_a_rank_ends_between_two_steps(form, step, stops):
    """The receiver has all of a message, or none of it and an error. Later messages between the
    survivors go on."""
    victim = STEPS[step]
    env = {"MOONCAKE_FAILURE_TIMEOUT_MS": "1000"}
    with crew(form, env=env) as ranks:
        ranks.call(begun)
        ranks.start(ends_at_a_step, step, stops)
        outcomes = ranks.outcomes(dead=[victim])
        for rank, outcome in enumerate(outcomes):
            assert rank == victim or outcome.error is None, outcome.text
        if victim == 1:
            seen = outcomes[0].value
            # Messages that were announced may come, those before the last one that came have.
            assert set(map(str, seen)) <= {"True", str([KEPT]), "[0.0]"}
            came = seen.count(True)
            assert seen[:came] == [True] * came
            assert came <= PASS
        ranks.broken = True


def survivors_go_on(me, victim):
    left = [rank for rank in range(me.size) if rank != victim]
    if me.rank == victim:
        me.board.set("there")
        works = [dist.isend(data(9, MIB // 4), rank) for rank in left]
        takens = [room(MIB // 4) for _ in left]
        works += [dist.irecv(taken, rank) for taken, rank in zip(takens, left, strict=True)]
        until(lambda: me.board.has("killed"), "the end")
        return
    me.board.wait("killed")
    other = left[0] if me.rank == left[1] else left[1]
    for _ in range(2):
        work = dist.isend(data(1, MIB // 4), victim)
        gets(work.wait)
        until(work.exception, "the loss")
    with contextlib.suppress(Exception):  # the loss that no wait() has seen
        dist.all_reduce(torch.ones(1))
    torch.accelerator.synchronize()
    tensor = room(MIB // 4)
    gets(lambda: dist.irecv(tensor, victim).wait())
    torch.accelerator.synchronize()
    assert same(tensor, 9) or tensor.unique().tolist() in ([KEPT], [0.0])
    with without_host_memory():
        for round in range(12):
            taken = room(MIB // 4)
            work = dist.irecv(taken, other)
            send = dist.isend(data(round + me.rank, MIB // 4), other)
            work.wait()
            assert same(taken, round + other)
            until(send.is_completed, "the end of the send")
            time.sleep(0.02)  # a thread gives the memory back


@pytest.mark.ci
@pytest.mark.parametrize("stops", [False, True], ids=["killed", "stopped"])
def test_the_memory_of_a_lost_ranks_messages_serves_again(stops):
    env = {"MOONCAKE_FAILURE_TIMEOUT_MS": "1000"}
    with crew(env=env) as ranks:
        ranks.call(begun)
        ranks.start(survivors_go_on, 2)
        ranks.board.wait("there")
        if stops:
            ranks.signal(2, signal.SIGSTOP)
        else:
            ranks.kill(2)
        ranks.board.set("killed")
        ranks.results(dead=[2])
        ranks.broken = True
