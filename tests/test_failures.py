"""What a program sees when ranks die, fall silent or come back: results, errors, contributors."""

from __future__ import annotations

import gc
import pickle
import signal

import cards
import devices
import harness
import oracle
import pytest
import torch
import torch.distributed as dist
from harness import raised, until
from torch._C._distributed_c10d import AllgatherOptions

import mooncake_backend
from mooncake_backend import MooncakeBackendOptions, PeerLostError, membership

TRANSPORTS = ["shm", "tcp", "sim", pytest.param("fabric", marks=pytest.mark.slow)]
SMALL, LARGE = 256, 1 << 20  # float32 elements: 1 KiB and 4 MiB
FEW = 20_000  # elements beyond what travels in a slot, but quick
SHORT = 0.5  # a failure_timeout that has to pass in the test


# Tensors of a device, by how their operations go.
DEVICES = {"staged": {}, "by-kernels": {"MOONCAKE_PEER_BYTES": "16384"}}
# Transports, and tensors of a device with waits that raise as those of CPU tensors do.
WITH_DEVICE = [*TRANSPORTS, pytest.param("device", marks=pytest.mark.ci)]


def over(transports, **more):
    if transports == "device":
        devices.prepare("fake")
        more = {devices.VARIABLE: "fake", "MOONCAKE_BLOCKING_WAIT": "1", **more}
        transports = "shm"
    return {"env": {**cards.over(transports), **more}}


def on_device(layout):
    devices.prepare("fake")
    return over("shm", **{devices.VARIABLE: "fake"}, **DEVICES[layout])


def active(group=None):
    return mooncake_backend.get_active_ranks(group or dist.group.WORLD).tolist()


def die():
    signal.raise_signal(signal.SIGKILL)


def go(me, name, ranks):
    """All these ranks have come here."""
    me.board.set(f"{name}-{me.rank}")
    me.board.wait_all(name, ranks)


def total(ranks):
    """all_reduce over ranks that give 2 ** rank tells who contributed."""
    return float(sum(2**rank for rank in ranks))


def reduce_all(me, count=SMALL):
    tensor = torch.full((count,), float(2**me.rank))
    dist.all_reduce(tensor)
    assert (tensor == tensor[0]).all()
    return tensor[0].item()


# ---- every collective, while ranks are killed one after the other


