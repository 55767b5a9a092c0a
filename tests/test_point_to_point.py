"""send and recv: order, tags, sizes, who waits for whom."""

from __future__ import annotations

import threading
from datetime import timedelta

import harness
import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import BLOCKING_DEVICE_LAYOUT, DEVICE_LAYOUT, LAYOUTS, layout_options
from harness import raised, until

import mooncake_backend

CELL = 8192  # a message up to this size travels in a cell of the mailbox, a larger one is fetched
SIZES = [0, 1, 4, CELL - 4, CELL, CELL + 4, 100_000, 3_000_000]


@pytest.fixture(params=[*LAYOUTS, DEVICE_LAYOUT, BLOCKING_DEVICE_LAYOUT], scope="module")
def layout(request):
    return request.param


@pytest.fixture
def crew(layout, crews):
    """Ranks 0 and 1 share a host in every layout with shared memory; 2 is the other one of
    `mixed`."""
    return crews.get(layout, 3)


@pytest.fixture
def raises_in_wait(layout):
    """On a device, wait() returns ahead of errors, unless it blocks: tests/test_device.py."""
    if layout == "device":
        pytest.skip("wait() makes the stream wait")


def message(seed, size):
    return oracle.contents(seed, 0, size, torch.uint8)


def pairs(me):
    """Where I send to, where I receive from: around the ring, so that every wire is used."""
    return (me.rank + 1) % me.size, (me.rank - 1) % me.size


def sizes_on_rank(me):
    to, source = pairs(me)
    for seed, size in enumerate(SIZES):
        sent = dist.isend(message(seed + 100 * me.rank, size), to)
        got = torch.zeros(size, dtype=torch.uint8)
        assert dist.recv(got, source) == source
        sent.wait()
        oracle.same(got, message(seed + 100 * source, size), f"{size} bytes")


def order_on_rank(me, count):
    """All sends are under way before the first receive; small and large ones mixed."""
    to, source = pairs(me)
    sizes = [(0, 8, CELL + 1)[i % 3] + i for i in range(count)]
    works = [dist.isend(message(i, size), to) for i, size in enumerate(sizes)]
    for i, size in enumerate(sizes):
        got = torch.zeros(size, dtype=torch.uint8)
        dist.recv(got, source)
        oracle.same(got, message(i, size), f"message {i}")
    for work in works:
        work.wait()


def tags_on_rank(me, size):
    to, source = pairs(me)
    tags = [3, 0, 2**20, 1, 2]
    works = [dist.isend(message(tag, size), to, tag=tag) for tag in tags for _ in range(2)]
    for tag in sorted(tags):
        for _ in range(2):
            got = torch.zeros(size, dtype=torch.uint8)
            dist.recv(got, source, tag=tag)
            oracle.same(got, message(tag, size), f"tag {tag}")
    for work in works:
        work.wait()


def many_on_rank(me, count):
    """Each rank has `count` messages under way in both directions, to every other rank."""
    others = [r for r in range(me.size) if r != me.rank]
    inputs = {(r, i): torch.zeros(17, dtype=torch.int32) for r in others for i in range(count)}
    works = [dist.irecv(t, r) for (r, _), t in inputs.items()]
    works += [
        dist.isend(torch.full((17,), 1000 * me.rank + i, dtype=torch.int32), r)
        for i in range(count)
        for r in others
    ]
    for work in works:
        work.wait()
    for (r, i), tensor in inputs.items():
        assert (tensor == 1000 * r + i).all(), (r, i)


def both_ways_on_rank(me, size):
    """Blocking sends in both directions at once would hang on a wire that has no room, so send
    first, all of us,
    without waiting."""
    peer = {0: 1, 1: 0}.get(me.rank)
    if peer is None:
        return
    got = torch.zeros(size, dtype=torch.uint8)
    for i in range(5):
        works = [dist.isend(message(me.rank + i, size), peer), dist.irecv(got, peer)]
        for work in works:
            work.wait()
        oracle.same(got, message(peer + i, size), f"round {i}")


def batch_on_rank(me, size):
    to, source = pairs(me)
    got = [torch.zeros(size, dtype=torch.uint8) for _ in range(4)]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, tensor, source) for tensor in got]
        + [dist.P2POp(dist.isend, message(i, size), to) for i in range(4)]
    )
    for work in works:
        work.wait()
    for i, tensor in enumerate(got):
        oracle.same(tensor, message(i, size), f"message {i}")


