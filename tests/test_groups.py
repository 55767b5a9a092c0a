"""Groups: subsets, overlaps, many at once, life and death of groups, stores, other backends
beside ours."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import harness
import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import ALL_LAYOUTS, BLOCKING_DEVICE_LAYOUT, layout_options
from harness import raised

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(params=[*ALL_LAYOUTS, BLOCKING_DEVICE_LAYOUT], scope="module")
def layout(request):
    return request.param


@pytest.fixture
def crew(layout, crews):
    return crews.get(layout, 4)


def use(group, seed=0):
    """Every verb once, small and large."""
    last = dist.get_world_size(group) - 1
    for verb in oracle.VERBS:
        oracle.exercise(verb, group=group, count=5, root=last, seed=seed)
    oracle.exercise("all_reduce", group=group, count=20_000, seed=seed)
    dist.barrier(group)


def subsets_on_rank(me):
    groups = []
    for size in range(1, me.size + 1):
        for members in itertools.combinations(range(me.size), size):
            group = dist.new_group(members)
            if me.rank in members:
                assert dist.get_world_size(group) == size
                groups.append(group)
            else:
                assert group is dist.GroupMember.NON_GROUP_MEMBER
    for group in groups:
        use(group, len(groups))
    for group in groups:
        dist.destroy_process_group(group)
    use(None)


def overlapping_on_rank(me, count):
    """Every rank calls the groups' operations in an order of its own; nothing may wait for
    another group."""
    drawn = random.Random(3)
    lists = [sorted(drawn.sample(range(me.size), drawn.randint(2, me.size))) for _ in range(count)]
    groups = [(members, dist.new_group(members)) for members in lists]
    mine = [(i, members, group) for i, (members, group) in enumerate(groups) if me.rank in members]
    for turn in range(3):
        order = random.Random(10 * turn + me.rank)
        order.shuffle(mine)
        under_way = []
        for i, members, group in mine:
            tensor = torch.full(([4, 15_000][i % 2],), float(i + 1 + me.rank))
            under_way.append(
                (dist.all_reduce(tensor, group=group, async_op=True), tensor, i, members)
            )
        order.shuffle(under_way)
        for work, tensor, i, members in under_way:
            work.wait()
            assert (tensor == sum(i + 1 + r for r in members)).all(), (i, members)
    for _, _, group in mine:
        dist.destroy_process_group(group)


def names_on_rank(me):
    """Errors of a sub-group say which global ranks are meant."""
    group = dist.new_group([1, 3])
    if me.rank in (1, 3):
        kind, text = raised(dist.all_reduce, torch.ones(me.rank), group=group)
        assert kind == "DistBackendError"
        assert "rank 1 (global rank 3)" in text, text
        assert "rank 0 (global rank 1)" in text, text
        use(group)
    use(None)


def messages_on_rank(me):
    """The same two ranks and tags in two groups: messages stay in theirs."""
    first, second = dist.new_group([0, 2]), dist.new_group([2, 0, 3])
    if me.rank == 0:
        dist.send(torch.tensor([1]), 2, group=first, tag=5)
        dist.send(torch.tensor([2]), 2, group=second, tag=5)
    elif me.rank == 2:
        got = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.recv(got[1], 0, group=second, tag=5)
        dist.recv(got[0], 0, group=first, tag=5)
        assert [int(t) for t in got] == [1, 2]


def reinit_on_rank(me):
    for turn in range(3):
        me.init(name=f"store-{turn}")
        group = dist.new_group([0, 1])
        use(None, turn)
        if me.rank < 2:
            use(group, turn)
        dist.destroy_process_group()
        assert not dist.is_initialized()
        del group  # whoever holds a group holds its engine
    harness.until(lambda: not our_threads(), "our threads to end")


def our_threads():
    """Names of the library's threads in this process. One that nobody joins is there for a moment
    after its work has ended."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.add((task / "comm").read_text().strip())
    return {name for name in found if name.startswith("mooncake")}


def reinit_at_one_address_on_rank(me, port):
    """Nobody may find rank 0's old store where the new one is about to be."""
    for turn in range(10):
        dist.init_process_group(
            "mooncake",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=me.rank,
            world_size=me.size,
            timeout=timedelta(seconds=30),
        )
        use(None, turn)
        dist.barrier()
        dist.destroy_process_group()


def leaks_on_rank(me):
    """Groups that come and go leave no descriptor and no mapping behind."""

    def held():
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:")

    def once(turn):
        me.init(name=f"store-{turn}")
        use(dist.new_group(), turn)
        dist.destroy_process_group()

    once(0)
    first = held()
    for turn in range(1, 4):
        once(turn)
    assert held() == first


def used_after_destroy_on_rank(me):
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    use(group)
    dist.destroy_process_group(group)
    if me.rank == 0:
        kind, _ = raised(lambda: backend.allreduce([torch.ones(3)]).wait())
        assert kind in ("DistBackendError", "RuntimeError", "ValueError")
    use(None)