class Verb:
    """One collective over and over, with what it must give for any set of contributors."""

    def __init__(self, name, me, count, root):
        self.name, self.me, self.root = name, me, root
        self.each = count if name in WHOLE else max(count // me.size, 1)
        length = count if name in WHOLE else self.each * (1 if "gather" in name else me.size)
        self.given = [oracle.contents(7, r, length, torch.float32) for r in range(me.size)]
        self.known = {}

    def expected(self, who):
        key = tuple(who)
        if key not in self.known:
            self.known[key] = self.compute(who)
        return self.known[key]

    def compute(self, who):
        me, size, given = self.me.rank, self.me.size, self.given
        zeros = torch.zeros(self.each)
        op = "AVG" if self.name == "all_reduce_avg" else "SUM"
        if self.name in ("all_reduce", "all_reduce_avg"):
            return oracle.reduced(op, [given[r] for r in who])
        if self.name == "reduce":
            return oracle.reduced(op, [given[r] for r in who]) if me == self.root else given[me]
        if self.name == "broadcast":
            return given[self.root]
        if self.name == "gather" and me != self.root:
            return torch.empty(0)
        if self.name == "barrier":
            return torch.empty(0)
        mine = slice(me * self.each, (me + 1) * self.each)
        if self.name == "scatter":
            return given[self.root][mine]
        if self.name.startswith("reduce_scatter"):
            return oracle.reduced(op, [given[r][mine] for r in who])
        part = slice(None) if "gather" in self.name else mine
        return torch.cat([given[r][part] if r in who else zeros for r in range(size)])

    def call(self, asynchronous):
        """The work (or None) and the result, to be looked at when the work is done."""
        own, size = self.given[self.me.rank], self.me.size
        stale = torch.full((size * self.each,), -1.0)
        named = {"async_op": asynchronous}
        if self.name in ("all_reduce", "all_reduce_avg", "reduce", "broadcast"):
            tensor = own.clone()
            if self.name == "broadcast":
                return dist.broadcast(tensor, self.root, **named), tensor
            if self.name == "reduce":
                return dist.reduce(tensor, self.root, **named), tensor
            op = dist.ReduceOp.AVG if self.name == "all_reduce_avg" else dist.ReduceOp.SUM
            return dist.all_reduce(tensor, op, **named), tensor
        if self.name == "barrier":
            return dist.barrier(**named), torch.empty(0)
        if self.name == "reduce_scatter_tensor":
            output = stale[: self.each]
            return dist.reduce_scatter_tensor(output, own, **named), output
        if self.name == "all_gather_into_tensor":
            return dist.all_gather_into_tensor(stale, own, **named), stale
        if self.name == "all_to_all_single":
            return dist.all_to_all_single(stale, own, **named), stale
        if self.name == "reduce_scatter":
            output = stale[: self.each]
            return dist.reduce_scatter(output, list(own.split(self.each)), **named), output
        outputs = list(stale.split(self.each))
        if self.name == "gather":
            is_root = self.me.rank == self.root
            work = dist.gather(own, outputs if is_root else None, self.root, **named)
            return work, stale if is_root else torch.empty(0)
        if self.name == "scatter":
            inputs = list(own.split(self.each)) if self.me.rank == self.root else None
            output = stale[: self.each]
            return dist.scatter(output, inputs, self.root, **named), output
        if self.name == "all_gather_coalesced":
            half = self.each // 2
            options = AllgatherOptions()
            options.asyncOp = asynchronous
            lists = [[output[:half], output[half:]] for output in outputs]
            work = dist.group.WORLD.allgather_coalesced(lists, [own[:half], own[half:]], options)
            return (work if asynchronous else work.wait()), stale
        if self.name == "all_gather":
            return dist.all_gather(outputs, own, **named), stale
        return dist.all_to_all(outputs, list(own.split(self.each)), **named), stale


WHOLE = ("all_reduce", "all_reduce_avg", "reduce", "broadcast", "barrier")
VERBS = [
    "all_reduce", "all_reduce_avg", "reduce", "broadcast", "barrier", "all_gather",
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "gather", "scatter", "reduce_scatter", "all_gather_coalesced",
]  # fmt: skip
VICTIMS = (3, 0)  # of four
SURVIVOR = 1


def loop_on_rank(me, verbs, count, asynchronous):
    """One verb after the other until the next victim is lost; returns in which round that was."""
    who = list(range(me.size))
    rounds = []
    for phase, (name, victim) in enumerate(zip(verbs, VICTIMS, strict=False)):
        verb = Verb(name, me, count, SURVIVOR)
        left = [r for r in who if r != victim]
        turn = 0
        while victim in who:
            work, result = verb.call(asynchronous)
            if asynchronous:
                work.wait()
                contributed = work.contributors
                assert contributed in (who, left), (name, contributed)
                assert work.failed_ranks == [r for r in range(me.size) if r not in contributed]
            else:
                fits = [w for w in (who, left) if torch.equal(result, verb.expected(w))]
                assert fits, f"{name} on rank {me.rank}: neither {who} nor {left} gives this"
                contributed = who if who in fits else left
            oracle.same(result, verb.expected(contributed), f"{name} over {contributed}")
            # Tells all ranks the same: the verb itself does not in every case.
            told = dist.all_reduce(torch.ones(1), async_op=True)
            told.wait()
            assert set(told.contributors) <= set(contributed)
            who = told.contributors
            turn += 1
            if turn == 3 and me.rank == victim:
                me.board.set(f"looping-{phase}-{me.rank}")
        assert who == left
        assert active() == [int(r in left) for r in range(me.size)]
        rounds.append(turn)
        # The verb once more, among the survivors from its beginning.
        work, result = verb.call(asynchronous)
        if asynchronous:
            work.wait()
            assert mooncake_backend.get_local_success(work)
            assert work.failed_ranks == [r for r in range(me.size) if r not in left]
        oracle.same(result, verb.expected(left), f"{name} over {left}, once more")
    return rounds, mooncake_backend.get_current_epoch(dist.group.WORLD)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["1KiB", "4MiB"])
@pytest.mark.parametrize("verbs", list(zip(VERBS[::2], VERBS[1::2], strict=True)), ids="-".join)
@pytest.mark.parametrize("transports", TRANSPORTS)
def test_survivors_go_on(transports, verbs, count, asynchronous):
    """Killed in the middle of a loop: two ranks, the second one is rank 0."""
    kill_in_a_loop(verbs, count, asynchronous, over(transports))


