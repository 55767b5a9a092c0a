"""Ranks that disagree, come late, never come or die: who gets which error, and what goes on
afterwards."""

from __future__ import annotations

import re
from datetime import timedelta

import harness
import mistakes
import oracle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from conftest import ALL_LAYOUTS, layout_options
from harness import raised

SHORT = 3.0  # a group timeout that has to pass in the test


@pytest.fixture(params=ALL_LAYOUTS, scope="module")
def layout(request):
    return request.param


def options(layout, size, two_hosts):
    return layout_options(layout, size, two_hosts)


def callers(message):
    """Who called what, as the message says it."""
    who = {}
    for ranks, call in re.findall(r"ranks? (\d[\d, -]*) called ([^;]*?\))", message):
        who |= dict.fromkeys(harness.ranks_in(f"ranks {ranks}"), call)
    return who


def reduce_all(count=8, dtype=torch.float32, op=dist.ReduceOp.SUM):
    return lambda: [(t := torch.ones(count, dtype=dtype)), dist.all_reduce(t, op=op)][:1]


def broadcast(count=8, root=0, dtype=torch.float32):
    return lambda: [(t := torch.ones(count, dtype=dtype)), dist.broadcast(t, root)][:1]


def reduce(count=8, root=0):
    return lambda: [(t := torch.ones(count)), dist.reduce(t, root)][:1]


def gather(count=8, dtype=torch.float32):
    n = dist.get_world_size
    return lambda: dist.all_gather_into_tensor(
        torch.ones(n() * count, dtype=dtype), torch.ones(count, dtype=dtype)
    )


def scatter(count=8, op=dist.ReduceOp.SUM):
    n = dist.get_world_size
    return lambda: dist.reduce_scatter_tensor(torch.ones(count), torch.ones(n() * count), op=op)


def exchange(count=8, dtype=torch.float32):
    n = dist.get_world_size
    return lambda: dist.all_to_all_single(
        torch.ones(n() * count, dtype=dtype), torch.ones(n() * count, dtype=dtype)
    )


def gather_list(count=8, root=0):
    def call():
        outputs = [torch.ones(count) for _ in range(dist.get_world_size())]
        dist.gather(torch.ones(count), outputs if dist.get_rank() == root else None, root)

    return call


def scatter_list(count=8, root=0, dtype=torch.float32):
    def call():
        inputs = [torch.ones(count, dtype=dtype) for _ in range(dist.get_world_size())]
        output = torch.ones(count, dtype=dtype)
        dist.scatter(output, inputs if dist.get_rank() == root else None, root)

    return call


def reduce_list(count=8):
    n = dist.get_world_size
    return lambda: dist.reduce_scatter(torch.ones(count), [torch.ones(count) for _ in range(n())])


def coalesced(*lengths):
    def call():
        tensors = [torch.ones(length) for length in lengths]
        dist.group.WORLD.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()

    return call


def sparse(length=8):
    return lambda: dist.all_reduce(torch.ones(length).to_sparse())


def monitored():
    dist.group.WORLD.monitored_barrier(timedelta(seconds=harness.DEADLINE), True)


def everybodys_object():
    dist.all_gather_object([None] * dist.get_world_size(), "mine")


def one_object():
    dist.broadcast_object_list(["mine"], 0)


def functional_sum():
    return functional.wait_tensor(functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD))


