"""Networks that are cut, flap or lose one direction; ranks that are stopped and come back; starts
and ends in which ranks are missing. Real processes; hosts are network namespaces."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import time
import zlib
from datetime import timedelta

import cards
import devices
import harness
import hosts
import pytest
import torch
import torch.distributed as dist
from conftest import BLOCKING_DEVICE_LAYOUT, DEVICE_LAYOUT
from harness import raised, until

import mooncake_backend
from mooncake_backend import EvictedError, MinorityError, PeerLostError

TRANSPORTS = ["shm", "tcp", DEVICE_LAYOUT]
SMALL, LARGE = 256, 1 << 18  # float32 elements: 1 KiB, 1 MiB
SHORT = 0.5  # a failure timeout that has to pass in the test
LONG = 1.0  # one that must not pass
BRIEF = 0.25  # of it; what is sent again after that comes well before LONG
ROUNDS = 20  # among those who go on

netns = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(hosts.why_not()), reason=str(hosts.why_not())),
]


def failing_after(seconds, **more):
    return {"MOONCAKE_FAILURE_TIMEOUT_MS": str(int(seconds * 1000)), **more}


def over(transports, seconds, **more):
    return {"env": failing_after(seconds, **cards.over(transports), **more)}


def hold(seconds):
    """A state that is to last: nothing can tell that it has lasted but the clock."""
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() >= end, "the time to pass")


def active(group=None):
    return mooncake_backend.get_active_ranks(group or dist.group.WORLD).tolist()


def members(size, ranks):
    return [int(r in ranks) for r in range(size)]


def total(ranks):
    """all_reduce over ranks that give 2 ** rank tells who contributed."""
    return float(sum(2**rank for rank in ranks))


def views_in_log(crew, rank):
    """Every view that the rank ever committed: epoch and who goes on."""
    found = re.findall(r"; ranks? ([\d, -]+) continues?, epoch (\d+)", crew.log(rank))
    views = set()
    for names, epoch in found:
        ranks = []
        for part in names.split(", "):
            first, _, last = part.partition("-")
            ranks += range(int(first), int(last or first) + 1)
        views.add((int(epoch), tuple(ranks)))
    return views


def one_view_per_epoch(views):
    by_epoch = collections.defaultdict(set)
    for epoch, ranks in views:
        by_epoch[epoch].add(ranks)
    assert all(len(seen) == 1 for seen in by_epoch.values()), dict(by_epoch)


def nobody_is_accused(crew):
    for rank in range(crew.size):
        assert "continue, epoch" not in crew.log(rank), crew.log(rank)
        assert "continues, epoch" not in crew.log(rank), crew.log(rank)


class Turns:
    """How often each rank has come round, told by the ranks to the test."""

    def __init__(self, board, ranks):
        self.board, self.ranks = board, ranks

    def told(self):
        return [self.board.wait(f"turn-{rank}") for rank in self.ranks]

    def go_on(self, more=3):
        """All of them have come round so often once more."""
        goal = [turn + more for turn in self.told()]
        until(lambda: all(a >= b for a, b in zip(self.told(), goal, strict=True)), "turns", 60)


# ---- partitions


def partitioned_on_rank(me, host_of, winners, count):
    """all_reduce over and over, until the winners alone have gone on for a while. How it ended, and
    the (epoch, ranks) of all operations."""
    hosts_ranks = [[r for r in range(me.size) if host_of[r] == h] for h in sorted(set(host_of))]
    groups = [dist.new_group(ranks) for ranks in [[0, me.size - 1], *hosts_ranks]]
    mine = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    everyone, views, turn, after = tuple(range(me.size)), set(), 0, 0
    try:
        while after < ROUNDS:
            tensor = torch.full((count,), float(2**me.rank))
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            who = tuple(work.contributors)
            assert (tensor == total(who)).all()
            assert work.failed_ranks == [r for r in everyone if r not in who]
            assert who == everyone or set(winners) <= set(who), who
            views.add((work.epoch, who))
            turn += 1
            me.board.set(f"turn-{me.rank}", turn)
            after += list(who) == winners
    except (MinorityError, EvictedError) as error:
        kind = type(error)
        for group in [None, *mine]:
            for call in (dist.barrier, lambda group: dist.all_reduce(torch.ones(1), group=group)):
                with pytest.raises(kind):
                    call(group)
        with pytest.raises(kind):
            dist.new_group(list(everyone))
        return kind.__name__, str(error), views
    assert active() == members(me.size, winners)
    for group in mine:
        ranks = dist.get_process_group_ranks(group)
        left = [r for r in ranks if r in winners]
        tensor = torch.full((count,), float(2**me.rank))
        dist.all_reduce(tensor, group=group)
        assert (tensor == total(left)).all()
        assert active(group) == [int(r in left) for r in ranks]
    return "ok", mooncake_backend.get_current_epoch(dist.group.WORLD), views


@contextlib.contextmanager
def on_hosts(layout, function, *args, seconds=SHORT, **env):
    """Ranks in a loop on hosts that have so many of them."""
    with hosts.Hosts(len(layout), v6=False) as net:
        host_of = [h for h, ranks in enumerate(layout) for _ in range(ranks)]
        with harness.starting(
            sum(layout), function, host_of, *args, env=failing_after(seconds, **env),
            namespaces=[net[h].namespace for h in host_of],
        ) as crew:  # fmt: skip
            try:
                crew.board.wait_all("turn", range(crew.size), deadline=harness.scaled(60))
            except TimeoutError:
                crew.results(deadline=1)
            yield net, crew


def check_sides(crew, winners, kinds=("MinorityError",)):
    """The winners went on, all others were told; nowhere two views of one epoch."""
    found = crew.results(deadline=harness.scaled(60))
    for rank, (kind, text, _) in enumerate(found):
        if rank in winners:
            assert kind == "ok", (rank, text)
        else:
            assert kind in kinds, (rank, kind, text)
            assert re.search(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", text), text
    assert {found[r][1] for r in winners} <= {1 + crew.size - len(winners)}
    one_view_per_epoch(set().union(*(views for _, _, views in found)))
    logged = set().union(*(views_in_log(crew, rank) for rank in range(crew.size)))
    one_view_per_epoch(logged)
    if winners:
        assert (1 + crew.size - len(winners), tuple(winners)) in logged


CUTS = {  # ranks of each host, the host that is cut off, who goes on
    "1+1": ((1, 1), 1, [0]),
    "2+2": ((2, 2), 1, [0, 1]),
    "3+1": ((3, 1), 1, [0, 1, 2]),
    "1+2": ((1, 2), 1, [1, 2]),
    "1+3": ((1, 3), 0, [1, 2, 3]),
    "1+1+1, first": ((1, 1, 1), 0, [1, 2]),
    "1+1+1, last": ((1, 1, 1), 2, [0, 1]),
}


class TestPartitions:
    pytestmark = netns

    @pytest.mark.parametrize(("layout", "cut", "winners"), CUTS.values(), ids=CUTS)
    def test_at_most_one_side_goes_on(self, layout, cut, winners):
        self.cut(layout, cut, winners, SMALL)

    @pytest.mark.parametrize("name", ["2+2", "1+2", "1+1+1, first"])
    def test_at_most_one_side_goes_on_with_large_operations(self, name):
        self.cut(*CUTS[name], LARGE)

    @pytest.mark.parametrize("count", [SMALL, LARGE], ids=["1KiB", "1MiB"])
    def test_at_most_one_side_goes_on_with_device_tensors(self, count):
        self.cut(*CUTS["2+2"], count, **devices.settings("device-blocking"))

    @staticmethod
    def cut(layout, cut, winners, count, **env):
        with on_hosts(layout, partitioned_on_rank, winners, count, **env) as (net, crew):
            net.link(cut, up=False)
            check_sides(crew, winners)

    def test_where_all_are_alone_nobody_goes_on(self):
        with on_hosts((1, 1, 1), partitioned_on_rank, [], SMALL) as (net, crew):
            for host in range(3):
                net.link(host, up=False)
            check_sides(crew, [])

    @pytest.mark.parametrize("deaf", [0, 1])
    @pytest.mark.parametrize(
        ("layout", "winners"), [((2, 2), [0, 1]), ((1, 2), [1, 2])], ids=["2+2", "1+2"]
    )
    def test_cut_one_way_only(self, layout, winners, deaf):
        """Who hears nothing is in the minority, or the others are told that they are out."""
        with on_hosts(layout, partitioned_on_rank, winners, SMALL) as (net, crew):
            net.deafen(deaf, 1 - deaf)
            check_sides(crew, winners, ("MinorityError", "EvictedError"))

    def test_one_link_of_three_costs_one_rank(self):
        with on_hosts((1, 1, 1), partitioned_on_rank, [0, 1], SMALL) as (net, crew):
            net.deafen(0, 2)
            net.deafen(2, 0)
            check_sides(crew, [0, 1], ("MinorityError", "EvictedError"))

    def test_who_was_cut_off_stays_out_when_the_link_comes_back(self):
        """Also when it does so again and again."""
        with on_hosts((1, 2), partitioned_on_rank, [1, 2], SMALL) as (net, crew):
            for _ in range(3):
                net.link(0, up=False)
                until(lambda: "too few ranks" in crew.log(0), "the minority to know", 30)
                net.link(0, up=True)
            check_sides(crew, [1, 2])

    @pytest.mark.parametrize("count", [SMALL, LARGE], ids=["1KiB", "1MiB"])
    def test_a_link_that_flaps_costs_only_time(self, count):
        with on_hosts((2, 1), flapping_on_rank, count, seconds=2 * LONG) as (net, crew):
            turns = Turns(crew.board, range(3))
            for _ in range(4):
                net.link(1, up=False)
                hold(BRIEF)
                net.link(1, up=True)
                turns.go_on()
            crew.board.set("over")
            assert crew.results() == [members(3, range(3))] * 3
            nobody_is_accused(crew)


def flapping_on_rank(me, _, count):
    return loop_together_on_rank(me, count)


def messages_on_rank(me, _, count):
    """Rounds of messages in a ring and of an operation, until the test says so."""
    turn, over = 0, False
    after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    while not over:
        sent = torch.full((count,), float(turn * me.size + me.rank))
        got = torch.empty(count)
        works = [dist.irecv(got, before, tag=turn), dist.isend(sent, after, tag=turn)]
        summed = sent.clone()
        dist.all_reduce(summed)
        for work in works:
            work.wait()
        assert (got == turn * me.size + before).all(), turn
        assert (summed == sum(turn * me.size + r for r in range(me.size))).all(), turn
        turn += 1
        me.board.set(f"turn-{me.rank}", turn)
        said = torch.tensor([float(me.board.has("over"))])
        dist.all_reduce(said, dist.ReduceOp.MIN)
        over = bool(said.item())
    assert mooncake_backend.get_evidence(dist.group.WORLD) == []
    assert mooncake_backend.get_current_epoch(dist.group.WORLD) == 1
    return active()


@pytest.mark.netns
@pytest.mark.skipif(bool(hosts.why_no_resets()), reason=str(hosts.why_no_resets()))
@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["1KiB", "1MiB"])
def test_connections_that_are_reset_cost_only_time(count):
    """Nothing is lost or comes twice, and nobody is accused: both ends are alive."""
    with on_hosts((2, 1), messages_on_rank, count, seconds=LONG, MOONCAKE_LOG_LEVEL="info") as (
        net,
        crew,
    ):
        turns = Turns(crew.board, range(3))
        for resets in range(1, 9):
            net.reset(resets % 2)
            until(
                lambda n=resets: crew.log(2).count("was made again") >= 2 * n, "new connections", 30
            )
            turns.go_on(1)
        crew.board.set("over")
        assert crew.results() == [members(3, range(3))] * 3
        nobody_is_accused(crew)


def loop_together_on_rank(me, count):
    """all_reduce over all until the test says so; nobody is lost."""
    turn, over = 0, False
    while not over:
        tensor = torch.full((count,), float(2**me.rank))
        dist.all_reduce(tensor)
        assert (tensor == total(range(me.size))).all()
        turn += 1
        me.board.set(f"turn-{me.rank}", turn)
        said = torch.tensor([float(me.board.has("over"))])
        dist.all_reduce(said, dist.ReduceOp.MIN)
        over = bool(said.item())
    assert mooncake_backend.get_evidence(dist.group.WORLD) == []
    assert mooncake_backend.get_current_epoch(dist.group.WORLD) == 1
    return active()


# ---- stopped, but not for long enough; or all at once


def end_of_loop(crew):
    crew.board.set("over")
    assert crew.results() == [members(crew.size, range(crew.size))] * crew.size
    nobody_is_accused(crew)


@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["1KiB", "1MiB"])
@pytest.mark.parametrize("transports", TRANSPORTS)
def test_who_is_stopped_for_less_costs_only_time(transports, count):
    with harness.starting(3, loop_together_on_rank, count, **over(transports, LONG)) as crew:
        turns = Turns(crew.board, range(3))
        turns.go_on()
        for victim in (1, 0, 2):
            crew.stop(victim)
            hold(BRIEF)
            crew.cont(victim)
            turns.go_on()
        end_of_loop(crew)


def longer_than_timeouts(short, default):
    """Failure timeouts, and how long something lasts under each that must not look like a loss."""
    return [
        pytest.param(SHORT, short, id="short"),
        pytest.param(3.0, default, id="default", marks=pytest.mark.slow),
    ]


@pytest.mark.parametrize(("timeout", "stopped"), longer_than_timeouts(2 * SHORT, 10.0))
@pytest.mark.parametrize("transports", TRANSPORTS)
def test_all_stopped_at_once_accuse_nobody(transports, timeout, stopped):
    with harness.starting(3, loop_together_on_rank, SMALL, **over(transports, timeout)) as crew:
        turns = Turns(crew.board, range(3))
        turns.go_on()
        for _ in range(2):
            for rank in range(3):
                crew.stop(rank)
            hold(stopped)
            for rank in range(3):
                crew.cont(rank)
            turns.go_on()
        end_of_loop(crew)


def locked_on_rank(me, victim, seconds):
    """The victim is in C code and does not let Python's other threads run."""
    for turn in range(3):
        if me.rank == victim:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        tensor = torch.full((SMALL,), float(2**me.rank))
        dist.all_reduce(tensor)
        assert (tensor == total(range(me.size))).all(), turn
    assert mooncake_backend.get_evidence(dist.group.WORLD) == []
    return active()