@pytest.mark.ci
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("layout", "count"), [("staged", SMALL), ("staged", LARGE), ("by-kernels", FEW)]
)
@pytest.mark.parametrize("verbs", list(zip(VERBS[::2], VERBS[1::2], strict=True)), ids="-".join)
def test_survivors_go_on_with_device_tensors(layout, verbs, count, asynchronous):
    if layout == "by-kernels" and {"barrier", "all_gather_coalesced"} & {*verbs}:
        pytest.skip("these are staged, and so tell a loss once more")
    kill_in_a_loop(verbs, count, asynchronous, on_device(layout))


def kill_in_a_loop(verbs, count, asynchronous, options):
    with harness.starting(4, loop_on_rank, verbs, count, asynchronous, **options) as crew:
        for phase, victim in enumerate(VICTIMS):
            crew.board.wait(f"looping-{phase}-{victim}")
            crew.kill(victim)
        found = crew.results(dead=VICTIMS)
        assert found[1] == found[2], "the survivors saw it in different rounds"
        assert found[1][1] == 3


def two_at_once_on_rank(me, victims, count):
    sums = []
    while not sums or sums[-1] != total(set(range(me.size)) - set(victims)):
        sums.append(reduce_all(me, count))
        if len(sums) == 3:
            me.board.set(f"looping-{me.rank}")
    return sums, active()


@pytest.mark.parametrize("victims", [(1, 3), (0, 1)], ids=str)
@pytest.mark.parametrize("count", [SMALL, FEW])
@pytest.mark.parametrize("transports", TRANSPORTS)
def test_two_at_once(transports, count, victims):
    kill_two_at_once(victims, count, over(transports))


@pytest.mark.parametrize("layout", DEVICES)
def test_two_at_once_with_device_tensors(layout):
    kill_two_at_once((0, 3), FEW, on_device(layout))


def kill_two_at_once(victims, count, options):
    with harness.starting(5, two_at_once_on_rank, victims, count, **options) as crew:
        crew.board.wait_all("looping", range(5))
        for victim in victims:
            crew.signal(victim, signal.SIGKILL)
        found = crew.results(dead=victims)
        survivors = [r for r in range(5) if r not in victims]
        assert all(found[r] == found[survivors[0]] for r in survivors)
        assert found[survivors[0]][1] == [int(r in survivors) for r in range(5)]


# ---- mode raise

RAISE = {"MOONCAKE_ON_FAILURE": "raise"}
AHEAD = 8


def ahead_on_rank(me, count, how):
    """Rank 0 is eight operations ahead of rank 1 when rank 2 dies."""
    reduce_all(me)
    if me.rank == 2:
        me.board.wait("issued")
        die()
    tensors = [torch.full((count,), float(me.rank)) for _ in range(AHEAD if me.rank == 0 else 1)]
    if me.rank == 1:
        me.board.wait("issued")
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works]
    if me.rank == 0:
        me.board.set("issued")
    if how == "wait":
        errors = [raised(work.wait) for work in works]
    elif how == "future":
        errors = [raised(future.wait) for future in futures]
    else:
        until(lambda: all(work.is_completed() for work in works), "the works")
        found = [work.exception() for work in works]
        errors = [(type(error).__name__, str(error)) for error in found]
    for tensor, work, (kind, message) in zip(tensors, works, errors, strict=True):
        assert kind == "PeerLostError", message
        assert "rank 2" in message
        assert (tensor == me.rank).all()
        assert not work.is_success()
        assert work.exception().inputs_intact
        assert work.failed_ranks == [2]
        assert mooncake_backend.get_failed_ranks_hint(work).tolist() == [0, 0, 1]
        assert not mooncake_backend.get_local_success(work)
    # They have called different numbers of operations since.
    assert mooncake_backend.acknowledge_loss(dist.group.WORLD)
    after = [dist.all_reduce(torch.ones(count), async_op=True) for _ in range(2)]
    for number, work in enumerate(after):
        work.wait()
        assert work.sequence_number == number
        assert work.contributors == [0, 1]
        assert mooncake_backend.get_local_success(work)
    return reduce_all(me), works[0].sequence_number