LARGE = 20_000
F = "float32"
# name: what most ranks call, what one calls, and how the message must show the two.
DISAGREEMENTS = {
    "verb": (reduce_all(), broadcast(), f"all_reduce({F}, 8 ", f"broadcast({F}, 8 "),
    "verb-large": (reduce_all(LARGE), gather(LARGE), "all_reduce(", "all_gather("),
    "verb-small-large": (reduce_all(), gather(LARGE), "all_reduce(", "all_gather("),
    "barrier": (dist.barrier, gather(), "barrier()", "all_gather("),
    "all-to-all": (exchange(), scatter(), "all_to_all(", "reduce_scatter("),
    "size": (reduce_all(8), reduce_all(9), f"({F}, 8 elements", f"({F}, 9 elements"),
    "size-large": (reduce_all(LARGE), reduce_all(LARGE + 1), "20000 elements", "20001 elements"),
    "size-switch": (reduce_all(8), reduce_all(LARGE), "8 elements", "20000 elements"),
    "size-broadcast": (broadcast(8), broadcast(LARGE), "8 elements", "20000 elements"),
    "size-gather": (gather(LARGE), gather(8), "20000 elements", "8 elements"),
    "size-scatter": (scatter(8), scatter(LARGE), "8 elements", "20000 elements"),
    "size-zero": (reduce_all(0), reduce_all(1), "0 elements", "1 elements"),
    "size-beyond-32-mib": (reduce_all(9 << 20), reduce_all(10 << 20), "9437184 el", "10485760 el"),
    "dtype": (reduce_all(), reduce_all(dtype=torch.int32), F, "int32"),
    "dtype-large": (gather(LARGE), gather(LARGE, torch.int32), F, "int32"),
    "dtype-broadcast": (broadcast(), broadcast(dtype=torch.int32), F, "int32"),
    "dtype-exchange": (exchange(), exchange(dtype=torch.int32), F, "int32"),
    "op": (reduce_all(), reduce_all(op=dist.ReduceOp.MAX), "SUM", "MAX"),
    "op-large": (reduce_all(LARGE), reduce_all(LARGE, op=dist.ReduceOp.AVG), "SUM", "AVG"),
    "op-scatter": (scatter(), scatter(op=dist.ReduceOp.MIN), "SUM", "MIN"),
    "root": (broadcast(root=0), broadcast(root=1), "root 0", "root 1"),
    "root-large": (broadcast(LARGE, 2), broadcast(LARGE, 0), "root 2", "root 0"),
    "root-reduce": (reduce(root=0), reduce(LARGE, root=1), "root 0", "root 1"),
    "gather": (gather_list(), scatter_list(), "gather(", "scatter("),
    "gather-large": (gather_list(LARGE), reduce_list(LARGE), "gather(", "reduce_scatter("),
    "root-gather": (gather_list(root=0), gather_list(root=1), "root 0", "root 1"),
    "root-scatter": (scatter_list(LARGE, 2), scatter_list(LARGE, 0), "root 2", "root 0"),
    "size-gather-list": (gather_list(8), gather_list(LARGE), "8 elements", "20000 elements"),
    "size-scatter-list": (scatter_list(LARGE), scatter_list(9), "20000 elements", "9 elements"),
    "size-reduce-list": (reduce_list(8), reduce_list(9), "8 elements", "9 elements"),
    "dtype-scatter-list": (scatter_list(), scatter_list(dtype=torch.int32), F, "int32"),
    "coalesced": (coalesced(8), coalesced(8, 8), "8 elements", "16 elements"),
    "coalesced-large": (coalesced(8, LARGE), coalesced(LARGE, 8), "of the lengths", "lengths"),
    "sparse": (sparse(), reduce_all(), "all_gather(int64", "all_reduce("),
    "monitored": (monitored, reduce_all(), "barrier()", "all_reduce("),
    "objects": (everybodys_object, one_object, "all_gather(", "broadcast("),
    "functional": (functional_sum, gather(), "all_reduce(", "all_gather("),
}  # fmt: skip


def disagree_on_rank(me, name, odd):
    most, one, _, _ = DISAGREEMENTS[name]
    error = raised(one if me.rank == odd else most)
    oracle.exercise("all_reduce", count=100, seed=odd)
    oracle.exercise("all_gather_into_tensor", count=LARGE, seed=odd)
    return error


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_every_rank_learns_who_called_what(layout, crews, name, odd):
    errors = crews.get(layout, 3).call(disagree_on_rank, name, odd)
    _, _, most, one = DISAGREEMENTS[name]
    for rank, (kind, message) in enumerate(errors):
        assert kind == "DistBackendError", (rank, message)
        found = callers(message)
        assert set(found) == {0, 1, 2}, message
        for caller, call in found.items():
            assert (one if caller == odd else most) in call, (rank, caller, message)


def three_ways_on_rank(me):
    call = [reduce_all(), broadcast(), dist.barrier][me.rank]
    return raised(call)


def test_three_ranks_three_calls(layout, crews):
    for kind, message in crews.get(layout, 3).call(three_ways_on_rank):
        assert kind == "DistBackendError"
        who = callers(message)
        assert [who[r].split("(")[0] for r in range(3)] == ["all_reduce", "broadcast", "barrier"]


