"""Ranks that are taken out of a group by plan (deactivate_ranks), exit, are replaced, or come
back."""

from __future__ import annotations

import signal

import harness
import pytest
import torch
import torch.distributed as dist
from test_recovery import begin, ping_pong, total
from test_rejoin import EXPERTS, KINDS, TOKENS, tokens

import mooncake_backend
from mooncake import pg
from mooncake.mooncake_ep_buffer import Buffer

APPLIED = pg.ProposalStatus.Applied
SIZE, LEAVER = 4, 2
FULL, REST = 2**SIZE - 1, 2**SIZE - 1 - 2**LEAVER


def states(group, size: int = SIZE) -> list[bool]:
    return pg.get_peer_state(group, range(size))


def is_out(group) -> bool:
    return pg.get_active_ranks(group)[LEAVER].item() == 0


def expect_refusal(call, *args, **named) -> None:
    kind, text = harness.raised(call, *args, **named)
    assert kind in ("RuntimeError", "DistBackendError"), (kind, text)
    for words in ("invalid state", "rank is not active", f"rank {LEAVER}", "join_group"):
        assert words in text, text


def calls():
    """Calls of all kinds."""
    one, two = torch.ones(1), torch.ones(2)
    parts = list(torch.ones(SIZE, 1))
    yield lambda: dist.all_reduce(one)
    yield lambda: dist.all_reduce(one, async_op=True).wait()
    yield dist.barrier
    yield lambda: dist.broadcast(one, 0)
    yield lambda: dist.all_gather(parts, one)
    yield lambda: dist.reduce_scatter(one, parts)
    yield lambda: dist.all_to_all_single(torch.ones(SIZE), torch.ones(SIZE))
    yield lambda: dist.send(two, 0)
    yield lambda: dist.isend(two, 0).wait()
    yield lambda: dist.recv(two, 0)
    yield lambda: dist.recv(two)
    yield lambda: dist.all_gather_object([None] * SIZE, 1)
    yield dist.new_group
    yield lambda: Buffer(dist.group.WORLD, 1 << 20)
    yield lambda: pg.recover_ranks(dist.group.WORLD, [0])


# ---- a rank takes itself out, and exits


def leaves_and_exits(me: harness.Rank):
    """Returns, on ranks that stay, sums and active ranks before and after, and the last ones with
    the process that replaces the leaver."""
    active = begin(me)
    world = dist.group.WORLD
    if me.board.has("replaced"):
        pg.join_group(world)
        return total(me.rank), active.tolist()
    found = [(total(me.rank), active.tolist())]
    if me.rank == LEAVER:
        epoch = pg.get_current_epoch(world)
        answer = pg.deactivate_ranks(world, [LEAVER])
        assert answer == pg.ProposeViewUpdateResponse(APPLIED, epoch)
        assert active.tolist() == [0] * SIZE
        assert states(world) == [False] * SIZE
        for call in calls():
            expect_refusal(call)
        dist.destroy_process_group()
        return None
    me.board.wait("exited")  # the program's thread does nothing meanwhile
    assert is_out(world)
    assert states(world) == [rank != LEAVER for rank in range(SIZE)]
    tensor = torch.tensor(2**me.rank)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert pg.get_local_success(work)
    assert pg.get_failed_ranks_hint(work).tolist() == [0] * SIZE
    assert [seen.kind for seen in pg.get_evidence(world)] == ["goodbye"]
    found.append((int(tensor), active.tolist()))
    me.board.set(f"without-{me.rank}")
    harness.until(lambda: all(states(world)), "a new process")
    assert pg.recover_ranks(world, [LEAVER]).status is APPLIED
    found.append((total(me.rank), active.tolist()))
    return found


@pytest.mark.parametrize("on_failure", ["continue", "raise"])
def test_a_rank_leaves_exits_and_is_replaced(on_failure):
    environment = {"MOONCAKE_ON_FAILURE": on_failure, "MOONCAKE_LOG_LEVEL": "info"}
    with harness.Crew(SIZE, backend=None, env=environment) as crew:
        crew.start(leaves_and_exits)
        harness.until(
            lambda: not crew.processes[LEAVER].is_alive() or crew.links[LEAVER].poll(), ""
        )
        assert crew.links[LEAVER].recv().value is None
        crew.links[LEAVER].close()
        crew.processes[LEAVER].join()
        crew.board.set("exited")
        stay = [rank for rank in range(SIZE) if rank != LEAVER]
        crew.board.wait_all("without", stay)
        crew.board.set("replaced")
        crew.replace(LEAVER, leaves_and_exits)
        found = crew.results()
        logs = [crew.log(rank) for rank in stay]
    whole = (FULL, [1] * SIZE)
    rest = (REST, [int(rank != LEAVER) for rank in range(SIZE)])
    assert found[LEAVER] == whole
    for rank, log in zip(stay, logs, strict=True):
        assert found[rank] == [whole, rest, whole]
        assert " lost" not in log