@pytest.mark.parametrize("how", ["wait", "future", "exception"])
@pytest.mark.parametrize("count", [SMALL, FEW])
@pytest.mark.parametrize("transports", WITH_DEVICE)
def test_raise_ends_what_was_issued_before_it_was_seen(transports, count, how):
    with harness.starting(3, ahead_on_rank, count, how, **over(transports, **RAISE)) as crew:
        assert crew.results(dead=[2])[:2] == [(total([0, 1]), 1)] * 2


def training_on_rank(me):
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=0.01
    )
    errors = []
    for step in range(6):
        if step == 3:
            go(me, "trained", range(me.size))
            if me.rank == 2:
                die()
        try:
            model(torch.ones(2, 64)).sum().backward()
        except PeerLostError as error:
            errors.append((step, "rank 2" in str(error)))
    return errors, reduce_all(me)


@pytest.mark.parametrize("mode", ["continue", "raise"])
def test_ddp_trains_on(mode):
    """In mode raise one step is lost, on all survivors."""
    with harness.starting(3, training_on_rank, **over("shm", MOONCAKE_ON_FAILURE=mode)) as crew:
        found = crew.results(dead=[2])
        assert found[0] == found[1]
        errors, last = found[0]
        assert errors == ([] if mode == "continue" else [(3, True)])
        assert last == total([0, 1])


def unseen_on_rank(me):
    """Nobody has looked at the exception yet: what is issued meanwhile ends with it, too."""
    reduce_all(me)
    go(me, "called", range(me.size))
    if me.rank == 2:
        die()
    first = dist.all_reduce(torch.ones(8), async_op=True)
    until(first.is_completed, "the loss")
    tensor = torch.ones(8)
    later = dist.all_reduce(tensor, async_op=True)
    assert raised(dist.barrier) == raised(first.wait) == raised(later.wait)
    assert (tensor == 1).all()
    return reduce_all(me)


def test_raise_holds_until_it_is_seen():
    with harness.starting(3, unseen_on_rank, **over("shm", **RAISE)) as crew:
        assert crew.results(dead=[2])[:2] == [total([0, 1])] * 2


def raising_loop_on_rank(me, verbs, count):
    """Every verb: one error on every survivor, of the same call; then the verb works."""
    who = list(range(me.size))
    calls = []
    for phase, (name, victim) in enumerate(zip(verbs, VICTIMS, strict=False)):
        verb = Verb(name, me, count, SURVIVOR)
        turn = 0
        error = None
        while error is None:
            try:
                oracle.same(verb.call(False)[1], verb.expected(who), name)
            except mooncake_backend.PeerLostError as lost:
                error = lost
            turn += 1
            if turn == 3 and me.rank == victim:
                me.board.set(f"looping-{phase}-{me.rank}")
        assert error.inputs_intact
        assert f"rank {victim}" in str(error)
        who = [r for r in who if r != victim]
        assert active() == [int(r in who) for r in range(me.size)]
        oracle.same(verb.call(False)[1], verb.expected(who), f"{name} among {who}")
        calls.append(turn)
    return calls


@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["1KiB", "4MiB"])
@pytest.mark.parametrize("verbs", [("all_reduce", "all_gather"), ("barrier", "all_to_all")])
@pytest.mark.parametrize("transports", WITH_DEVICE)
def test_raise_ends_one_call_on_all(transports, verbs, count):
    arguments = (verbs, count)
    with harness.starting(4, raising_loop_on_rank, *arguments, **over(transports, **RAISE)) as crew:
        for phase, victim in enumerate(VICTIMS):
            crew.board.wait(f"looping-{phase}-{victim}")
            crew.kill(victim)
        found = crew.results(dead=VICTIMS)
        assert found[1] == found[2]


def make_group(me, mode):
    dist.init_process_group(
        "mooncake", store=me.store(), rank=me.rank, world_size=me.size,
        pg_options=MooncakeBackendOptions(on_failure=mode),
    )  # fmt: skip


def disagreeing_on_rank(me):
    return raised(make_group, me, ["continue", "raise"][me.rank])


def test_modes_must_agree():
    for kind, message in harness.run_ranks(2, disagreeing_on_rank, backend=None):
        assert kind == "DistBackendError"
        assert "on_failure" in message


def mode_on_rank(me, option):
    make_group(me, option)
    return dist.group.WORLD._get_backend(torch.device("cpu")).on_failure


MODES = [("", None, "continue"), ("raise", None, "raise"), ("raise", "continue", "continue")]