def unchanged_on_rank(me, count):
    mine = torch.full((count,), float(me.rank))
    if me.rank == 1:
        raised(dist.broadcast, mine, 0)
    else:
        raised(dist.all_reduce, mine)
    assert (mine == me.rank).all()
    output = torch.full((3 * count,), -1.0)
    raised(dist.all_gather_into_tensor, output, mine) if me.rank else raised(dist.barrier)
    assert (output == -1).all()


@pytest.mark.parametrize("count", [8, LARGE])
def test_a_disagreement_changes_no_tensor(layout, crews, count):
    crews.get(layout, 3).call(unchanged_on_rank, count)


def asynchronous_on_rank(me):
    """The error comes out of wait(), exception() and the future; later calls in the queue are
    not touched."""
    tensors = [torch.ones(10), torch.ones(10 + (me.rank == 1)), torch.full((10,), float(me.rank))]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    works[0].wait()
    kind, message = raised(works[1].wait)
    works[2].wait()
    assert tensors[0].tolist() == [3.0] * 10
    assert tensors[2].tolist() == [3.0] * 10
    assert works[1].is_completed()
    assert not works[1].is_success()
    assert works[0].is_success()
    kind_again, _ = raised(works[1].get_future().wait)
    assert kind_again == kind
    return kind, message


def test_errors_of_asynchronous_calls(layout, crews):
    for kind, message in crews.get(layout, 3).call(asynchronous_on_rank):
        assert kind == "DistBackendError"
        assert {"10 el", "11 el"} <= {call[20:][:5] for call in callers(message).values()}


def misfit_on_rank(me, count):
    size, rank = me.size, me.rank
    sends = [count] * size
    receives = [count] * size
    if rank == 0:
        sends[2] += 1
    output = torch.full((sum(receives),), -1.0)
    error = raised(dist.all_to_all_single, output, torch.ones(sum(sends)), receives, sends)
    assert (output == -1).all()
    oracle.exercise("all_to_all_single", count=count)
    return error


@pytest.mark.parametrize("count", [8, LARGE])
def test_splits_that_do_not_fit(layout, crews, count):
    for kind, message in crews.get(layout, 3).call(misfit_on_rank, count):
        assert kind == "DistBackendError"
        expected = f"rank 0 sends {4 * count + 4} bytes to rank 2, which expects {4 * count}"
        assert expected in message


# ---- one rank's own mistakes


def own_mistakes_on_rank(me, turn):
    if me.rank == 1:
        mistakes.check(dist.group.WORLD)
        me.board.set(turn)
    me.board.wait(turn)
    oracle.exercise("all_reduce", count=5)
    oracle.exercise("all_to_all_single", count=LARGE)


def test_own_mistakes_are_refused_at_once(layout, crews):
    """While the other ranks call nothing at all."""
    crew = crews.get(layout, 3)
    crew.call(own_mistakes_on_rank, "own-mistakes")


# ---- groups that are no more, or never were


def destroyed_on_rank(me):
    """Whatever is called of a destroyed group is refused at once, on every rank."""
    group = dist.new_group()
    oracle.exercise("all_reduce", group=group)
    backend = group._get_backend(torch.device("cpu"))
    dist.destroy_process_group(group)
    n, t, g, late = me.size, torch.ones(3), {"group": group}, timedelta(seconds=harness.DEADLINE)
    to, lists = (me.rank + 1) % n, [[torch.ones(3) for _ in range(n)]]
    options = dist.AllreduceCoalescedOptions()
    unknown, over = "(not initialized|not registered|resolve|Invalid)", "was destroyed"
    for name, (call, text) in {
        "all_reduce": (lambda: dist.all_reduce(t, **g), unknown),
        "gather": (lambda: dist.gather(t, None, to, **g), unknown),
        "send": (lambda: dist.send(t, to, **g), unknown),
        "batch": (lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, t, to, group)]), unknown),
        "object": (lambda: dist.all_gather_object([None] * n, 1, **g), unknown),
        "functional": (lambda: functional.all_reduce(t, "sum", group) + 1, unknown),
        "destroy": (lambda: dist.destroy_process_group(group), unknown),
        "the group's": (lambda: group.allreduce([t]).wait(), over),
        "the backend's": (lambda: backend.allreduce([t]).wait(), over),
        "its gather": (lambda: backend.allgather(lists, [t]).wait(), over),
        "its list": (lambda: backend.allreduce_coalesced([t], options).wait(), over),
        "its send": (lambda: backend.send([t], to, 0).wait(), over),
        "its recv": (lambda: backend.recv([t], to, 0).wait(), over),
        "its barrier": (lambda: backend.barrier().wait(), over),
        "its monitored barrier": (lambda: group.monitored_barrier(late, True), over),
        **(
            {"its split": (lambda: group.split_group([0, 1], group_name="never"), over)}
            if mistakes.SPLITS
            else {}
        ),
    }.items():
        _, message = raised(call)
        assert re.search(text, message), f"{name}: {message}"
    oracle.exercise("all_reduce", count=LARGE)