def pending_at_destroy_on_rank(me, name):
    """Rank 0 destroys a group in which an operation of its own will never be answered."""
    group = dist.new_group()
    if me.rank == 0:
        work = dist.all_reduce(torch.ones(20_000), group=group, async_op=True)
        message = dist.irecv(torch.ones(3), 1, group=group)
        dist.destroy_process_group(group)
        assert raised(work.wait)[0] == "DistBackendError"
        assert raised(message.wait)[0] == "DistBackendError"
        me.board.set(name)
    me.board.wait(name)
    use(None)


def waited_for_at_destroy_on_rank(me, turns):
    """Threads are in wait() while the group goes, and with it the engine and what it had mapped.
    They have nothing of it but their works."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    ends = []
    for turn in range(turns):
        me.init(name=f"waited-for-{turn}")
        dist.all_reduce(torch.ones(3))
        works = [dist.irecv(torch.ones(3), 1 - me.rank, tag=tag) for tag in range(3)]
        if me.rank == 0:
            works += [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]
        threads = [threading.Thread(target=lambda w=w: ends.append(how(w.wait))) for w in works]
        works.clear()
        for thread in threads:
            thread.start()
        dist.destroy_process_group()
        for thread in threads:
            thread.join(harness.DEADLINE)
            assert not thread.is_alive()
    assert len(ends) == turns * (5 if me.rank == 0 else 3)
    assert set(ends) <= {"", "DistBackendError", "PeerLostError"}, ends


def how(call):
    """The type of what it raises; nothing: none."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def left_by_one_on_rank(me):
    """Rank 1 destroys a group and stays in the job: the rest use it on, at once."""
    group = dist.new_group()
    use(group)
    if me.rank == 1:
        dist.destroy_process_group(group)
    else:
        for count in (5, 20_000):
            tensor = torch.full((count,), float(me.rank))
            work = dist.all_reduce(tensor, group=group, async_op=True)
            work.wait()
            assert (tensor == sum(r for r in range(me.size) if r != 1)).all()
            assert work.contributors == [r for r in range(me.size) if r != 1]
        kind, text = raised(dist.broadcast, tensor, 1, group=group)
        assert (kind, "it has left the group" in text) == ("PeerLostError", True), text
        dist.destroy_process_group(group)
    use(None)


def other_backends_on_rank(me, world):
    assert dist.get_backend() == world
    ours, theirs = dist.new_group(backend="mooncake"), dist.new_group(backend="gloo")
    half = dist.new_group([0, 2], backend="mooncake-cpu")
    use(ours)
    dist.all_reduce(torch.ones(3), group=theirs)
    if me.rank in (0, 2):
        use(half)
    dist.barrier()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == me.size).all()


def tcp_store_on_rank(me, port, what):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if what == "PrefixStore":
        store = dist.PrefixStore("outer", dist.PrefixStore("inner", store))
    dist.init_process_group(
        "mooncake", store=store, rank=me.rank, world_size=me.size, timeout=timedelta(seconds=60)
    )
    use(None)
    use(dist.new_group([0, me.size - 1])) if me.rank in (0, me.size - 1) else dist.new_group(
        [0, me.size - 1]
    )
    if what == "gone":
        me.board.set(f"up-{me.rank}")
        me.board.wait("gone")
        for seed in range(3):
            use(None, seed)
        peer = me.rank ^ 1
        got = torch.zeros(30_000)
        works = [dist.irecv(got, peer), dist.isend(torch.full((30_000,), float(me.rank)), peer)]
        for work in works:
            work.wait()
        assert (got == peer).all()
        me.board.set(f"done-{me.rank}")
        me.board.wait_all("done", range(me.size))
        dist.destroy_process_group()


def test_every_subset(crew):
    crew.call(subsets_on_rank)


def test_dozens_of_overlapping_groups(crew):
    crew.call(overlapping_on_rank, 36)


def test_errors_name_global_ranks(crew):
    crew.call(names_on_rank)


def test_messages_stay_in_their_group(crew):
    crew.call(messages_on_rank)


def test_destroy_and_init_again(layout, two_hosts):
    harness.run_ranks(3, reinit_on_rank, backend=None, **layout_options(layout, 3, two_hosts))


def test_destroy_and_init_again_at_the_same_address():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    harness.run_ranks(4, reinit_at_one_address_on_rank, port, backend=None)


def test_nothing_is_left_in_the_process(layout, two_hosts):
    harness.run_ranks(2, leaks_on_rank, backend=None, **layout_options(layout, 2, two_hosts))


def test_a_destroyed_group_is_refused(crew):
    crew.call(used_after_destroy_on_rank)


def test_who_leaves_a_group_is_not_waited_for(crew):
    crew.call(left_by_one_on_rank)