@pytest.mark.parametrize(("variable", "option", "mode"), MODES)
def test_the_option_wins_over_the_variable(variable, option, mode):
    env = {"MOONCAKE_ON_FAILURE": variable}
    assert harness.run_ranks(1, mode_on_rank, option, backend=None, env=env) == [mode]


def misled_on_rank(me):
    return raised(make_group, me, None)


def test_a_variable_that_means_nothing_is_refused():
    env = {"MOONCAKE_ON_FAILURE": "perhaps"}
    [(kind, message)] = harness.run_ranks(1, misled_on_rank, backend=None, env=env)
    assert kind == "ValueError"
    assert "MOONCAKE_ON_FAILURE" in message


# ---- roots, messages, groups


def dead_root_on_rank(me, count):
    if me.rank == 2:
        die()
    until(lambda: active()[2] == 0, "the view")
    tensor = torch.full((count,), float(me.rank))
    works = [dist.broadcast(tensor, 2, async_op=True), dist.reduce(tensor, 2, async_op=True)]
    for work in works:
        kind, message = raised(work.wait)
        assert kind == "PeerLostError", message
        assert "rank 2" in message
        assert "root" in message
    assert (tensor == me.rank).all()
    assert reduce_all(me) == total([0, 1])


@pytest.mark.parametrize("count", [SMALL, FEW])
@pytest.mark.parametrize("transports", WITH_DEVICE)
def test_dead_root(transports, count):
    with harness.starting(3, dead_root_on_rank, count, **over(transports)) as crew:
        crew.results(dead=[2])


def messages_on_rank(me, count):
    survivors = [0, 1]
    if me.rank == 2:
        me.board.wait_all("posted", survivors)
        die()
    other = 1 - me.rank
    from_dead = dist.irecv(torch.zeros(count), 2)
    from_any = torch.zeros(count)
    any_source = dist.irecv(from_any, tag=5)
    from_other = torch.zeros(count)
    pending = dist.irecv(from_other, other, tag=1)
    go(me, "posted", [*survivors])
    assert raised(from_dead.wait)[0] == "PeerLostError"
    assert from_dead.failed_ranks == [2]
    assert mooncake_backend.get_failed_ranks_hint(from_dead).tolist() == [0, 0, 1]
    until(lambda: active()[2] == 0, "the view")
    for again in (dist.recv, dist.send):
        kind, message = raised(again, torch.zeros(count), 2)
        assert kind == "PeerLostError", message
        assert "rank 2" in message
    # Between the living all is as before, also what was posted before the death.
    sent = [
        dist.isend(torch.full((count,), float(me.rank + tag)), other, tag=tag) for tag in (1, 5)
    ]
    pending.wait()
    any_source.wait()
    assert any_source._source_rank() == other
    for work in sent:
        work.wait()
    assert (from_other == other + 1).all()
    assert (from_any == other + 5).all()


@pytest.mark.parametrize("count", [SMALL, FEW])
@pytest.mark.parametrize("transports", WITH_DEVICE)
def test_messages(transports, count):
    with harness.starting(3, messages_on_rank, count, **over(transports)) as crew:
        crew.results(dead=[2])


def groups_on_rank(me):
    near, far, mixed = (dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [1, 2, 3]))
    if me.rank == 3:
        me.board.wait_all("looping", range(3))
        die()
    turn = 0
    if me.rank in (0, 1):
        while True:
            tensor = torch.full((FEW,), float(2**me.rank))
            work = dist.all_reduce(tensor, group=near, async_op=True)
            work.wait()
            assert work.failed_ranks == []
            assert mooncake_backend.get_local_success(work)
            assert (tensor == total([0, 1])).all()
            assert active(near) == [1, 1]
            turn += 1
            if turn == 3:
                me.board.set(f"looping-{me.rank}")
            # Both ranks leave the loop after the same turn.
            flag = torch.tensor([active()[3]])
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=near)
            if turn >= 3 and flag.item() == 0:
                break
    else:
        me.board.set(f"looping-{me.rank}")
    if me.rank == 2:
        work = dist.all_reduce(torch.ones(8), group=far, async_op=True)
        work.wait()
        assert work.contributors == [0]
        assert work.failed_ranks == [1]
        assert active(far) == [1, 0]
    if me.rank in (1, 2):
        work = dist.all_reduce(torch.ones(8), group=mixed, async_op=True)
        work.wait()
        assert work.contributors == [0, 1]
        assert active(mixed) == [1, 1, 0]
        seen = mooncake_backend.get_evidence(mixed)
        assert [one.rank for one in seen] == [2]
    assert reduce_all(me) == total([0, 1, 2])
    later = dist.new_group([0, 2])
    if me.rank in (0, 2):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=later)
        assert tensor.item() == 2