def test_a_destroyed_group_refuses_everything(layout, crews):
    crews.get(layout, 3).call(destroyed_on_rank)


def strangers_on_rank(me):
    """A rank that is not in a group gets nothing done in it, and keeps nobody waiting."""
    group = dist.new_group([0, 1])
    if me.rank == 2:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        tensor = torch.full((3,), 5.0)
        assert dist.all_reduce(tensor, group=group, async_op=True) is None  # torch warns
        assert tensor.tolist() == [5.0] * 3
    else:
        for call in (
            lambda: dist.broadcast(torch.ones(3), 2, group=group),
            lambda: dist.send(torch.ones(3), 2, group=group),
            lambda: dist.gather(torch.ones(3), None, 2, group=group),
        ):
            kind, message = raised(call)
            assert (kind, "rank 2 is not part of group" in message) == ("ValueError", True), message
        oracle.exercise("all_reduce", group=group)
    if me.rank == 0:  # whoever is in it is told; for torch the others are not members
        kind, message = raised(dist.new_group, [0, 0])
        assert (kind, "rank 0 stands twice" in message) == ("ValueError", True), message
    else:
        assert dist.new_group([0, 0]) is dist.GroupMember.NON_GROUP_MEMBER
    oracle.exercise("all_reduce", group=dist.new_group())
    oracle.exercise("all_reduce")


def test_strangers_of_a_group(layout, crews):
    crews.get(layout, 3).call(strangers_on_rank)


# ---- timeouts


def absent_on_rank(me, verb, count, asynchronous):
    """The last rank calls only when all others have their error."""
    harness.set_timeout(SHORT)
    late = me.size - 1
    if me.rank == late:
        me.board.wait_all("timed-out", range(late))
    tensor = torch.full((count,), float(me.rank))
    call = {
        "all_reduce": lambda: dist.all_reduce(tensor, async_op=asynchronous),
        "broadcast": lambda: dist.broadcast(tensor, 0, async_op=asynchronous),
        "barrier": lambda: dist.barrier(async_op=asynchronous),
    }[verb]
    work = call() if asynchronous else None
    error = raised(work.wait if asynchronous else call)
    assert (tensor == me.rank).all()
    me.board.set(f"timed-out-{me.rank}")
    harness.set_timeout(harness.DEADLINE)
    for i in range(3):
        oracle.exercise("all_reduce", count=[10, LARGE, 10][i], seed=i)
    return error


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
@pytest.mark.parametrize(
    ("verb", "count"), [("all_reduce", 8), ("all_reduce", LARGE), ("broadcast", 8), ("barrier", 1)]
)
def test_absent_rank_is_named_on_all(layout, two_hosts, verb, count, asynchronous):
    if asynchronous and verb != "all_reduce":
        pytest.skip("once is enough")
    errors = harness.run_ranks(
        3, absent_on_rank, verb, count, asynchronous, **options(layout, 3, two_hosts)
    )
    for rank, (kind, message) in enumerate(errors):
        assert kind == "DistBackendError", (rank, kind, message)
        assert verb in message
        assert re.search(r"\brank 2\b", message), (rank, message)
    assert any("timed out" in message for _, message in errors)