def posted_on_rank(me, name, size, receive_first):
    """The receive is posted before the send, or the send has long been made."""
    if me.rank == 0:
        if receive_first:
            me.board.wait(f"{name}-posted")
        work = dist.isend(message(5, size), 1)
        me.board.set(f"{name}-sent")
        work.wait()
    elif me.rank == 1:
        got = torch.zeros(size, dtype=torch.uint8)
        if not receive_first:
            me.board.wait(f"{name}-sent")
        work = dist.irecv(got, 0)
        if receive_first:
            assert not work.is_completed()
            me.board.set(f"{name}-posted")
        work.wait()
        oracle.same(got, message(5, size), "the message")


def any_source_on_rank(me, size):
    if me.rank == 0:
        seen = set()
        for _ in range(me.size - 1):
            got = torch.zeros(size, dtype=torch.uint8)
            source = dist.recv(got, tag=7)
            oracle.same(got, message(source, size), f"the message of rank {source}")
            seen.add(source)
        assert seen == set(range(1, me.size))
    else:
        dist.send(message(me.rank, size), 0, tag=7)


def mismatch_on_rank(me, sent, expected):
    if me.rank == 0:
        dist.send(torch.arange(sent, dtype=torch.uint8), 1, tag=4)
    elif me.rank == 1:
        wrong = torch.full((expected,), 9, dtype=torch.uint8)
        kind, text = raised(dist.recv, wrong, 0, tag=4)
        assert kind in ("DistBackendError", "ValueError"), kind
        assert f"{sent} bytes" in text, text
        assert f"{expected} bytes" in text, text
        assert "rank 0" in text
        assert (wrong == 9).all()
        right = torch.zeros(sent, dtype=torch.uint8)
        dist.recv(right, 0, tag=4)
        assert torch.equal(right, torch.arange(sent, dtype=torch.uint8))


def refused_on_rank(me, turn):
    if me.rank == 0:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        for name, call in {
            "self": lambda: dist.send(torch.ones(1), 0),
            "self, directly": lambda: backend.send([torch.ones(1)], 0, 0),
            "from self": lambda: backend.recv([torch.ones(1)], 0, 0),
            "nobody": lambda: backend.send([torch.ones(1)], me.size, 0),
            "two tensors": lambda: backend.send([torch.ones(1)] * 2, 1, 0),
            "negative tag": lambda: backend.send([torch.ones(1)], 1, -5),
            "meta": lambda: backend.recv([torch.ones(1, device="meta")], 1, 0),
        }.items():
            assert raised(call)[0] in ("ValueError", "RuntimeError", "TypeError"), name
        me.board.set(turn)
    me.board.wait(turn)
    sizes_on_rank(me)


def strided_on_rank(me, count):
    to, source = pairs(me)
    for layout in oracle.LAYOUTS:
        given = oracle.Placed(oracle.contents(me.rank, 0, count, torch.float32), layout)
        got = oracle.Placed(oracle.contents(9, 9, count, torch.float32), layout)
        work = dist.irecv(got.view, source)
        dist.send(given.view, to)
        work.wait()
        got.check(oracle.contents(source, 0, count, torch.float32), f"a receive into {layout}")
        polled = oracle.Placed(oracle.contents(9, 9, count, torch.float32), layout)
        works = [dist.irecv(polled.view, source), dist.isend(given.view, to)]
        for one in works:
            until(one.is_completed, "the message")
        polled.check(
            oracle.contents(source, 0, count, torch.float32), f"a polled receive into {layout}"
        )


def without_wait_on_rank(me, name, size):
    """Both sides only look, or do not even do that: the peer's message must get through all the
    same."""
    if me.rank == 0:
        works = [dist.isend(message(i, size), 1) for i in range(20)]
        until(lambda: all(work.is_completed() for work in works), "the sends")
        assert all(work.is_success() for work in works)
        # Now without any call of ours: a large message is fetched from us, and a future tells.
        told = []
        last = dist.isend(message(99, size), 1)
        last.get_future().then(lambda future: told.append(future.value() is not None))
        me.board.set(f"{name}-last")
        until(lambda: told, "the future of the send")
    elif me.rank == 1:
        got = [torch.zeros(size, dtype=torch.uint8) for _ in range(21)]
        works = [dist.irecv(tensor, 0) for tensor in got]
        until(lambda: all(work.is_completed() for work in works), "the receives")
        for i, tensor in enumerate(got):
            oracle.same(tensor, message(i if i < 20 else 99, size), f"message {i}")