@pytest.mark.parametrize("transports", WITH_DEVICE)
def test_groups_that_lost_nobody_see_nothing(transports):
    with harness.starting(4, groups_on_rank, **over(transports)) as crew:
        crew.results(dead=[3])


def mirror_on_rank(me):
    given = torch.tensor([0, 9, 0, 7, 7], dtype=torch.int32)
    options = MooncakeBackendOptions(given, max_group_size=4)
    dist.init_process_group(
        "mooncake", store=me.store(), rank=me.rank, world_size=me.size, pg_options=options
    )
    world = dist.group.WORLD
    assert mooncake_backend.get_active_ranks(world) is given
    assert given.tolist() == [1, 1, 1, 7, 7]
    given[1] = 0  # callers do; nobody minds
    assert mooncake_backend.get_current_epoch(world) == 1
    before = dist.all_reduce(torch.ones(1), async_op=True)
    before.wait()
    assert before.contributors == [0, 1, 2]
    assert before.failed_ranks == []
    assert before.epoch == 1
    assert mooncake_backend.get_failed_ranks_hint(before).tolist() == [0] * 4
    go(me, "called", range(me.size))
    if me.rank == 2:
        die()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert given.tolist() == [1, 1, 0, 7, 7]
    assert work.epoch == mooncake_backend.get_current_epoch(world) == 2
    assert mooncake_backend.get_failed_ranks_hint(work).tolist() == [0, 0, 1, 0]
    assert not mooncake_backend.get_local_success(work)


def test_active_ranks_is_a_mirror():
    with harness.starting(3, mirror_on_rank, backend=None) as crew:
        crew.results(dead=[2])


# ---- silence


def stopped_on_rank(me, victim):
    pair = dist.new_group([0, victim])
    sums = []
    try:
        while not sums or sums[-1] == total(range(me.size)) or me.rank == victim:
            sums.append(reduce_all(me))
            if len(sums) == 3:
                me.board.set(f"looping-{me.rank}")
    except mooncake_backend.EvictedError as error:
        assert me.rank == victim
        messages = [str(error)]
    if me.rank == victim:
        for call in (dist.barrier, lambda: dist.send(torch.ones(1), 0)):
            kind, message = raised(call)
            assert kind == "EvictedError"
            messages.append(message)
        kind, message = raised(dist.all_reduce, torch.ones(1), group=pair)
        assert kind == "EvictedError"
        messages.append(message)
        kind, message = raised(dist.new_group, [0, 1, 2])
        assert kind == "EvictedError"
        answer = membership.sync_after_failure(dist.group.WORLD)
        assert answer.status == membership.SyncAfterFailureStatus.Rejected
        messages.append(answer.reject_reason)
        for text in messages:
            assert "invalid state" in text
            assert "rank is not active" in text
            assert "epoch 2" in text
            assert "silent" in text
        return None
    assert sums[-1] == total(set(range(me.size)) - {victim})
    seen = mooncake_backend.get_evidence(dist.group.WORLD)
    me.board.set(f"went-on-{me.rank}")
    me.board.wait("resumed")
    for _ in range(10):
        assert reduce_all(me) == sums[-1]
    return [(one.rank, one.kind) for one in seen]


@pytest.mark.parametrize("transports", WITH_DEVICE)
def test_a_stopped_rank_is_evicted(transports):
    victim = 2
    chosen = over(transports, MOONCAKE_FAILURE_TIMEOUT_MS=str(int(SHORT * 1000)))
    with harness.starting(3, stopped_on_rank, victim, **chosen) as crew:
        crew.board.wait_all("looping", range(3))
        crew.stop(victim)
        crew.board.wait_all("went-on", [0, 1])
        crew.cont(victim)
        crew.board.set("resumed")
        assert crew.results() == [[(victim, "silent")], [(victim, "silent")], None]