# ---- a rank comes back


def comes_back(me: harness.Rank, rounds: int):
    begin(me)
    world = dist.group.WORLD
    group = dist.new_group()
    buffer = Buffer(group, 1 << 20)
    for turn in range(rounds):
        assert total(me.rank) == FULL
        caller = turn % SIZE  # also a rank that stays
        if me.rank == caller:
            assert pg.deactivate_ranks(world, [LEAVER]).status is APPLIED
            assert pg.deactivate_ranks(world, [LEAVER]).status is APPLIED  # no effect
        if me.rank == LEAVER:
            harness.until(lambda: not any(states(world)), "that it is out")
            expect_refusal(dist.all_reduce, torch.ones(1))
            # Another group of it goes on.
            one = torch.ones(1)
            dist.all_reduce(one, group=group)
            assert one.item() == SIZE
            pg.join_group(world)
        else:
            harness.until(lambda: is_out(world), "that the leaver is out")
            assert total(me.rank) == REST
            one = torch.ones(1)
            dist.all_reduce(one, group=group)
            assert one.item() == SIZE
            harness.until(lambda: states(world)[LEAVER], "that it is back")
            assert pg.activate_ranks(world, [LEAVER]).status is APPLIED
        assert pg.get_active_ranks(world).tolist() == [1] * SIZE
        assert pg.get_num_synced_ranks(world) == SIZE
        left, right = (me.rank - 1) % SIZE, (me.rank + 1) % SIZE
        got = torch.zeros(5000)
        works = [
            dist.irecv(got, left),
            dist.isend(torch.full((5000,), float(me.rank + turn)), right),
        ]
        for work in works:
            work.wait()
        assert (got == left + turn).all()
    assert buffer is not None
    return total(me.rank)


@pytest.mark.parametrize("on_failure", ["continue", "raise"])
@pytest.mark.parametrize("transports", ["shm,tcp", "tcp"])
def test_a_rank_comes_back_again_and_again(on_failure, transports):
    environment = {"MOONCAKE_ON_FAILURE": on_failure, "MOONCAKE_TRANSPORTS": transports}
    with harness.Crew(SIZE, backend=None, env=environment) as crew:
        assert crew.call(comes_back, 6) == [FULL] * SIZE


# ---- with calls under way


def while_others_are_in_a_call(me: harness.Rank):
    """The leaver does not call the all_reduce in which the other ranks are."""
    begin(me)
    world = dist.group.WORLD
    assert total(me.rank) == FULL
    if me.rank == LEAVER:
        state = mooncake_backend.dump_state
        harness.until(lambda: "ranks 0, 1, 3 began all_reduce" in state(world), "their call")
        assert pg.deactivate_ranks(world, [LEAVER]).status is APPLIED
        expect_refusal(dist.all_reduce, torch.ones(1))
        me.board.wait_all("went-on", [0, 1, 3])
        return None
    first = total(me.rank)
    buffer, group = Buffer(world, 1 << 20), dist.new_group()  # at once, without the leaver
    sums = first, total(me.rank)
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    assert one.item() == SIZE - 1
    assert buffer is not None
    assert is_out(world)
    me.board.set(f"went-on-{me.rank}")
    return sums


@pytest.mark.parametrize("on_failure", ["continue", "raise"])
def test_a_rank_leaves_while_the_others_are_in_a_call(on_failure):
    with harness.Crew(SIZE, backend=None, env={"MOONCAKE_ON_FAILURE": on_failure}) as crew:
        found = crew.call(while_others_are_in_a_call)
    assert found == [(REST, REST), (REST, REST), None, (REST, REST)]