def beside_collectives_on_rank(me):
    to, source = pairs(me)
    got = torch.zeros(50_000)
    work = dist.irecv(got, source)
    oracle.exercise("all_reduce", count=30_000)
    sent = dist.isend(torch.full((50_000,), float(me.rank)), to)
    oracle.exercise("all_gather", count=10)
    work.wait()
    sent.wait()
    assert (got == source).all()


def timeouts_on_rank(me, name):
    if me.rank == 0:
        got = torch.zeros(4)
        work = dist.irecv(got, 1, tag=1)
        kind, text = raised(work.wait, timedelta(milliseconds=50))
        assert kind == "DistBackendError"
        assert "50 ms" in text
        assert not work.is_completed()
        me.board.set(name)
        work.wait()
        assert (got == 5).all()
    elif me.rank == 1:
        me.board.wait(name)
        dist.send(torch.full((4,), 5.0), 0, tag=1)


def never_sent_on_rank(me):
    harness.set_timeout(1)
    if me.rank == 0:
        kind, text = raised(dist.recv, torch.zeros(4), 1, tag=11)
        assert kind == "DistBackendError"
        assert "rank 1" in text
        assert "11" in text
        me.board.set("gave up")
    me.board.wait("gave up")
    harness.set_timeout(harness.DEADLINE)
    sizes_on_rank(me)  # the group goes on


def backwards_on_rank(me, count):
    """Large sends are received in the opposite order: an announcement holds no place."""
    to, source = pairs(me)
    size = CELL + 1
    works = [dist.isend(message(tag, size), to, tag=tag) for tag in range(count)]
    for tag in reversed(range(count)):
        got = torch.zeros(size, dtype=torch.uint8)
        dist.recv(got, source, tag=tag)
        oracle.same(got, message(tag, size), f"tag {tag}")
    for work in works:
        work.wait()


def given_up_on_rank(me, count):
    """Sends that timed out take nothing from later ones. Their receiver is told so, and that rank 0
    is not lost."""
    size = CELL + 1
    if me.rank == 0:
        harness.set_timeout(0.2)
        works = [dist.isend(message(9, size), 1, tag=9) for _ in range(count)]
        for work in works:
            kind, text = raised(work.wait)
            assert (kind, "send to rank 1 timed out" in text) == ("DistBackendError", True), text
        harness.set_timeout(harness.DEADLINE)
        me.board.set("gave up sends")
        for tag in (9, 8):
            dist.send(message(tag, size), 1, tag=tag)
    elif me.rank == 1:
        me.board.wait("gave up sends")
        got = torch.zeros(size, dtype=torch.uint8)
        later = dist.irecv(torch.zeros(size, dtype=torch.uint8), 0, tag=8)
        announced = 0
        while True:
            work = dist.irecv(got, 0, tag=9)
            until(work.is_completed, "the message")
            if work.is_success():
                break
            kind, text = raised(work.wait)
            assert kind == "DistBackendError"
            assert "receive from rank 0: it gave up this message" in text, text
            assert mooncake_backend.get_failed_ranks_hint(work).tolist() == [0] * me.size
            announced += 1
        assert 0 < announced <= count
        oracle.same(got, message(9, size), "the message after those")
        later.wait()


def stopped_sender_on_rank(me, count, size):
    """Rank 0 is stopped while rank 1 fetches: the receives time out, nothing lands afterwards, and
    the messages wait for the next receives."""
    if me.rank == 0:
        works = [dist.isend(message(tag, size), 1, tag=tag) for tag in range(count)]
        me.board.set("sent")
        for work in works:
            work.wait()
    else:
        me.board.wait("stopped")
        harness.set_timeout(0.5)
        given_up = [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]
        works = [dist.irecv(tensor, 0, tag=tag) for tag, tensor in enumerate(given_up)]
        for work in works:
            assert "receive from rank 0 timed out" in raised(work.wait)[1]
        left = [tensor.clone() for tensor in given_up]
        harness.set_timeout(harness.DEADLINE)
        me.board.set("gave up")
        for tag in reversed(range(count)):
            got = torch.zeros(size, dtype=torch.uint8)
            dist.recv(got, 0, tag=tag)
            oracle.same(got, message(tag, size), f"message {tag}")
        for tag in range(count):
            oracle.same(given_up[tag], left[tag], f"tensor {tag} that was given up")