def reused_on_rank(me, victim):
    """The victim is out, destroys a group late, and touches nothing of what the memory of that
    group serves at rank 0 by now."""
    shared, later = dist.new_group(), dist.new_group([0, 1])
    for group in (shared, None):
        dist.all_reduce(torch.ones(SMALL), group=group)
    me.board.set(f"looping-{me.rank}")
    everyone = total(range(me.size))
    if me.rank == victim:
        me.board.wait("resumed")
        assert raised(lambda: [reduce_all(me) for _ in range(1_000_000)])[0] == "EvictedError"
        me.board.set("evicted")
        me.board.wait("filled")
        dist.destroy_process_group(shared)
        del shared
        gc.collect()
        me.board.set("destroyed")
        return None
    until(lambda: reduce_all(me) != everyone, "the victim to be out")
    me.board.set(f"went-on-{me.rank}")
    me.board.wait("evicted")
    dist.destroy_process_group(shared)
    me.board.set(f"gave-back-{me.rank}")
    me.board.wait_all("gave-back", [0, 1])
    dist.destroy_process_group(later)  # and with it what was waiting to be given back
    del shared, later
    gc.collect()
    if me.rank == 0:
        cpu = torch.device("cpu")
        backend = dist.group.WORLD._get_backend(cpu)
        filled = backend.allocate_tensor(4 << 20, dtype=torch.int64, device=cpu)
        filled.fill_(-7)
        me.board.set("filled")
        me.board.wait("destroyed")
        return int((filled != -7).sum())
    return None


def test_an_evicted_rank_writes_to_no_memory_that_is_used_again():
    victim = 2
    chosen = over("shm", MOONCAKE_FAILURE_TIMEOUT_MS=str(int(SHORT * 1000)))
    with harness.starting(3, reused_on_rank, victim, **chosen) as crew:
        crew.board.wait_all("looping", range(3))
        crew.stop(victim)
        crew.board.wait_all("went-on", [0, 1])
        crew.cont(victim)
        crew.board.set("resumed")
        assert crew.results() == [0, None, None]


def alone_on_rank(me):
    try:
        for turn in range(1_000_000):
            if me.rank and turn == 10:
                me.board.set(f"looping-{me.rank}")
                me.board.wait("never")
            reduce_all(me)
    except mooncake_backend.MinorityError as error:
        again = raised(dist.barrier)
        assert again[0] == "MinorityError"
        return str(error)


def test_a_minority_does_not_go_on():
    chosen = over("tcp", MOONCAKE_FAILURE_TIMEOUT_MS=str(int(SHORT * 1000)))
    with harness.starting(3, alone_on_rank, **chosen) as crew:
        crew.board.wait_all("looping", [1, 2])
        for rank in (1, 2):
            crew.stop(rank)
        found = crew.results(dead=[1, 2])
        assert "too few ranks" in found[0]


def of_two_on_rank(me):
    def loop():
        for turn in range(1_000_000):
            if turn == 10:
                me.board.set(f"looping-{me.rank}")
            reduce_all(me)

    kind, text = raised(loop)
    me.board.set(f"over-{me.rank}")
    me.board.wait_all("over", range(2))
    return kind, text


@pytest.mark.parametrize("transports", WITH_DEVICE)
def test_of_two_the_lower_has_lost_who_gave_up(transports):
    """Rank 1 may not go on without rank 0, which was only stopped: that is no clean leave."""
    limits = {"MOONCAKE_FAILURE_TIMEOUT_MS": str(int(SHORT * 1000)), **RAISE}
    with harness.starting(2, of_two_on_rank, **over(transports, **limits)) as crew:
        crew.board.wait_all("looping", range(2))
        crew.stop(0)
        crew.board.wait("over-1")
        crew.cont(0)
        (kind, text), (of_one, _) = crew.results()
        assert (kind, of_one) == ("PeerLostError", "MinorityError"), text
        assert "smaller side and gave up" in text


# ---- what needs no ranks


def test_errors_are_exceptions_like_others():
    for kind in ("PeerLostError", "EvictedError", "MinorityError"):
        error = getattr(mooncake_backend, kind)("text")
        assert isinstance(error, dist.DistBackendError)
        assert str(error) == "text"
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
    lost = mooncake_backend.PeerLostError("text")
    lost.inputs_intact = False
    assert pickle.loads(pickle.dumps(lost)).inputs_intact is False


def test_on_failure_is_checked():
    with pytest.raises(ValueError, match="stop"):
        MooncakeBackendOptions(on_failure="stop")


def test_works_of_others():
    assert mooncake_backend.get_failed_ranks_hint(object()).numel() == 0
    assert mooncake_backend.get_local_success(object()) is False
