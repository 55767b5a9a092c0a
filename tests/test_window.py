"""torch's windows: put, signal, wait_signal, mapped memory; hooks, and the flight recorder."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from datetime import timedelta

import harness
import pytest
import torch
import torch.distributed as dist
from conftest import LAYOUTS, layout_options
from harness import raised

try:
    from torch._C._distributed_c10d import (
        PutOptions,
        SignalOptions,
        WaitSignalOptions,
        _dump_fr_trace_json,
    )
    from torch.distributed import _new_window as new_window
except ImportError:
    pytest.skip("torch has windows since 2.15", allow_module_level=True)

CPU = torch.device("cpu")
CELL = 8192  # a put up to this size travels in a cell of the mailbox, a larger one is fetched


@pytest.fixture(params=LAYOUTS, scope="module")
def layout(request):
    return request.param


@pytest.fixture
def crew(layout, crews):
    return crews.get(layout, 3)


def neighbours(me):
    return (me.rank + 1) % me.size, (me.rank - 1) % me.size


def numbers(seed, count, dtype=torch.float32):
    return (torch.arange(count) * 7 + seed * 13).remainder(101).to(dtype)


def with_timeout(options, seconds):
    options.timeout = timedelta(seconds=seconds)
    return options


# ---- data and order


def order_on_rank(me):
    """Whoever has the signal has what was put before it, small and large."""
    to, source = neighbours(me)
    memory = torch.zeros(600_000)
    window = new_window(memory)
    for turn, count in enumerate([1, CELL // 4, CELL // 4 + 1, 500_000, 3, 0]):
        window.put(numbers(turn + me.rank, count), to, 5, False)
        window.put(numbers(turn + me.rank + 50, count // 2), to, 5 + count // 4, False)
        window.signal(to, False)
        window.wait_signal(source, False)
        expected = numbers(turn + source, count)
        expected[count // 4 : count // 4 + count // 2] = numbers(turn + source + 50, count // 2)
        assert torch.equal(memory[5 : 5 + count], expected), count
        dist.barrier()  # nobody puts over what is just compared
    window.tensor_deregister()


def many_on_rank(me, count):
    """All to all at once, without waiting, collectives in between; then everything is there."""
    memory = torch.zeros(me.size, count, 5000, dtype=torch.int32)
    window = new_window(memory)
    works = []
    for i in range(count):
        size = 5000 if i % 10 == 0 else 1 + i
        for to in range(me.size):
            content = torch.full((size,), 1 + me.rank * 1000 + i, dtype=torch.int32)
            works.append(window.put(content, to, (me.rank * count + i) * 5000, True))
        if i % 7 == 0:
            total = torch.ones(3)
            dist.all_reduce(total)
            assert total[0] == me.size
    for work in works:
        work.wait()
    window.tensor_deregister()
    for source in range(me.size):
        for i in range(count):
            size = 5000 if i % 10 == 0 else 1 + i
            assert (memory[source, i, :size] == 1 + source * 1000 + i).all(), (source, i)
            assert (memory[source, i, size:] == 0).all(), (source, i)


def large_on_rank(me):
    """8 MiB from everybody into one."""
    count = 2 << 20
    memory = torch.zeros(me.size if me.rank == 0 else 0, count)
    window = new_window(memory)
    work = window.put(numbers(me.rank, count), 0, me.rank * count, True)
    window.signal(0, True)
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    if me.rank == 0:
        for source in range(me.size):
            window.wait_signal(source, False)
            assert torch.equal(memory[source], numbers(source, count)), source
    window.tensor_deregister()


def sources_on_rank(me):
    """What is put may lie anywhere, and may be forgotten once put() has returned."""
    to, source = neighbours(me)
    memory = torch.zeros(3, 40_000, dtype=torch.complex64)
    window = new_window(memory)
    strided = torch.randn(40_000, 2, dtype=torch.complex64, generator=torch.manual_seed(me.rank))
    window.put(strided[:, 1], to, 0, True)
    window.put(strided[:, 0].conj(), to, 40_000, True)
    window.put(strided[:100, 0].clone(), to, 80_000, True)
    del strided
    window.signal(to, False)
    window.wait_signal(source, False)
    theirs = torch.randn(40_000, 2, dtype=torch.complex64, generator=torch.manual_seed(source))
    assert torch.equal(memory[0], theirs[:, 1])
    assert torch.equal(memory[1], theirs[:, 0].conj().resolve_conj())
    assert torch.equal(memory[2, :100], theirs[:100, 0])
    window.put(memory[2, :50], me.rank, 80_025, False)  # to ourselves, over itself
    assert torch.equal(memory[2, 25:75], theirs[:50, 0])
    window.tensor_deregister()


def signals_on_rank(me):
    """Each signal ends one wait, from each rank by itself; also our own."""
    window = new_window(torch.zeros(1))
    waits = [window.wait_signal(rank, True) for rank in range(me.size) for _ in range(3)]
    works = [window.signal(rank, True) for rank in range(me.size) for _ in range(3)]
    for work in works + waits:
        work.wait()
    options = with_timeout(WaitSignalOptions(), 0.2)
    kind, text = raised(window.wait_signal, (me.rank + 1) % me.size, False, options)
    assert kind == "DistBackendError", text
    assert "wait_signal from rank" in text
    assert "timed out" in text
    late = window.wait_signal((me.rank + 1) % me.size, True)
    kind, text = raised(late.wait, timedelta(seconds=0.1))
    assert "wait_signal on rank" in text
    dist.barrier()
    window.signal((me.rank - 1) % me.size, False)
    late.wait()
    window.tensor_deregister()


def idle_on_rank(me, layout):
    """The target is in no call."""
    window = new_window(torch.zeros(100_000))
    if me.rank == 0:
        begun = time.monotonic()
        for _ in range(30):
            window.put(torch.ones(100_000), 1, 0, False)
            window.signal(1, False)
        assert time.monotonic() - begun < 20
        me.board.set(f"{layout}-put")
    else:
        me.board.wait(f"{layout}-put")
    window.tensor_deregister()


def subgroups_on_rank(me):
    pair = dist.new_group([0, 2])
    everybody = new_window(torch.zeros(4))
    if me.rank != 1:
        memory = torch.zeros(4, dtype=torch.int64)
        window = new_window(memory, pair)
        other = 1 - dist.get_rank(pair)
        window.put(torch.tensor([me.rank + 5]), other, 2, False)
        window.signal(other, False)
        window.wait_signal(other, False)
        assert memory.tolist() == [0, 0, 7 - me.rank, 0]
        window.tensor_deregister()
    everybody.tensor_deregister()
    if me.rank != 1:
        dist.destroy_process_group(pair)


def again_on_rank(me):
    """One window, several tensors, one after the other."""
    window = new_window()
    to, _ = neighbours(me)
    for dtype in (torch.uint8, torch.bfloat16, torch.bool):
        memory = torch.zeros(3, 5, dtype=dtype)
        window.tensor_register(memory)
        window.put(torch.ones(4, dtype=dtype), to, 11, False)
        window.tensor_deregister()
        assert memory.flatten().tolist() == [0] * 11 + [1] * 4


# ---- errors


def errors_on_rank(me):
    backend = dist.group.WORLD._get_backend(CPU)
    assert dist.group.WORLD.supports_window
    memory = torch.zeros(10)
    empty = new_window()
    one = torch.ones(1)
    last = 2**63 - 1
    window = new_window(memory)
    wrong = [
        (empty.put, (one, 0, 0, False), "no tensor"),
        (empty.signal, (0, False), "no tensor"),
        (empty.wait_signal, (0, False), "no tensor"),
        (empty.map_remote_tensor, (0,), "no tensor"),
        (empty.tensor_deregister, (), "no tensor"),
        (empty.tensor_register, (torch.zeros(4, 4).t(),), "contiguous"),
        (empty.tensor_register, (torch.zeros(4).to_sparse(),), "layout"),
        (empty.tensor_register, (torch.zeros(4, device="meta"),), "meta"),
        (window.tensor_register, (memory,), "has a tensor"),
        (window.put, (one, me.size, 0, False), f"rank {me.size} is not in a group"),
        (window.put, (one, -1, 0, False), "rank -1 is not in a group"),
        (window.signal, (99, False), "rank 99"),
        (window.wait_signal, (-2, False), "rank -2"),
        (window.get_attr, (99,), "rank 99"),
        (window.map_remote_tensor, (99,), "rank 99"),
        (window.put, (one, 1, -1, False), "offset of -1"),
        (window.put, (one, 1, 10, False), "rank 1 registered 40 bytes"),
        (window.put, (one, 1, last, False), "offset of"),
        (window.put, (one, 1, last // 4, False), "rank 1 registered 40 bytes"),
        (window.put, (torch.ones(11), 1, 0, False), "rank 1 registered 40 bytes"),
        (window.put, (torch.ones(1, dtype=torch.float64), 1, 0, False), "the window's is Float"),
        (window.put, (torch.ones(1, device="meta"), 1, 0, False), "meta"),
        (backend.allocate_tensor, (), "negative"),
    ]
    for call, args, words in wrong:
        if call == backend.allocate_tensor:
            kind, text = raised(call, -1, dtype=torch.int32, device=CPU)
        else:
            kind, text = raised(call, *args)
        assert kind == "ValueError", (kind, text)
        assert words in text, text
    assert "not mapped here" in raised(window.map_remote_tensor, (me.rank + 1) % me.size)[1]
    assert not memory.any()
    window.tensor_deregister()
    assert "no tensor" in raised(window.put, one, 0, 0, False)[1]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int("forked" not in raised(new_window)[1] + raised(window.put, one, 0, 0, 0)[1])
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def mismatch_on_rank(me):
    """Ranks that call different things learn who called what, and go on."""
    window = new_window()
    _, text = raised(
        window.tensor_register, torch.zeros(4, dtype=torch.int32 if me.rank else torch.int64)
    )
    assert "window.tensor_register(int32)" in text, text
    assert "window.tensor_register(int64)" in text, text
    window.tensor_register(torch.zeros(4))
    _, text = raised(dist.barrier if me.rank else window.tensor_deregister)
    assert "window.tensor_deregister()" in text, text
    window.put(torch.ones(4), (me.rank + 1) % me.size, 0, False)
    window.tensor_deregister()


def mapped_on_rank(me, near):
    """Ranks of one host map what lies in the arena; the mapping outlives window and group."""
    backend = dist.group.WORLD._get_backend(CPU)
    assert backend.supports_tensor_alloc(CPU)
    own = backend.allocate_tensor(60_000, dtype=torch.float64, device=CPU)
    assert own.shape == (60_000,)
    assert not own.any()
    own.fill_(me.rank + 1)
    window = new_window(own.view(3, 20_000))
    assert window.map_remote_tensor(me.rank).data_ptr() == own.data_ptr()
    theirs = {}
    for rank in range(me.size):
        if near(me.rank, rank):
            theirs[rank] = window.map_remote_tensor(rank)
            assert theirs[rank].shape == (3, 20_000)
            assert (theirs[rank] == rank + 1).all()
        elif rank != me.rank:
            kind, text = raised(window.map_remote_tensor, rank)
            assert kind == "NotImplementedError", text
            assert "allocate_tensor" in text
    dist.barrier()
    for tensor in theirs.values():
        tensor[1, me.rank] = 100 + me.rank
    dist.barrier()
    for rank in range(me.size):
        if rank != me.rank and near(me.rank, rank):
            assert own.view(3, 20_000)[1, rank] == 100 + rank
    to, source = neighbours(me)
    window.put(torch.full((20_000,), -1.0 - me.rank, dtype=torch.float64), to, 40_000, False)
    window.signal(to, False)
    window.wait_signal(source, False)
    assert (own[40_000:] == -1.0 - source).all()
    window.tensor_deregister()
    del window
    for rank, tensor in theirs.items():
        assert tensor[0, 0] == rank + 1
    dist.barrier()


ON_ALL = [
    (order_on_rank, ()),
    (many_on_rank, (40,)),
    (large_on_rank, ()),
    (sources_on_rank, ()),
    (signals_on_rank, ()),
    (subgroups_on_rank, ()),
    (again_on_rank, ()),
    (errors_on_rank, ()),
    (mismatch_on_rank, ()),
]


@pytest.mark.parametrize(("function", "args"), ON_ALL, ids=lambda x: getattr(x, "__name__", ""))
def test_windows(crew, function, args):
    crew.call(function, *args)


def test_an_idle_target(crew, layout):
    crew.call(idle_on_rank, layout)


def all_near(a, b):
    return a != b


def first_two_near(a, b):
    return {a, b} == {0, 1}


def none_near(a, b):
    return False


def test_mapped_memory(crew, layout):
    near = {"shm": all_near, "shm-no-cma": all_near, "mixed": first_two_near}.get(layout, none_near)
    crew.call(mapped_on_rank, near)


# ---- the end of a rank


def survivor_on_rank(me, victim, large, mode):
    """Puts go on between those who live; whoever asks the dead one for something is told."""
    window = new_window(torch.zeros(100_000))
    to = (victim + 1) % me.size
    other = next(r for r in range(me.size) if r not in (victim, me.rank))
    if me.rank == victim:
        window.put(torch.ones(5), to, 0, False)
        window.signal(to, False)
        for count in itertools.count():
            window.put(torch.ones(100_000 if large else 10), to, 0, True)
            if count == 100:
                me.board.set("ready")
            time.sleep(0.0001)
    if me.rank == to:
        window.wait_signal(victim, False)
    me.board.wait("killed")
    for call in (
        lambda: window.wait_signal(victim, False),
        lambda: window.put(torch.ones(100_000 if large else 10), victim, 0, False),
        lambda: window.signal(victim, False),
        lambda: window.put(torch.ones(10), victim, 0, True).wait(),
    ):
        kind, text = raised(call)
        assert kind == "PeerLostError", (kind, text)
        assert f"rank {victim}" in text, text
    for _ in range(20):
        window.put(torch.full((50_000,), 2.0 + me.rank), other, 50_000, False)
        window.signal(other, False)
        window.wait_signal(other, False)
    if mode == "raise":  # one operation of the survivors ends with the loss
        assert raised(window.tensor_deregister)[0] == "PeerLostError"
    window.tensor_deregister()


@pytest.mark.parametrize("mode", ["continue", "raise"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("layout", ["shm", "tcp", "mixed"])
def test_a_rank_is_killed(layout, large, mode, two_hosts):
    options = layout_options(layout, 3, two_hosts)
    options["env"] = {**options["env"], "MOONCAKE_ON_FAILURE": mode}
    with harness.starting(3, survivor_on_rank, 1, large, mode, **options) as crew:
        crew.board.wait("ready")
        crew.kill(1)
        crew.board.set("killed")
        crew.results(dead=[1])


def stopped_on_rank(me):
    """A target that is stopped: the timeout says whom to look at, then all goes on."""
    window = new_window(torch.zeros(100_000))
    if me.rank == 1:
        me.board.set("pid", os.getpid())
        me.board.wait("over")
    else:
        harness.stop_process(me.board.wait("pid"))
        options = with_timeout(PutOptions(), 0.5)
        kind, text = raised(window.put, torch.ones(100_000), 1, 0, False, options)
        assert kind == "DistBackendError", text
        assert "put to rank 1 timed out" in text
        for _ in range(8):
            window.signal(1, True)
        kind, text = raised(window.signal, 1, False, with_timeout(SignalOptions(), 0.3))
        assert "signal to rank 1 timed out" in text
        os.kill(me.board.wait("pid"), signal.SIGCONT)
        window.put(torch.ones(100_000), 1, 0, False)
        me.board.set("over")
    window.tensor_deregister()


def test_a_target_is_stopped():
    harness.run_ranks(2, stopped_on_rank, env={"MOONCAKE_FAILURE_TIMEOUT_MS": "20000"})


# ---- the end of the group


def destroyed_on_rank(me):
    window, idle = new_window(torch.zeros(10)), new_window()
    waiting = window.wait_signal((me.rank + 1) % me.size, True)
    dist.destroy_process_group()
    # Of ours, or, where the other rank was quicker, of the rank that has left.
    _, text = raised(waiting.wait)
    assert "was destroyed" in text or f"rank {1 - me.rank}: it has left the group" in text, text
    for call in (
        lambda: window.put(torch.ones(1), 0, 0, False),
        lambda: idle.tensor_register(torch.ones(1)),
        window.tensor_deregister,
        lambda: window.map_remote_tensor(0),
    ):
        kind, text = raised(call)
        assert kind == "DistBackendError", text
        assert "destroyed" in text


def aborted_on_rank(me):
    window = new_window(torch.zeros(10))
    waiting = window.wait_signal((me.rank + 1) % me.size, True)
    begun = time.monotonic()
    dist.group.WORLD.abort()
    assert time.monotonic() - begun < 10  # the recorder's dump would wait 15 s for Python's lock
    _, text = raised(waiting.wait)  # as above
    assert "aborted" in text or f"rank {1 - me.rank}: it has left the group" in text, text
    assert "aborted" in raised(window.signal, 0, False)[1]


@pytest.mark.parametrize("function", [destroyed_on_rank, aborted_on_rank])
def test_the_group_ends(function):
    harness.run_ranks(2, function)


def dropped_on_rank(me):
    """The object goes without the others: what still comes is dropped."""
    memory = torch.zeros(100_000)
    window, stays = new_window(memory), new_window(torch.zeros(1))
    dist.barrier()
    if me.rank == 0:
        del window
    dist.barrier()
    if me.rank == 1:
        window.put(torch.ones(100_000), 0, 0, False)
        window.put(torch.ones(10), 0, 0, False)
        stays.signal(0, False)
    else:
        stays.wait_signal(1, False)
        assert not memory.any()
    stays.tensor_deregister()


def test_a_window_is_dropped():
    harness.run_ranks(2, dropped_on_rank)


# ---- hooks, and the flight recorder


def recorded_on_rank(me):
    """The recorder that torch attaches by itself has our operations by torch's names, completed."""
    group = dist.group.WORLD
    seen, ended = [], []
    group.register_pre_hook(1, lambda args: seen.append((args.name.name, args.op_id)))
    group.register_post_hook(1, lambda args: ended.append((args.name.name, args.op_id)))
    one, all_ = torch.ones(4), torch.ones(4 * me.size)
    dist.all_reduce(one)
    dist.broadcast(one, 0)
    dist.reduce(one, 0)
    dist.all_gather_into_tensor(all_, one)
    dist.all_gather([torch.ones(4) for _ in range(me.size)], one)
    dist.reduce_scatter_tensor(one, all_)
    dist.all_to_all_single(all_, all_.clone())
    dist.gather(one, [torch.ones(4) for _ in range(me.size)] if me.rank == 0 else None, 0)
    dist.scatter(one, [torch.ones(4) for _ in range(me.size)] if me.rank == 0 else None, 0)
    dist.barrier()
    works = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(3)]
    to, source = neighbours(me)
    works.append(dist.isend(torch.ones(50_000), to, tag=4))
    works.append(dist.irecv(torch.ones(50_000), source, tag=4))
    for work in works:
        work.wait()
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)
    assert seen == ended
    assert [name for name, _ in seen][:2] == ["ALLREDUCE", "BROADCAST"]
    trace = json.loads(_dump_fr_trace_json(includeCollectives=True, backend="mooncake"))
    return [(e["profiling_name"], e["state"], e["input_sizes"]) for e in trace["entries"]]