def absent_from_others_on_rank(me):
    """The same for what torch puts on top, one call after the other."""
    harness.set_timeout(1)
    late, errors = me.size - 1, {}
    for name, call in {
        "gather": gather_list(),
        "scatter": scatter_list(LARGE),
        "reduce_scatter": reduce_list(),
        "coalesced": coalesced(8, LARGE),
        "sparse": sparse(),
        "objects": everybodys_object,
        "functional": functional_sum,
        "all_to_all": lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
    }.items():
        if me.rank == late:
            me.board.wait_all(name, range(late))
        errors[name] = raised(call)
        me.board.set(f"{name}-{me.rank}")
        me.board.wait_all(name, range(me.size))
    harness.set_timeout(harness.DEADLINE)
    for verb in oracle.VERBS:
        oracle.exercise(verb, count=10)
    return errors


@pytest.mark.parametrize("layout", ["shm", "tcp"])
def test_absent_rank_is_named_by_every_call(layout, two_hosts):
    found = harness.run_ranks(3, absent_from_others_on_rank, **options(layout, 3, two_hosts))
    for rank, errors in enumerate(found):
        for name, (kind, message) in errors.items():
            assert kind == "DistBackendError", (rank, name, message)
            assert re.search(r"\brank 2\b", message), (rank, name, message)
    for name in found[0]:
        assert any("timed out" in errors[name][1] for errors in found), name


def nobody_receives_on_rank(me):
    """A message that nobody takes is an error of its sender's, and the next one arrives."""
    harness.set_timeout(1)
    if me.rank == 0:
        for call in (
            lambda: dist.send(torch.ones(LARGE), 1, tag=4),
            lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(3), 1, tag=6)])[
                0
            ].wait(),
        ):
            kind, message = raised(call)
            assert kind == "DistBackendError"
            assert re.search(r"rank 1 timed out", message), message
        me.board.set("gave-up")
    me.board.wait("gave-up")
    harness.set_timeout(harness.DEADLINE)
    if me.rank == 0:
        dist.send(torch.full((LARGE,), 5.0), 1, tag=5)
    else:
        got = torch.zeros(LARGE)
        dist.recv(got, 0, tag=5)
        assert (got == 5).all()
    oracle.exercise("all_reduce")


def test_a_message_that_nobody_takes(layout, two_hosts):
    harness.run_ranks(2, nobody_receives_on_rank, **options(layout, 2, two_hosts))


def stopped_on_rank(me):
    if me.rank == 1:
        me.board.set("stop-me")
    else:
        me.board.wait("stopped")
        me.board.set(f"calling-{me.rank}")
    return sum_of_all(me, LARGE)


@pytest.mark.parametrize("layout", ["shm", "shm-no-cma"])
def test_stopped_rank_is_slow_not_dead(layout, two_hosts):
    """For the failure timeout, here as long as a test may take."""
    chosen = options(layout, 3, two_hosts)
    chosen["env"]["MOONCAKE_FAILURE_TIMEOUT_MS"] = str(int(harness.DEADLINE * 1000))
    with harness.starting(3, stopped_on_rank, **chosen) as crew:
        crew.board.wait("stop-me")
        crew.stop(1)
        crew.board.set("stopped")
        crew.board.wait_all("calling", [0, 2])
        crew.cont(1)
        assert crew.results() == [total(range(3))] * 3


# ---- making a group


def init_on_rank(me, timeout, absent=None):
    if me.rank == absent:
        me.board.wait_all("ended", [r for r in range(me.size) if r != absent])
        return None
    error = raised(me.init, timeout=timeout)
    me.board.set(f"ended-{me.rank}")
    return error


@pytest.mark.parametrize("absent", [0, 2])
@pytest.mark.parametrize("key", [None, "a secret of the job"])
def test_rank_that_never_comes_is_named(absent, key):
    """Rank 0 hands out the job's key; with a key of their own the ranks do not even need it for
    that."""
    env = {"MOONCAKE_JOB_KEY": key} if key else {}
    errors = harness.run_ranks(3, init_on_rank, SHORT, absent, backend=None, env=env)
    for rank, error in enumerate(errors):
        if rank != absent:
            assert error[0] == "DistBackendError", error
            assert re.search(rf"rank(\(s\))? {absent}\b", error[1]), error