def test_destroy_ends_what_is_pending(layout, two_hosts):
    """Bounded by the failure timeout."""
    chosen = layout_options(layout, 2, two_hosts)
    chosen["env"]["MOONCAKE_FAILURE_TIMEOUT_MS"] = "500"
    harness.run_ranks(2, pending_at_destroy_on_rank, "destroyed", **chosen)


def test_destroy_while_threads_wait():
    env = {"MOONCAKE_TRANSPORTS": "shm", "MOONCAKE_FAILURE_TIMEOUT_MS": "500"}
    harness.run_ranks(2, waited_for_at_destroy_on_rank, 8, backend=None, env=env)


@pytest.mark.parametrize("world", ["gloo", "mooncake"])
def test_beside_other_backends(world):
    harness.run_ranks(3, other_backends_on_rank, world, backend=world)


@pytest.fixture
def store_process():
    """A TCPStore in a process of its own: (process, port)."""
    code = (
        "import torch.distributed as d, sys;"
        "s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
        "print(s.port, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.mark.parametrize("what", ["TCPStore", "PrefixStore"])
def test_stores(store_process, what):
    harness.run_ranks(3, tcp_store_on_rank, store_process[1], what, backend=None)


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_operations_go_on_without_the_store(store_process, transports):
    process, port = store_process
    env = {"MOONCAKE_TRANSPORTS": transports, "MOONCAKE_HOST_IP": "127.0.0.1"}
    with harness.starting(2, tcp_store_on_rank, port, "gone", backend=None, env=env) as crew:
        crew.board.wait_all("up", range(2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        crew.board.set("gone")
        crew.results()


def threads_on_rank(me, size, transports):
    """N ranks in one process, over a HashStore: no singletons."""
    from mooncake_backend import extension

    native = extension.load()
    store = dist.HashStore()
    results: list[object] = [None] * size

    def rank(r):
        try:
            backend = native.create_backend(
                store, r, size, [], "threads", timedelta(seconds=60), "mooncake",
                {"transports": transports}, None,
            )  # fmt: skip
            wires = {backend.transport_to(p) for p in range(size) if p != r}
            for turn, count in enumerate([4, 30_000, 1, 200_000]):
                tensor = oracle.contents(turn, r, count, torch.float32)
                backend.allreduce([tensor]).wait()
                parts = [oracle.contents(turn, p, count, torch.float32) for p in range(size)]
                oracle.same(tensor, oracle.reduced("SUM", parts), f"count {count}")
            to, source = (r + 1) % size, (r - 1) % size
            got = torch.zeros(30_000)
            works = [
                backend.recv([got], source, 1),
                backend.send([torch.full((30_000,), float(r))], to, 1),
            ]
            for work in works:
                work.wait()
            assert (got == source).all()
            backend.barrier().wait()
            results[r] = wires
        except BaseException as error:
            results[r] = error

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("transports", ["inproc", "shm", "tcp"])
def test_ranks_as_threads(transports):
    env = {"MOONCAKE_HOST_IP": "127.0.0.1"}
    [wires] = harness.run_ranks(1, threads_on_rank, 4, [transports], backend=None, env=env)
    assert wires == [{transports}] * 4


EXIT = """
import sys, threading, torch, torch.distributed as dist
import mooncake_backend; mooncake_backend.register()
rank, path, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("mooncake", store=dist.FileStore(path, 2), rank=rank, world_size=2)
group = dist.new_group()
for g in (None, group):
    for count in (8, 100_000):
        t = torch.full((count,), float(rank))
        dist.all_reduce(t, group=g)
        assert (t == 1).all()
works = [dist.all_reduce(torch.ones(100), async_op=True) for _ in range(10)]
if what == "messages":
    got = torch.zeros(50_000)
    request = dist.irecv(got, 1 - rank)
    dist.isend(torch.full((50_000,), float(rank)), 1 - rank).wait()
    request.wait()
if what == "future":
    kept = works[-1].get_future().then(lambda f: None)
if what == "waited":
    for work in works: work.wait()
if what == "pending" and rank == 0:
    pending = [dist.all_reduce(torch.ones(100), async_op=True), dist.irecv(torch.ones(1), 1)]
if what == "raises":
    for work in works: work.wait()
    raise SystemExit(7)
"""


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("what", ["plain", "waited", "messages", "future", "pending", "raises"])
def test_exit_without_destroy(tmp_path, what, transports):
    """Exit code and stderr are the program's own."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "MOONCAKE_TRANSPORTS": transports,
        "MOONCAKE_HOST_IP": "127.0.0.1",
        "MOONCAKE_FAILURE_TIMEOUT_MS": "2000",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT, str(rank), str(tmp_path / "store"), what],
            env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            _, stderr = process.communicate(timeout=harness.DEADLINE)
            lines = [line for line in stderr.splitlines() if "destroy_process_group" not in line]
            assert process.returncode == (7 if what == "raises" else 0), stderr
            assert not lines, stderr
    finally:
        for process in processes:
            process.kill()
            process.communicate()