def test_the_flight_recorder_has_our_operations():
    for rank, entries in enumerate(harness.run_ranks(2, recorded_on_rank)):
        names = [
            "all_reduce", "broadcast", "reduce", "_all_gather_base", "all_gather",
            "_reduce_scatter_base", "all_to_all_single", "gather", "scatter", "barrier",
            "all_reduce", "all_reduce", "all_reduce",
            f"send {rank}->{1 - rank}", f"recv {rank}<-{1 - rank}",
        ]  # fmt: skip
        assert [name for name, _, _ in entries] == [f"mooncake:{name}" for name in names]
        assert {state for _, state, _ in entries} == {"completed"}, entries
        assert entries[0][2] == [[4]]
        assert entries[10][2] == [[50_000]]


def failed_on_rank(me):
    """What does not end well is not completed: that is what a post-mortem looks for."""
    dist.all_reduce(torch.ones(1))
    if me.rank == 0:
        harness.set_timeout(0.3)
        raised(dist.recv, torch.ones(1), 1)
    trace = json.loads(_dump_fr_trace_json(includeCollectives=True, backend="mooncake"))
    return {e["profiling_name"]: e["state"] for e in trace["entries"]}


def test_what_failed_is_not_completed():
    states = harness.run_ranks(2, failed_on_rank)[0]
    assert states["mooncake:all_reduce"] == "completed"
    assert states["mooncake:recv 0<-1"] == "scheduled"
