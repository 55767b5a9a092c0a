"""Processes without which the job went on, and which come back into it without a restart: stopped
ones that wake up, and the smaller side of a partition."""

from __future__ import annotations

import random
import time

import harness
import hosts
import pytest
import torch
import torch.distributed as dist
from harness import raised, until
from test_recovery import begin, total
from test_rejoin import EXPERTS, KINDS, TOKENS, tokens

import mooncake_backend
from mooncake import pg
from mooncake.mooncake_ep_buffer import Buffer

APPLIED = pg.ProposalStatus.Applied
SIZE = 4
FULL = 2**SIZE - 1
QUICK = {"MOONCAKE_FAILURE_TIMEOUT_MS": "1000"}


def states(group) -> list[bool]:
    return pg.get_peer_state(group, range(SIZE))


def sum_in(group, rank: int) -> int:
    tensor = torch.tensor(2**rank)
    dist.all_reduce(tensor, group=group)
    return int(tensor)


def tried_in(group, rank: int) -> int:
    """0: the call ended with the loss of a rank, as in mode `raise`."""
    try:
        return sum_in(group, rank)
    except mooncake_backend.PeerLostError:
        return 0


def around(me: harness.Rank, group, turn: int) -> None:
    """A message to the next rank, and one from the rank before."""
    left, right = (me.rank - 1) % SIZE, (me.rank + 1) % SIZE
    got = torch.zeros(5000)
    sent = torch.full((5000,), float(me.rank + turn))
    works = [dist.irecv(got, left, group=group), dist.isend(sent, right, group=group)]
    for work in works:
        work.wait()
    assert (got == left + turn).all()


# ---- a process is stopped, wakes up, and comes back


def stopped_and_back(me: harness.Rank, victim: int, rounds: int):
    active = begin(me)
    world, other = dist.group.WORLD, dist.new_group()
    rest = FULL - 2**victim
    for turn in range(rounds):
        for group in (world, other):
            assert sum_in(group, me.rank) == FULL
            around(me, group, turn)
        me.board.set(f"whole{turn}-{me.rank}")
        if me.rank == victim:
            me.board.wait(f"woken{turn}")
            for group in (world, other):
                kind, text = raised(lambda: [sum_in(group, me.rank) for _ in range(1_000_000)])  # noqa: B023
                assert kind == "EvictedError", text
                assert "join_group" in text
            pg.join_group(world)
            assert sum_in(world, me.rank) == FULL
            for call in (
                lambda: dist.all_reduce(torch.ones(1), group=other),
                lambda: Buffer(other, 1 << 20),
            ):
                kind, text = raised(call)
                assert kind == "EvictedError", text
            pg.join_group(other)
        else:
            until(lambda: tried_in(world, me.rank) == rest, "that the stopped rank is out")
            until(lambda: tried_in(other, me.rank) == rest, "that the stopped rank is out")
            me.board.set(f"without{turn}-{me.rank}")
            until(lambda: states(world)[victim], "that it is back")
            assert pg.recover_ranks(world, [victim]).status is APPLIED
            assert sum_in(world, me.rank) == FULL
            until(lambda: states(other)[victim], "that it is back in the other group")
            assert pg.recover_ranks(other, [victim]).status is APPLIED
        assert active.tolist() == [1] * SIZE
        assert pg.get_num_synced_ranks(world) == SIZE
    for group in (world, other):
        assert sum_in(group, me.rank) == FULL
        around(me, group, rounds)
    late = dist.new_group([victim, (victim + 1) % SIZE])
    if me.rank in (victim, (victim + 1) % SIZE):
        assert sum_in(late, me.rank) == 2**victim + 2 ** ((victim + 1) % SIZE)
    return total(me.rank)


def stop_and_wake(crew: harness.Crew, function, victim: int, rounds: int, *args) -> list:
    """Runs function(rank, victim, *args) while the victim is stopped and woken in each round.
    Returns the results."""
    crew.start(function, victim, *args)
    stay = [rank for rank in range(crew.size) if rank != victim]
    for turn in range(rounds):
        crew.board.wait_all(f"whole{turn}", range(crew.size))
        crew.stop(victim)
        crew.board.wait_all(f"without{turn}", stay)
        crew.cont(victim)
        crew.board.set(f"woken{turn}")
    return crew.results()