@pytest.mark.parametrize(("timeout", "locked"), longer_than_timeouts(3 * SHORT, 40.0))
@pytest.mark.parametrize("transports", TRANSPORTS)
def test_who_holds_pythons_lock_is_not_silent(transports, timeout, locked):
    options = over(transports, timeout)
    with harness.starting(3, locked_on_rank, 1, locked, **options) as crew:
        assert crew.results(deadline=harness.scaled(60) + 4 * locked) == [[1, 1, 1]] * 3
        nobody_is_accused(crew)


@contextlib.contextmanager
def busy_machine(loops_per_core):
    """Other processes that take what they can get, until the end."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    cores = os.sched_getaffinity(0)
    loops = [subprocess.Popen(command) for _ in range(loops_per_core * len(cores))]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_busy_machine_accuses_nobody(transports):
    """For longer than the failure timeout, the default one."""
    with harness.starting(16, loop_together_on_rank, SMALL, **over(transports, 3.0)) as crew:
        turns = Turns(crew.board, range(16))
        turns.go_on()
        with busy_machine(loops_per_core=4):
            hold(5)
            turns.go_on()
            crew.board.set("over")
            assert crew.results(deadline=harness.scaled(120)) == [members(16, range(16))] * 16
        nobody_is_accused(crew)


# ---- fences: what a stopped rank finds when it comes back


class Canaries:
    """Buffers of operations that have ended: nobody writes into them any more."""

    def __init__(self):
        self.kept = []

    @staticmethod
    def sum(tensor):
        return zlib.crc32(tensor.cpu().numpy())

    def keep(self, *tensors):
        self.kept.append([(tensor, self.sum(tensor)) for tensor in tensors])

    def drop_oldest(self, most):
        del self.kept[:-most]

    def check(self):
        for one in self.kept:
            for tensor, known in one:
                assert self.sum(tensor) == known, "written after its operation had ended"


class Round:
    """One operation with contents that belong to this round only, and what it has to give."""

    def __init__(self, me, number, count, who):
        self.me, self.number, self.count, self.who = me, number, count, who

    def given(self, rank, part=0):
        return float(1 + (self.number * 31 + rank * 7 + part * 3) % 997)

    def filled(self, rank, part=0):
        return torch.full((self.count,), self.given(rank, part))

    def same(self, tensor, rank, contributors, part=0):
        value = self.given(rank, part) if rank in contributors else 0.0
        assert (tensor == value).all(), (rank, contributors)

    def all_reduce(self):
        tensor = self.filled(self.me.rank)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert (tensor == sum(self.given(r) for r in work.contributors)).all()
        return [tensor]

    def all_gather(self):
        own, outputs = self.filled(self.me.rank), self.outputs()
        work = dist.all_gather(outputs, own, async_op=True)
        work.wait()
        for r, output in enumerate(outputs):
            self.same(output, r, work.contributors)
        return [own, *outputs]

    def all_to_all(self):
        parts, outputs = [self.filled(self.me.rank, r) for r in self.everyone()], self.outputs()
        work = dist.all_to_all(outputs, parts, async_op=True)
        work.wait()
        for r, output in enumerate(outputs):
            self.same(output, r, work.contributors, self.me.rank)
        return [*parts, *outputs]

    def broadcast(self):
        root = self.who[self.number % len(self.who)]
        tensor = self.filled(self.me.rank)
        try:
            dist.broadcast(tensor, root)
        except PeerLostError:
            return [tensor]
        self.same(tensor, root, [root])
        return [tensor]

    def messages(self):
        """Round in a ring, two at a time."""
        at = self.who.index(self.me.rank)
        after, before = self.who[(at + 1) % len(self.who)], self.who[at - 1]
        kept, works = [], []
        for part in range(2):
            tag = 2 * self.number + part
            sent, got = self.filled(self.me.rank, part), torch.full((self.count,), -1.0)
            kept += [sent, got]
            works.append((dist.irecv(got, before, tag=tag), got, part))
            works.append((dist.isend(sent, after, tag=tag), None, part))
        for work, got, part in works:
            try:
                work.wait()
            except PeerLostError:
                continue
            if got is not None:
                self.same(got, before, [before], part)
        return kept

    def everyone(self):
        return range(self.me.size)

    def outputs(self):
        return [torch.full((self.count,), -1.0) for _ in self.everyone()]


def canaries_on_rank(me, what, count, victim):
    canaries = Canaries()
    who, number, since, left = list(range(me.size)), 0, 0, False
    try:
        while not left:
            canaries.keep(*getattr(Round(me, number, count, who), what)())
            number += 1
            me.board.set(f"turn-{me.rank}", number)
            # Who is left, and whether all that are have seen the victim come back.
            said = torch.tensor([float(me.board.has("told"))])
            work = dist.all_reduce(said, dist.ReduceOp.MIN, async_op=True)
            work.wait()
            who = work.contributors
            assert set(range(me.size)) - set(who) <= {victim}
            if victim in who:
                canaries.drop_oldest(3)
            else:
                canaries.check()
                since += 1
                if since == 3:
                    me.board.set(f"went-on-{me.rank}")
                if since > 3:  # those of around the loss stay
                    del canaries.kept[6:-1]
                left = bool(said.item())
    except EvictedError as error:
        assert me.rank == victim
        messages = [str(error)]
        for call in (dist.barrier, lambda: dist.send(torch.ones(1), 0)):
            kind, message = raised(call)
            assert kind == "EvictedError"
            messages.append(message)
        for text in messages:
            assert re.search(r"in epoch 2, as rank \d said and we learned at \d{4}-\S+Z", text)
            assert re.search(r"rank \d accused it: silent", text)
        me.board.set("told")
        return "evicted"
    assert active() == members(me.size, who)
    return who, since


WHAT = ["all_reduce", "all_gather", "all_to_all", "broadcast", "messages"]


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("transports", ["shm", "tcp", BLOCKING_DEVICE_LAYOUT])
def test_a_rank_that_comes_back_writes_into_nothing(transports, what):
    victim = 2
    left = [0, 1, 3]
    with harness.starting(
        4, canaries_on_rank, what, LARGE, victim, **over(transports, SHORT)
    ) as crew:
        crew.board.wait_all("turn", range(4), 60)
        Turns(crew.board, range(4)).go_on(random.Random(what + transports).randrange(1, 6))
        crew.stop(victim)
        try:
            crew.board.wait_all("went-on", left, deadline=harness.scaled(60))
        except TimeoutError:
            crew.results(deadline=1, dead=[victim])
        crew.cont(victim)
        found = crew.results(deadline=harness.scaled(60))
        assert found.pop(victim) == "evicted"
        assert [who for who, _ in found] == [left] * 3
        assert len({since for _, since in found}) == 1
        one_view_per_epoch(set().union(*(views_in_log(crew, rank) for rank in range(4))))


# ---- starts in which a rank dies


class DeadlyStore(dist.Store):
    """Ends this process once it has registered its address: behind the access that is named, or so
    many seconds after the last one."""

    def __init__(self, inner, size, at):
        super().__init__()
        self.inner, self.at = inner, at
        self.gets_left = None
        self.size = size

    def set(self, key, value):
        self.inner.set(key, value)
        if "members" in key:
            self.gets_left = self.size
            self._die_at("set")

    def wait(self, keys, *timeout):
        self.inner.wait(keys, *timeout)

    def get(self, key):
        value = self.inner.get(key)
        if self.gets_left is not None:
            self.gets_left -= 1
            if self.gets_left == 0:
                self._die_at("last get")
                signal.setitimer(signal.ITIMER_REAL, self.at)  # nobody handles it
        return value

    def check(self, keys):
        return self.inner.check(keys)

    def _die_at(self, at):
        if at == self.at:
            signal.raise_signal(signal.SIGKILL)


def starting_on_rank(me, victim, at):
    """Says how init_process_group ends, and that all others are told the same."""
    store = me.store()
    if me.rank == victim:
        store = DeadlyStore(store, me.size, at)
    try:
        dist.init_process_group(
            devices.served_by("mooncake"), store=store, rank=me.rank, world_size=me.size,
            timeout=timedelta(seconds=30),
        )  # fmt: skip
    except dist.DistBackendError as error:
        return str(error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    me.board.set(f"began-{me.rank}")
    # If anybody began, all did.
    me.board.wait_all("began", [r for r in range(me.size) if r != victim], 20)
    return "ok"


# A start without rank 0 takes half a minute: one such case belongs to CI.
@pytest.mark.parametrize(
    ("transports", "at", "victim"),
    [
        pytest.param(
            transports,
            at,
            victim,
            marks=pytest.mark.slow if victim == 0 and (transports, at) != ("tcp", "set") else (),
        )
        for transports in ["shm", "tcp"]
        for at in ["set", "last get"]
        for victim in [0, 2]
    ],
)
def test_a_start_without_somebody_fails_on_all(transports, at, victim):
    """Killed when the others could read its address already."""
    options = over(transports, SHORT)
    with harness.starting(3, starting_on_rank, victim, at, backend=None, **options) as crew:
        for rank, said in enumerate(crew.results(deadline=harness.scaled(60), dead=[victim])):
            if rank != victim:
                assert re.search(rf"rank\(?s?\)? {victim}\b", said), said


@pytest.mark.parametrize("milliseconds", [1, 4, 10])
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_start_succeeds_on_all_or_on_none(transports, milliseconds):
    """Somebody dies while the connections are made, or in the first barrier, or behind it."""
    options, victim = over(transports, SHORT), 1
    at = milliseconds / 1000
    with harness.starting(3, starting_on_rank, victim, at, backend=None, **options) as crew:
        found = crew.outcomes(deadline=harness.scaled(60))
        assert not found[0].error, found[0].text
        assert not found[2].error, found[2].text
        said = [found[0].value, found[2].value]
        assert said == ["ok"] * 2 or all(re.search(rf"rank {victim}\b", text) for text in said)
        assert said == ["ok"] * 2 or found[victim].error == "Exit"


# ---- ends in which ranks are missing


def ending_on_rank(me, victims):
    pair = dist.new_group([0, 1])
    dist.barrier()
    me.board.set(f"turn-{me.rank}", 1)
    me.board.wait("gone")
    assert me.rank not in victims
    if me.rank == 0:
        dist.destroy_process_group(pair)
    dist.destroy_process_group()


@pytest.mark.parametrize("victims", [(1,), (1, 2)], ids=str)
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("transports", TRANSPORTS)
def test_leaving_does_not_wait_for_who_is_gone(transports, how, victims):
    with harness.starting(3, ending_on_rank, victims, **over(transports, SHORT)) as crew:
        crew.board.wait_all("turn", range(3))
        for victim in victims:
            (crew.kill if how == "killed" else crew.stop)(victim)
        crew.board.set("gone")
        crew.results(deadline=harness.scaled(30), dead=victims)
        for rank in {0, 1, 2} - set(victims):
            crew.links[rank].close()
            crew.processes[rank].join(30)
            assert crew.processes[rank].exitcode == 0


EXITS = """
import ctypes, os, sys, time, torch, torch.distributed as dist
ctypes.CDLL(None).prctl(1, 9)  # not longer than the test
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("mooncake", store=dist.FileStore(folder + "/store", 3), rank=rank,
                        world_size=3)