def with_messages(me: harness.Rank):
    """Messages that the leaver has sent are received after it is out. A receive of it ends."""
    me.init("mooncake-cpu")
    world = dist.group.WORLD
    assert total(me.rank) == FULL
    if me.rank == LEAVER:
        for to in (0, 1, 3):
            dist.send(torch.full((3,), 7.0 + to), to)
        waits = dist.irecv(torch.zeros(1), 0)
        me.board.set("sent")
        harness.until(lambda: not any(states(world)), "that it is out")
        expect_refusal(waits.wait)
        me.board.wait_all("went-on", [0, 1, 3])
        return
    me.board.wait("sent")
    if me.rank == 1:
        assert pg.deactivate_ranks(world, [LEAVER]).status is APPLIED
    harness.until(lambda: is_out(world), "that the leaver is out")
    got = torch.zeros(3)
    dist.recv(got, LEAVER)
    assert (got == 7 + me.rank).all()
    for call in (dist.recv, dist.send):
        kind, text = harness.raised(call, torch.zeros(3), LEAVER)
        assert (kind, f"rank {LEAVER}" in text) == ("PeerLostError", True), (kind, text)
    me.board.set(f"went-on-{me.rank}")


def test_messages_of_a_rank_that_was_taken_out():
    with harness.Crew(SIZE, backend=None) as crew:
        crew.call(with_messages)


# ---- two calls at once


def both_ways(me: harness.Rank):
    """Two ranks take each other out, and a third one both, all at once."""
    begin(me)
    world = dist.group.WORLD
    assert total(me.rank) == FULL
    if me.rank == 0:
        me.board.wait("asked")
        return total(me.rank), pg.get_active_ranks(world).tolist()
    ranks = {1: [LEAVER], LEAVER: [1], 3: [1, LEAVER]}[me.rank]
    answer = pg.deactivate_ranks(world, ranks)
    if me.rank == 3:
        assert answer.status is APPLIED, answer
        me.board.set("asked")
        return total(me.rank), pg.get_active_ranks(world).tolist()
    harness.until(lambda: not any(states(world)), "that it is out")
    assert answer.status is APPLIED or "rank is not active" in answer.reject_reason, answer
    return None


def test_ranks_take_each_other_out_at_once():
    for _ in range(5):
        with harness.Crew(SIZE, backend=None) as crew:
            found = crew.call(both_ways)
        alike = 2**0 + 2**3, [1, 0, 0, 1]
        assert found == [alike, None, None, alike]


def both_while_others_are_in_a_call(me: harness.Rank):
    """One of the two may be asked to make that call first."""
    begin(me)
    world = dist.group.WORLD
    assert total(me.rank) == FULL
    if me.rank in (0, 3):
        first = total(me.rank)
        for rank in (1, 2):
            harness.until(lambda: not states(world)[rank], f"that {rank} is out")  # noqa: B023
        return first, total(me.rank)
    state = mooncake_backend.dump_state
    harness.until(lambda: "ranks 0, 3 began all_reduce" in state(world), "their call")
    answer = pg.deactivate_ranks(world, [me.rank])
    if answer.status is not APPLIED:
        assert "another change" in answer.reject_reason, answer
        total(me.rank)
        assert pg.deactivate_ranks(world, [me.rank]).status is APPLIED
    return answer.status is APPLIED


def test_two_ranks_leave_while_the_others_are_in_a_call():
    for _ in range(4):
        with harness.Crew(SIZE, backend=None) as crew:
            found = crew.call(both_while_others_are_in_a_call)
        first = 1 + 8 + sum(2**rank for rank in (1, 2) if not found[rank])
        assert found[0] == found[3] == (first, 9), found
        assert found[1] or found[2]


# ---- killed and stopped


def stopped_leaver(me: harness.Rank):
    begin(me)
    world = dist.group.WORLD
    assert total(me.rank) == FULL
    me.board.set(f"began-{me.rank}")
    if me.rank == LEAVER:
        me.board.wait("never")
    me.board.wait("ended")
    assert pg.deactivate_ranks(world, [LEAVER]).status is APPLIED
    return total(me.rank), is_out(world)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_dead_or_stopped_is_taken_out(number):
    with harness.Crew(SIZE, backend=None, env={"MOONCAKE_FAILURE_TIMEOUT_MS": "1000"}) as crew:
        crew.start(stopped_leaver)
        crew.board.wait_all("began", range(SIZE))
        (crew.kill if number == signal.SIGKILL else crew.stop)(LEAVER)
        crew.board.set("ended")
        found = crew.results(dead=[LEAVER])
        crew.broken = True
    assert [one for rank, one in enumerate(found) if rank != LEAVER] == [(REST, True)] * 3