@pytest.mark.parametrize("on_failure", ["continue", "raise"])
@pytest.mark.parametrize("transports", ["shm,tcp", "tcp"])
@pytest.mark.parametrize("victim", [2, 0])
def test_a_stopped_rank_comes_back(transports, on_failure, victim):
    environment = {"MOONCAKE_ON_FAILURE": on_failure, "MOONCAKE_TRANSPORTS": transports, **QUICK}
    with harness.Crew(SIZE, backend=None, env=environment) as crew:
        assert stop_and_wake(crew, stopped_and_back, victim, 3, 3) == [FULL] * SIZE


def stopped_again(me: harness.Rank, victim: int):
    """The victim is also stopped at any step of its return, for longer than the failure timeout or
    not. All go on until it has come back the last time."""
    begin(me)
    world = dist.group.WORLD
    assert total(me.rank) == FULL
    me.board.set(f"whole-{me.rank}")
    turn, returns, step = 0, 0, torch.zeros(1)
    while True:
        try:
            dist.all_reduce(step, op=dist.ReduceOp.MAX)
            step += 1
            turn += 1
            tensor = torch.tensor(2**me.rank)
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            assert int(tensor) == sum(2**rank for rank in work.contributors)
            assert FULL - int(tensor) in (0, 2**victim)
            ends = torch.tensor(int(me.board.has("last") and int(tensor) == FULL))
            dist.all_reduce(ends, op=dist.ReduceOp.MIN)
            if ends:
                return returns, total(me.rank)
            mooncake_backend.admit(world)
        except mooncake_backend.EvictedError:
            assert me.rank == victim
            me.board.set(f"out-{returns}")
            while True:
                try:
                    pg.join_group(world)
                    break
                except mooncake_backend.EvictedError:
                    continue
            returns += 1


@pytest.mark.parametrize("transports", ["shm,tcp", "tcp"])
def test_a_process_is_stopped_while_it_comes_back(transports):
    victim, draw = 2, random.Random(7)
    environment = {"MOONCAKE_TRANSPORTS": transports, "MOONCAKE_FAILURE_TIMEOUT_MS": "500"}
    with harness.Crew(SIZE, backend=None, env=environment) as crew:
        crew.start(stopped_again, victim)
        crew.board.wait_all("whole", range(SIZE))
        for _ in range(8):
            crew.stop(victim)
            time.sleep(draw.choice([0.2, 0.7, 1.0]))  # shorter or longer than the timeout
            crew.cont(victim)
            time.sleep(draw.choice([0, 0.003, 0.01, 0.03, 0.1, 0.3]))  # into its return
        crew.board.set("last")
        found = crew.results()
    assert [whole for _, whole in found] == [FULL] * SIZE
    assert found[victim][0] > 0


def all_in_turn(me: harness.Rank):
    """Each rank is stopped and comes back. Then one dies, and a new process finds the job in the
    store, where no member has the address that it had at first."""
    active = begin(me)
    world = dist.group.WORLD
    last = SIZE - 1
    if me.board.has("replaced"):
        pg.join_group(world)
        return total(me.rank), active.tolist()
    for victim in range(SIZE):
        assert total(me.rank) == FULL
        me.board.set(f"whole{victim}-{me.rank}")
        if me.rank == victim:
            me.board.wait(f"woken{victim}")
            raised(lambda: [sum_in(world, me.rank) for _ in range(1_000_000)])
            pg.join_group(world)
        else:
            until(lambda: tried_in(world, me.rank) == FULL - 2**victim, "that it is out")  # noqa: B023
            me.board.set(f"without{victim}-{me.rank}")
            until(lambda: states(world)[victim], "that it is back")  # noqa: B023
            assert pg.recover_ranks(world, [victim]).status is APPLIED
    assert total(me.rank) == FULL
    me.board.set(f"back-{me.rank}")
    if me.rank == last:
        me.board.wait("never")
    until(lambda: tried_in(world, me.rank) == FULL - 2**last, "that the last one is out")
    until(lambda: states(world)[last], "a new process")
    assert pg.recover_ranks(world, [last]).status is APPLIED
    return total(me.rank), active.tolist()