@pytest.mark.parametrize("layout", ["shm", "tcp"])
def test_wrong_job_key_is_refused(layout, two_hosts):
    chosen = options(layout, 2, two_hosts)
    chosen["rank_env"] = {
        0: {"MOONCAKE_JOB_KEY": "the right key of the job"},
        1: {"MOONCAKE_JOB_KEY": "a wrong key of the job"},
    }
    errors = harness.run_ranks(2, init_on_rank, SHORT, backend=None, **chosen)
    assert [kind for kind, _ in errors] == ["DistBackendError"] * 2, errors
    assert any("key" in message.lower() for _, message in errors), errors


@pytest.mark.parametrize("layout", ["shm", "tcp"])
def test_same_job_key_is_accepted(layout, two_hosts):
    chosen = options(layout, 2, two_hosts)
    chosen["env"]["MOONCAKE_JOB_KEY"] = "the right key of the job"
    assert harness.run_ranks(2, init_on_rank_works, backend=None, **chosen) == [None, None]


def short_key_on_rank(me):
    return raised(me.init)


def test_short_job_key_is_refused():
    env = {"MOONCAKE_JOB_KEY": "fifteen letters"}
    [(kind, message)] = harness.run_ranks(1, short_key_on_rank, backend=None, env=env)
    assert kind == "ValueError"
    assert "MOONCAKE_JOB_KEY has 15 bytes" in message
    assert "16 bytes or more" in message
    assert "fifteen" not in message


def init_on_rank_works(me):
    me.init()
    oracle.exercise("all_reduce")


def test_nothing_in_common():
    """One rank has only shared memory, the other only TCP: both must learn it, with the variable
    to look at."""
    rank_env = {0: {"MOONCAKE_TRANSPORTS": "shm"}, 1: {"MOONCAKE_TRANSPORTS": "tcp"}}
    errors = harness.run_ranks(2, init_on_rank, SHORT, backend=None, rank_env=rank_env)
    assert [kind for kind, _ in errors] == ["DistBackendError"] * 2, errors
    assert any("MOONCAKE_TRANSPORTS" in message for _, message in errors), errors


@pytest.mark.parametrize(
    "setting",
    [
        ("MOONCAKE_TRANSPORTS", "warp"),
        ("MOONCAKE_TRANSPORTS", "shm,,tcp"),
        ("MOONCAKE_EAGER_BYTES", "many"),
        ("MOONCAKE_HOST_IP", "localhost"),
        ("MOONCAKE_HOST_IP", "203.0.113.9"),
        ("MOONCAKE_CMA", "perhaps"),
        ("MOONCAKE_FAILURE_TIMEOUT_MS", "0"),
        ("MOONCAKE_TCP_CONNECTIONS", "0"),
    ],
    ids="=".join,
)
def test_bad_settings_are_named(setting):
    name, value = setting
    [(kind, message)] = harness.run_ranks(1, init_on_rank, SHORT, backend=None, env={name: value})
    assert kind in ("ValueError", "NotImplementedError"), (kind, message)
    assert value in message
    assert name in message or name == "MOONCAKE_TRANSPORTS"


# ---- deaths: test_failures.py has them by operation, here they come in every layout


def total(ranks):
    """all_reduce over ranks that give 2 ** rank tells who contributed."""
    return float(sum(2**rank for rank in ranks))


def sum_of_all(me, count):
    tensor = torch.full((count,), float(2**me.rank))
    dist.all_reduce(tensor)
    assert (tensor == tensor[0]).all()
    return tensor[0].item()


def until_death_on_rank(me, victim, what, blocked):
    """Operations until one goes on without the victim, which is killed meanwhile, or while all
    others wait for it."""
    if me.rank == victim and blocked:
        me.board.set(f"going-{me.rank}")
        me.board.wait("never")
    count = {"small": 8, "large": LARGE, "recv": 8}[what]
    survivors = [r for r in range(me.size) if r != victim]
    rounds, seen = 0, None
    while seen is None:
        if what != "recv":
            found = sum_of_all(me, count)
            assert found in (total(range(me.size)), total(survivors))
            seen = found if found == total(survivors) else None
        elif me.rank == victim:
            for r in survivors:
                dist.send(torch.ones(count), r)
        else:
            try:
                dist.recv(torch.ones(count), victim)
            except dist.DistBackendError as error:
                seen = type(error).__name__, str(error)
        rounds += 1
        if rounds == 20:
            me.board.set(f"going-{me.rank}")
        if blocked and me.rank != victim and not seen:
            raise AssertionError("ended without the victim")
    second = sum_of_all(me, count)
    me.board.set(f"second-{me.rank}")
    me.board.wait_all("second", survivors)
    dist.destroy_process_group()
    return seen, second