# ---- lost ranks that stay in sight


def stays_in_sight(me: harness.Rank, until: str):
    options = pg.MooncakeBackendOptions(
        auto_deactivate_on_failure=until != "deactivated", auto_sync_on_failure=False
    )
    me.init("mooncake-cpu", options=options)
    world = dist.group.WORLD

    def step() -> tuple[int, bool, list[int], list[int]]:
        tensor = torch.tensor(2**me.rank)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        hint = pg.get_failed_ranks_hint(work).tolist()
        return (
            int(tensor), pg.get_local_success(work), hint, pg.get_active_ranks(world).tolist()
        )  # fmt: skip

    everybody, none = [1] * SIZE, [0] * SIZE
    assert step() == (FULL, True, none, everybody)
    me.board.set(f"began-{me.rank}")
    if me.rank == LEAVER:
        me.board.wait("never")
    me.board.wait("killed")
    hint = [int(rank == LEAVER) for rank in range(SIZE)]
    rest = [1 - one for one in hint]
    for _ in range(3):
        assert step() == (REST, False, hint, everybody)
    status = pg.sync_after_failure(world).status
    assert status is pg.SyncAfterFailureStatus.Reconciled
    assert states(world) == [bool(one) for one in rest]
    if until == "deactivated":
        assert step() == (REST, False, hint, everybody)
        if me.rank == 0:
            assert pg.deactivate_ranks(world, [LEAVER]).status is APPLIED
        harness.until(lambda: is_out(world), "that the lost rank is out of sight")
    assert step() == (REST, True, none, rest)
    assert pg.deactivate_ranks(world, [LEAVER]).status is APPLIED
    assert step() == (REST, True, none, rest)
    assert dist.get_world_size() == SIZE


@pytest.mark.parametrize("until", ["synced", "deactivated"])
def test_a_lost_rank_stays_in_sight(until):
    with harness.Crew(SIZE, backend=None) as crew:
        crew.start(stays_in_sight, until)
        crew.board.wait_all("began", range(SIZE))
        crew.kill(LEAVER)
        crew.board.set("killed")
        crew.results(dead=[LEAVER])
        crew.broken = True


# ---- subgroups, experts, wrong calls


def of_a_subgroup(me: harness.Rank):
    begin(me)
    world = dist.group.WORLD
    odd, late = dist.new_group([1, 2, 3]), dist.new_group([2, 3])
    assert total(me.rank) == FULL
    if me.rank == LEAVER:
        assert pg.deactivate_ranks(odd, [1]).status is APPLIED  # rank 2 of the job
        expect_refusal(dist.all_reduce, torch.ones(1), group=odd)
    elif me.rank in (1, 3):
        harness.until(lambda: pg.get_active_ranks(odd).tolist() == [1, 0, 1], "that it is out")
        one = torch.ones(1)
        dist.all_reduce(one, group=odd)
        assert one.item() == 2
    if me.rank in (2, 3):
        one = torch.ones(1)
        dist.all_reduce(one, group=late)
        assert one.item() == 2
    assert pg.get_active_ranks(world).tolist() == [1] * SIZE
    return total(me.rank)


def test_a_rank_is_taken_out_of_a_subgroup_only():
    with harness.Crew(SIZE, backend=None) as crew:
        assert crew.call(of_a_subgroup) == [FULL] * SIZE