def two_threads_on_rank(me):
    """A message of another thread does not land in this thread's batch."""
    if me.rank == 1:
        for tag in (1, 2):
            got = torch.zeros(8, dtype=torch.uint8)
            dist.recv(got, 0, tag=tag)
            oracle.same(got, message(tag, 8), f"tag {tag}")
    elif me.rank == 0:
        errors = []

        def beside():
            try:
                dist.isend(message(1, 8), 1, tag=1).wait()
            except Exception as error:
                errors.append(error)

        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as batch:
            dist.isend(message(2, 8), 1, tag=2)
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join()
        batch.wait()
        assert not errors


def test_sizes(crew):
    crew.call(sizes_on_rank)


def test_order(crew):
    crew.call(order_on_rank, 40)


@pytest.mark.parametrize("size", [8, CELL + 8])
def test_tags_in_any_order(crew, size):
    crew.call(tags_on_rank, size)


def test_a_thousand_under_way(crew):
    crew.call(many_on_rank, 500)


@pytest.mark.parametrize("size", [8, 5_000_000])
def test_both_ways_at_once(crew, size):
    crew.call(both_ways_on_rank, size)


@pytest.mark.parametrize("size", [8, 100_000])
def test_batches(crew, size):
    crew.call(batch_on_rank, size)


@pytest.mark.parametrize("receive_first", [True, False], ids=["receive-first", "send-first"])
@pytest.mark.parametrize("size", [0, 8, 100_000])
def test_who_comes_first(crew, size, receive_first):
    crew.call(posted_on_rank, f"first-{size}-{receive_first}", size, receive_first)


def receive_from_leavers_on_rank(me):
    """Ranks 1 and 2 destroy a group and stay in the job. What 1 sent before still arrives."""
    group = dist.new_group()
    got = torch.zeros(8)
    if me.rank == 1:
        dist.send(torch.full((8,), 5.0), 0, group=group)
    if me.rank > 0:
        dist.destroy_process_group(group)
    else:
        assert dist.recv(got, 1, group=group) == 1
        assert got.tolist() == [5.0] * 8
        kind, text = raised(dist.recv, got, 1, group=group)
        assert (kind, "receive from rank 1: it has left the group" in text) == (
            "PeerLostError",
            True,
        )
        kind, text = raised(dist.recv, got, None, group=group)
        assert "receive from any rank: nobody is left: ranks 1, 2: it has left the" in text, text
        dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.parametrize("size", [8, 100_000])
def test_any_source(crew, size):
    crew.call(any_source_on_rank, size)


@pytest.mark.usefixtures("raises_in_wait")
@pytest.mark.parametrize(("sent", "expected"), [(8, 12), (12, 8), (0, 4), (4, 0), (200, 100_000)])
def test_a_wrong_size_keeps_the_message(crew, sent, expected):
    crew.call(mismatch_on_rank, sent, expected)


@pytest.mark.usefixtures("raises_in_wait")
def test_receives_from_who_has_left_the_group_end(crew):
    crew.call(receive_from_leavers_on_rank)


def test_refused(crew):
    crew.call(refused_on_rank, "refused")


@pytest.mark.parametrize("count", [6, 30_000])
def test_strided(crew, count):
    crew.call(strided_on_rank, count)


@pytest.mark.parametrize("size", [8, 100_000])
def test_completes_without_wait(crew, size):
    crew.call(without_wait_on_rank, f"polled-{size}", size)


def test_beside_collectives(crew):
    crew.call(beside_collectives_on_rank)


@pytest.mark.usefixtures("raises_in_wait")
def test_timeout_of_wait(crew):
    crew.call(timeouts_on_rank, "wait-timeout")


@pytest.mark.usefixtures("raises_in_wait")
def test_never_sent(layout, two_hosts):
    harness.run_ranks(2, never_sent_on_rank, **layout_options(layout, 2, two_hosts))


def test_large_sends_are_received_backwards(crew):
    crew.call(backwards_on_rank, 64)


@pytest.mark.usefixtures("raises_in_wait")
def test_sends_that_were_given_up(crew):
    crew.call(given_up_on_rank, 20)


def test_two_threads_and_a_batch(crew):
    crew.call(two_threads_on_rank)


@pytest.mark.parametrize("wire", ["shm-no-cma", "tcp"])
def test_receives_that_time_out_while_they_fetch(wire, two_hosts):
    options = layout_options(wire, 2, two_hosts)
    with harness.starting(2, stopped_sender_on_rank, 10, 1 << 20, **options) as crew:
        crew.board.wait("sent")
        crew.stop(0)
        crew.board.set("stopped")
        crew.board.wait("gave up")
        crew.cont(0)
        crew.results()


def test_order_with_the_real_slots():
    harness.run_ranks(4, order_on_rank, 30)