group = dist.new_group([0, 1, 2])
work = dist.all_reduce(torch.ones(8), group=group, async_op=True)
work.wait()
open(f"{folder}/ready-{rank}", "w").close()
while not os.path.exists(folder + "/gone"):
    time.sleep(0.001)
late = dist.irecv(torch.ones(1 << 20), 2), dist.all_reduce(torch.ones(8), async_op=True)
"""


def test_interpreters_exit_after_others_have_died_or_hang(tmp_path):
    """Without destroy_process_group, and with something under way to who is gone."""
    path = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, **failing_after(SHORT), "PYTHONPATH": path}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", EXITS, str(rank), str(tmp_path)], env=env, cwd=tmp_path,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        ready = [tmp_path / f"ready-{rank}" for rank in range(3)]
        until(lambda: all(path.exists() for path in ready), "the job to begin")
        processes[1].kill()
        processes[2].send_signal(signal.SIGSTOP)
        (tmp_path / "gone").touch()
        _, stderr = processes[0].communicate(timeout=30)
        assert processes[0].returncode == 0, stderr
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def later_groups_on_rank(me, victim):
    everyone = list(range(me.size))
    survivors = [r for r in everyone if r != victim]
    dist.barrier()
    if me.rank == victim:
        signal.raise_signal(signal.SIGKILL)
    until(lambda: active() == members(me.size, survivors), "the view")
    for turn in range(2):
        for asked in (everyone, survivors):
            later = dist.new_group(asked)
            tensor = torch.full((SMALL,), float(2**me.rank))
            dist.all_reduce(tensor, group=later)
            assert (tensor == total(survivors)).all(), turn
            assert active(later) == [int(r in survivors) for r in asked]
    # Whoever has left is not active any more: nobody leaves before all have looked.
    me.board.set(f"looked-{me.rank}")
    me.board.wait_all("looked", survivors)
    dist.destroy_process_group()


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_groups_that_are_made_later(transports):
    with harness.starting(3, later_groups_on_rank, 2, **over(transports, SHORT)) as crew:
        crew.results(deadline=harness.scaled(60), dead=[2])


def without_store_on_rank(me, victim):
    """The last rank is not in the job: its process has the store."""
    keeper = me.size - 1
    ranks = list(range(keeper))
    if me.rank == keeper:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        me.board.set("port", store.port)
        me.board.wait("never")
    store = dist.TCPStore("127.0.0.1", me.board.wait("port"), is_master=False)
    backend = devices.served_by("mooncake")
    dist.init_process_group(backend, store=store, rank=me.rank, world_size=keeper)
    before = dist.new_group(ranks)
    dist.barrier()
    me.board.set(f"turn-{me.rank}", 1)
    me.board.wait("gone")
    left = ranks
    for group in [None, before] * 2:
        tensor = torch.full((SMALL,), float(2**me.rank))
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert set(work.contributors) <= set(left)
        assert (tensor == total(work.contributors)).all()
        if victim in left:
            assert work.contributors == ranks
            dist.barrier()
            if me.rank == victim:
                signal.raise_signal(signal.SIGKILL)
            left = [r for r in ranks if r != victim]
            until(lambda left=left: active() == members(keeper, left), "the view")
        else:
            assert work.contributors == left
    for group in (None, dist.new_group(left)):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == len(left)
    dist.destroy_process_group()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("transports", TRANSPORTS)
def test_who_has_begun_does_without_the_store(transports, victim):
    with harness.starting(
        4, without_store_on_rank, victim, backend=None, **over(transports, SHORT)
    ) as crew:
        crew.board.wait_all("turn", range(3))
        crew.kill(3)
        crew.board.set("gone")
        crew.results(deadline=harness.scaled(60), dead=[victim, 3])