def check_death(results, victim):
    survivors = [r for r in range(len(results)) if r != victim]
    for rank in survivors:
        seen, second = results[rank]
        assert second == total(survivors)
        if isinstance(seen, tuple):
            assert seen[0] == "PeerLostError"
            assert re.search(rf"\brank {victim}\b", seen[1]), (rank, seen)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("what", ["small", "large", "recv"])
def test_killed_in_the_middle(layout, two_hosts, what, victim):
    arguments = (victim, what, False)
    with harness.starting(
        3, until_death_on_rank, *arguments, **options(layout, 3, two_hosts)
    ) as crew:
        crew.board.wait_all("going", range(3))
        crew.kill(victim)
        check_death(crew.results(dead=[victim]), victim)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("what", ["small", "large", "recv"])
def test_killed_while_others_wait_for_it(layout, two_hosts, what, victim):
    arguments = (victim, what, True)
    with harness.starting(
        3, until_death_on_rank, *arguments, **options(layout, 3, two_hosts)
    ) as crew:
        crew.board.wait_all("going", [victim])
        crew.kill(victim)
        check_death(crew.results(dead=[victim]), victim)


def between_on_rank(me, victim, count):
    oracle.exercise("all_reduce", count=count)
    me.board.set(f"ready-{me.rank}")
    me.board.wait("never" if me.rank == victim else "dead")
    # What the death makes known arrives in its own time: before this call, or during it.
    first = sum_of_all(me, count)
    dist.barrier()
    return first, sum_of_all(me, count)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("count", [8, LARGE])
def test_killed_between_operations(layout, two_hosts, count, victim):
    with harness.starting(
        3, between_on_rank, victim, count, **options(layout, 3, two_hosts)
    ) as crew:
        crew.board.wait_all("ready", range(3))
        crew.kill(victim)
        crew.board.set("dead")
        found = crew.results(dead=[victim])
        survivors = [r for r in range(3) if r != victim]
        assert [found[r] for r in survivors] == [(total(survivors),) * 2] * 2


def tcp_store_in_rank_0(me):
    if me.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        me.board.set("port", store.port)
    else:
        store = dist.TCPStore("127.0.0.1", me.board.wait("port"), is_master=False)
    dist.init_process_group(
        "mooncake", store=store, rank=me.rank, world_size=me.size,
        timeout=timedelta(seconds=harness.DEADLINE),
    )  # fmt: skip
    return until_death_on_rank(me, 0, "small", False)


@pytest.mark.parametrize("layout", ["shm", "tcp"])
def test_rank_0_dies_with_the_store(layout, two_hosts):
    chosen = options(layout, 3, two_hosts)
    with harness.starting(3, tcp_store_in_rank_0, backend=None, **chosen) as crew:
        crew.board.wait_all("going", range(3))
        crew.kill(0)
        check_death(crew.results(dead=[0]), 0)


def leaves_on_rank(me):
    """A rank that leaves in good order is not accused of dying."""
    oracle.exercise("all_reduce")
    if me.rank == 2:
        dist.destroy_process_group()
        me.board.set("left")
        me.board.wait_all("told", [0, 1])
        return None
    me.board.wait("left")
    assert sum_of_all(me, 8) == total([0, 1])
    error = raised(dist.recv, torch.ones(8), 2)
    me.board.set(f"told-{me.rank}")
    return error


def test_a_rank_that_left_is_named(layout, two_hosts):
    with harness.starting(3, leaves_on_rank, **options(layout, 3, two_hosts)) as crew:
        for kind, message in crew.results()[:2]:
            assert kind == "PeerLostError"
            assert re.search(r"rank 2\b.*left", message), message
        assert "continue, epoch" not in crew.log(0) + crew.log(1)