def test_all_come_back_and_a_new_process_finds_them():
    with harness.Crew(SIZE, backend=None, env=QUICK) as crew:
        crew.start(all_in_turn)
        for victim in range(SIZE):
            crew.board.wait_all(f"whole{victim}", range(SIZE))
            crew.stop(victim)
            crew.board.wait_all(f"without{victim}", [r for r in range(SIZE) if r != victim])
            crew.cont(victim)
            crew.board.set(f"woken{victim}")
        crew.board.wait_all("back", range(SIZE))
        crew.kill(SIZE - 1)
        crew.board.set("replaced")
        crew.replace(SIZE - 1, all_in_turn)
        assert crew.results() == [(FULL, [1] * SIZE)] * SIZE


# ---- experts, memory of the group


def experts(me: harness.Rank, victim: int, kind: str):
    """Buffers are used by all that are there: see test_rejoin.infer()."""
    me.init("mooncake-cpu")
    world = dist.group.WORLD
    backend = world._get_backend(torch.device("cpu"))
    kept = None
    if hasattr(backend, "allocate_tensor"):
        kept = backend.allocate_tensor(1000, dtype=torch.int64, device=torch.device("cpu"))
        kept.copy_(torch.arange(1000))
    weights = torch.full((TOKENS, 2), 0.5)
    turn, calls = 0, KINDS[kind](me)

    def infer(turns: int) -> torch.Tensor:
        nonlocal turn
        for _ in range(turns):
            turn += 1
            x, chosen = tokens(me.rank, turn)
            active = torch.ones(me.size, dtype=torch.int32)
            combined = calls.turn(turn, x, chosen, weights, active)
            there = active.bool()
            parts = there[chosen // (EXPERTS // me.size)].sum(1, keepdim=True)
            assert torch.equal(combined, (x.float() * parts * 0.5).bfloat16()), turn
        return there

    for cycle in range(2):
        assert infer(2).all()
        me.board.set(f"whole{cycle}-{me.rank}")
        if me.rank == victim:
            me.board.wait(f"woken{cycle}")
            kind_of, text = raised(lambda: [infer(1) for _ in range(1_000_000)])
            assert kind_of == "EvictedError", text
            assert raised(KINDS[kind], me)[0] == "EvictedError"
            pg.join_group(world)
            turn, calls = me.board.wait(f"turn{cycle}"), KINDS[kind](me)
        else:
            until(lambda: not infer(1)[victim], "that the stopped rank is out")
            me.board.set(f"without{cycle}-{me.rank}")
            until(lambda: states(world)[victim], "that it is back")
            me.board.set(f"turn{cycle}", turn)
            assert pg.recover_ranks(world, [victim]).status is APPLIED
            calls.buffer.update_ep_member()
    assert infer(2).all()
    if kept is not None:
        assert (kept == torch.arange(1000)).all()
    return turn


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_a_stopped_rank(kind):
    with harness.Crew(SIZE, backend=None, env=QUICK) as crew:
        assert len(set(stop_and_wake(crew, experts, 1, 2, kind))) == 1


# ---- the smaller side of a partition


def cut_off(me: harness.Rank, winners: list[int]):
    begin(me)
    world = dist.group.WORLD
    everybody = total(me.rank)
    me.board.set(f"turn-{me.rank}")
    if me.rank in winners:
        rest = sum(2**rank for rank in winners)
        until(lambda: tried_in(world, me.rank) == rest, "that the other host is out")
        others = [rank for rank in range(me.size) if rank not in winners]
        until(lambda: all(pg.get_peer_state(world, others)), "that the other host is back")
        assert pg.recover_ranks(world, others).status is APPLIED
    else:
        kind, text = raised(lambda: [sum_in(world, me.rank) for _ in range(1_000_000)])
        assert kind == "MinorityError", text
        assert "join_group" in text
        me.board.set(f"minority-{me.rank}")
        pg.join_group(world)  # while the link is still down
    assert total(me.rank) == everybody
    return sorted(mooncake_backend.get_active_ranks(world).tolist())


@pytest.mark.netns
@pytest.mark.skipif(bool(hosts.why_not()), reason=str(hosts.why_not()))
@pytest.mark.parametrize(("layout", "cut"), [((2, 2), 1), ((1, 2), 0)], ids=["2+2", "1+2"])
def test_the_smaller_side_of_a_partition_comes_back(layout, cut):
    size = sum(layout)
    host_of = [host for host, ranks in enumerate(layout) for _ in range(ranks)]
    winners = [rank for rank in range(size) if host_of[rank] != cut]
    lost = [rank for rank in range(size) if host_of[rank] == cut]
    with hosts.Hosts(len(layout), v6=False) as net, harness.Crew(
        size, backend=None, env=QUICK, namespaces=[net[host].namespace for host in host_of]
    ) as crew:  # fmt: skip
        crew.start(cut_off, winners)
        crew.board.wait_all("turn", range(size))
        net.link(cut, up=False)
        crew.board.wait_all("minority", lost)
        net.link(cut, up=True)
        assert crew.results() == [[1] * size] * size


# ---- processes that cannot come back


def too_late(me: harness.Rank, victim: int):
    """A new process has the place of the stopped one."""
    is_new = begin(me) is not None and me.board.has("replaced")
    world = dist.group.WORLD
    if is_new:
        pg.join_group(world)
    else:
        assert total(me.rank) == FULL
        me.board.set(f"whole0-{me.rank}")
    if me.rank == victim and not is_new:
        me.board.wait("woken0")
        raised(lambda: [sum_in(world, me.rank) for _ in range(1_000_000)])
        kind, text = raised(pg.join_group, world)
        assert kind in ("RuntimeError", "DistBackendError")
        assert f"rank {victim} cannot come back" in text
        assert "held by a living process" in text
        assert raised(dist.all_reduce, torch.ones(1))[0] == "EvictedError"
        me.board.set("refused")
        return None
    if not is_new:
        until(lambda: tried_in(world, me.rank) == FULL - 2**victim, "that it is out")
        me.board.set(f"without0-{me.rank}")
        until(lambda: states(world)[victim], "a new process")
        assert pg.recover_ranks(world, [victim]).status is APPLIED
    assert total(me.rank) == FULL
    me.board.set(f"full-{me.rank}")
    me.board.wait("refused")
    return total(me.rank)


def test_the_place_of_a_stopped_rank_is_taken():
    victim = 1
    stay = [rank for rank in range(SIZE) if rank != victim]
    with harness.Crew(SIZE, backend=None, env=QUICK) as crew:
        crew.start(too_late, victim)
        crew.board.wait_all("whole0", range(SIZE))
        crew.stop(victim)
        crew.board.wait_all("without0", stay)
        crew.board.set("replaced")
        link, process = crew._start_rank(victim, {"MOONCAKE_REJOIN": "1"})
        link.send((too_late, (victim,)))
        crew.board.wait_all("full", range(SIZE))
        crew.cont(victim)
        crew.board.set("woken0")
        assert crew.results() == [None if rank == victim else FULL for rank in range(SIZE)]
        assert link.recv().value == FULL
        link.close()
        process.join()


def nobody_left(me: harness.Rank, victim: int):
    begin(me)
    world = dist.group.WORLD
    assert total(me.rank) == FULL
    me.board.set(f"whole0-{me.rank}")
    if me.rank != victim:
        until(lambda: tried_in(world, me.rank) == FULL - 2**victim, "that it is out")
        me.board.set(f"without0-{me.rank}")
        me.board.wait("never")
    me.board.wait("woken0")
    kind, text = raised(lambda: [sum_in(world, me.rank) for _ in range(1_000_000)])
    assert kind in ("EvictedError", "MinorityError"), text
    kind, text = raised(pg.join_group, world)
    assert kind in ("RuntimeError", "DistBackendError")
    assert f"rank {victim} cannot come back" in text
    assert raised(dist.barrier)[0] in ("EvictedError", "MinorityError")


def test_nobody_is_left_to_come_back_to():
    victim = 1
    stay = [rank for rank in range(SIZE) if rank != victim]
    with harness.Crew(SIZE, backend=None, env=QUICK) as crew:
        crew.start(nobody_left, victim)
        crew.board.wait_all("whole0", range(SIZE))
        crew.stop(victim)
        crew.board.wait_all("without0", stay)
        for rank in stay:
            crew.kill(rank)
        crew.cont(victim)
        crew.board.set("woken0")
        crew.results(dead=stay)
        crew.broken = True