def experts(me: harness.Rank, kind: str):
    """A rank is drained and comes back, twice. Buffers are used by all that are there: see
    test_rejoin.infer()."""
    me.init("mooncake-cpu")
    world = dist.group.WORLD
    weights = torch.full((TOKENS, 2), 0.5)
    turn, calls = 0, KINDS[kind](me)

    def infer(turns: int, expected: list[int]) -> None:
        nonlocal turn
        for _ in range(turns):
            turn += 1
            x, chosen = tokens(me.rank, turn)
            active = torch.ones(me.size, dtype=torch.int32)
            combined = calls.turn(turn, x, chosen, weights, active)
            assert active.tolist() == expected
            there = active.bool()
            parts = there[chosen // (EXPERTS // me.size)].sum(1, keepdim=True)
            assert torch.equal(combined, (x.float() * parts * 0.5).bfloat16()), turn

    everybody, rest = [1] * SIZE, [int(rank != LEAVER) for rank in range(SIZE)]
    for cycle in range(2):
        infer(2, everybody)
        late = calls.late
        if me.rank == LEAVER:
            assert pg.deactivate_ranks(world, [LEAVER]).status is APPLIED
            expect_refusal(KINDS[kind], me)
            pg.join_group(world)
            turn, calls = me.board.wait(f"turn-{cycle}"), KINDS[kind](me)
        else:
            harness.until(lambda: is_out(world), "that the leaver is out")
            calls.buffer.update_ep_member()
            infer(3, rest)
            for call in late:
                error, text = harness.raised(call)
                assert (error, "obsolete generation" in text) == ("RuntimeError", True), text
            harness.until(lambda: states(world)[LEAVER], "that it is back")
            me.board.set(f"turn-{cycle}", turn)
            assert pg.activate_ranks(world, [LEAVER]).status is APPLIED
            calls.buffer.update_ep_member()
    infer(2, everybody)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_a_rank_that_is_drained(kind):
    with harness.Crew(SIZE, backend=None) as crew:
        crew.call(experts, kind)


def sizes(me: harness.Rank):
    """get_world_size() goes down past ranks that were taken out before, and up again."""
    begin(me)
    world = dist.group.WORLD

    def agree(size: int, ranks: list[int]) -> None:
        harness.until(lambda: dist.get_world_size() == size, f"a size of {size}")
        assert pg.get_active_ranks(world).tolist() == [int(r in ranks) for r in range(SIZE)]
        parts = list(torch.zeros(size, 1))
        dist.all_gather(parts, torch.full((1,), 1.0 + me.rank))
        assert parts == [1.0 + r if r in ranks else 0.0 for r in range(size)]

    def takes_out(rank: int) -> None:
        if me.rank == rank:
            assert pg.deactivate_ranks(world, [rank]).status is APPLIED
        harness.until(lambda: pg.get_active_ranks(world)[rank] == 0, f"that {rank} is out")

    def lets_in(rank: int) -> None:
        if me.rank == rank:
            pg.join_group(world)
        else:
            harness.until(lambda: pg.get_peer_state(world, [rank]) == [True], f"rank {rank}")
            assert pg.recover_ranks(world, [rank]).status is APPLIED

    agree(4, [0, 1, 2, 3])
    takes_out(2)
    if me.rank != 2:
        agree(4, [0, 1, 3])
        takes_out(3)
    if me.rank < 2:
        agree(2, [0, 1])
        me.board.set(f"two-{me.rank}")
    me.board.wait_all("two", [0, 1])
    if me.rank != 3:
        lets_in(2)
        agree(3, [0, 1, 2])
        me.board.set(f"three-{me.rank}")
    me.board.wait_all("three", [0, 1, 2])
    lets_in(3)
    agree(4, [0, 1, 2, 3])


def test_the_size_follows_the_last_ranks():
    with harness.Crew(SIZE, backend=None) as crew:
        crew.call(sizes)


def mistakes(me: harness.Rank):
    begin(me)
    world = dist.group.WORLD
    everybody = list(range(SIZE))
    if me.rank == 0:
        for ranks, text in (
            ([], "got no ranks"),
            ([SIZE], f"rank {SIZE} is not in a group of {SIZE}"),
            ([-1], "rank -1 is not in"),
            ([1, 1], "rank 1 stands twice"),
            (everybody, "would leave no rank"),
        ):
            kind, found = harness.raised(pg.deactivate_ranks, world, ranks)
            assert (kind, text in found, "rank 0" in found) == ("ValueError", True, True), found
    assert total(me.rank) == FULL
    return pg.get_active_ranks(world).tolist()


def test_wrong_calls_change_nothing():
    with harness.Crew(SIZE, backend=None) as crew:
        assert crew.call(mistakes) == [[1] * SIZE] * SIZE


def test_ping_pong_of_two_after_a_return():
    with harness.Crew(2, backend=None) as crew:
        crew.call(two_ranks)


def two_ranks(me: harness.Rank):
    """One of two ranks leaves, which leaves a group of one."""
    begin(me)
    world = dist.group.WORLD
    for _ in range(3):
        ping_pong(me)
        if me.rank == 1:
            assert pg.deactivate_ranks(world, [1]).status is APPLIED
            pg.join_group(world)
        else:
            harness.until(lambda: pg.get_active_ranks(world).tolist() == [1, 0], "it is out")
            assert total(0) == 1
            harness.until(lambda: all(states(world, 2)), "it is back")
            assert pg.activate_ranks(world, [1]).status is APPLIED
    ping_pong(me)
