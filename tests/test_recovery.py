"""Answers of `mooncake.pg` where a lost rank comes back: to the members, to the new process, and to
wrong calls."""

from __future__ import annotations

import os

import harness
import pytest
import torch
import torch.distributed as dist

import mooncake_backend
from mooncake import pg
from mooncake.mooncake_ep_buffer import Buffer

SIZE, LOST = 4, 1


def total(rank: int) -> int:
    """Sum over the ranks that take part. Each gives another power of two."""
    tensor = torch.tensor(2**rank)
    dist.all_reduce(tensor)
    return int(tensor)


def begin(me: harness.Rank) -> torch.Tensor:
    """Makes the default group. Returns the tensor in which it marks active ranks."""
    is_extension = os.environ.pop("MOONCAKE_REJOIN", None) is not None
    active = torch.full((me.size,), 7, dtype=torch.int32)
    me.init("mooncake-cpu", options=pg.MooncakeBackendOptions(active, is_extension))
    return active


def facts(group, active: torch.Tensor) -> tuple[list[int], int, int]:
    return active.tolist(), pg.get_num_synced_ranks(group), pg.get_current_epoch(group)


# ---- each member recovers the rank in its own time


def in_turn(me: harness.Rank):
    """Each member calls recover_ranks() after the member before it has its answer. Returns the sums
    and the facts before, while and after the rank is missing."""
    active = begin(me)
    world = dist.group.WORLD
    found = []
    if me.board.has("replaced"):
        found.append((total(me.rank), facts(world, active)))
        pg.join_group(world)
        found.append(facts(world, active))
    else:
        found.append((total(me.rank), facts(world, active)))
        me.board.set(f"began-{me.rank}")
        if me.rank == LOST:
            me.board.wait("never")
        found.append(total(me.rank))
        found.append(facts(world, active))
        me.board.set(f"without-{me.rank}")
        harness.until(lambda: pg.get_peer_state(world, [LOST]) == [True], "a newcomer")
        before = [rank for rank in range(me.rank) if rank != LOST]
        me.board.wait_all("asked", before)
        found.append(pg.recover_ranks(world, [LOST]))
        found.append(facts(world, active))
        me.board.set(f"asked-{me.rank}")
    found.append((total(me.rank), facts(world, active)))
    return found


def test_members_recover_a_rank_at_different_times():
    with harness.Crew(SIZE, backend=None) as crew:
        crew.start(in_turn)
        crew.board.wait_all("began", range(SIZE))
        crew.kill(LOST)
        survivors = [rank for rank in range(SIZE) if rank != LOST]
        crew.board.wait_all("without", survivors)
        crew.board.set("replaced")
        crew.replace(LOST, in_turn)
        of_all = crew.results()
    everybody, rest = [1] * SIZE, [int(rank != LOST) for rank in range(SIZE)]
    full, reduced = 2**SIZE - 1, 2**SIZE - 1 - 2**LOST
    alone, joined, last = of_all[LOST]
    assert alone[0] == 2**LOST
    assert alone[1][:2] == ([int(rank == LOST) for rank in range(SIZE)], 1)
    epoch = joined[2]
    assert epoch > 2
    whole = (everybody, SIZE, epoch)
    assert (joined, last) == (whole, (full, whole))
    first, missing = (full, (everybody, SIZE, 1)), (rest, SIZE - 1, 2)
    answer = pg.ProposeViewUpdateResponse(pg.ViewUpdateStatus.Applied, epoch, [], "")
    for rank in survivors:
        assert of_all[rank] == [first, reduced, missing, answer, whole, (full, whole)]


# ---- messages


def ping_pong(me: harness.Rank) -> None:
    other = 1 - me.rank
    got = torch.zeros(3)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((3,), float(me.rank)), other),
        dist.P2POp(dist.irecv, got, other),
    ])  # fmt: skip
    for work in works:
        work.wait()
    assert all(pg.get_local_success(work) for work in works)
    assert (got == other).all()


def messages(me: harness.Rank):
    comes = "MOONCAKE_REJOIN" in os.environ
    begin(me)
    world = dist.group.WORLD
    if comes:
        pg.join_group(world)
    else:
        ping_pong(me)
        me.board.set(f"began-{me.rank}")
        if me.rank == 1:
            me.board.wait("never")
        me.board.wait("killed")
        work = dist.isend(torch.ones(1), 1)
        work.wait()
        assert not pg.get_local_success(work)
        assert pg.get_failed_ranks_hint(work).tolist() == [0, 1]
        assert pg.get_active_ranks(world).tolist() == [1, 0]
        harness.until(lambda: pg.get_peer_state(world, [1]) == [True], "a newcomer")
        assert pg.recover_ranks(world, [1]).status is pg.ProposalStatus.Applied
    ping_pong(me)


def test_messages_to_a_rank_that_was_lost():
    """The message to the dead rank ends with the loss, and is not delivered to its successor."""
    with harness.Crew(2, backend=None) as crew:
        crew.start(messages)
        crew.board.wait_all("began", range(2))
        crew.kill(1)
        crew.board.set("killed")
        crew.replace(1, messages)
        crew.results()


# ---- one member recovers the rank while the others are in their next call


def totals_until(wanted: int, first: int) -> list[int]:
    """The sums, from `first` on, until every rank takes part twice."""
    found = [first]
    while found[-2:] != [wanted] * 2:
        found.append(total(dist.get_rank()))
    return found


def lone_caller(me: harness.Rank):
    begin(me)
    world = dist.group.WORLD
    if me.board.has("replaced"):
        pg.join_group(world)
        return totals_until(2**SIZE - 1, 0)[1:]
    total(me.rank)
    me.board.set(f"began-{me.rank}")
    if me.rank == LOST:
        me.board.wait("never")
    without = total(me.rank)
    if me.rank == 2:
        harness.until(lambda: pg.get_peer_state(world, [LOST]) == [True], "a newcomer")
        state = mooncake_backend.dump_state
        harness.until(lambda: "ranks 0, 3 began all_reduce" in state(world), "their next call")
        assert pg.recover_ranks(world, [LOST]).status is pg.ProposalStatus.Applied
    return totals_until(2**SIZE - 1, without)


def test_one_member_recovers_a_rank_while_the_others_are_in_a_call():
    with harness.Crew(SIZE, backend=None) as crew:
        crew.start(lone_caller)
        crew.board.wait_all("began", range(SIZE))
        crew.kill(LOST)
        crew.board.set("replaced")
        crew.replace(LOST, lone_caller)
        found = crew.results()
    without = 2**SIZE - 1 - 2**LOST
    assert found[0] == found[2] == found[3] == [without] * 2 + [2**SIZE - 1] * 2
    assert found[LOST] == [2**SIZE - 1] * 2


def short_and_not_received(me: harness.Rank):
    """A send that nobody receives: its rank dies with it in its mailbox."""
    begin(me)
    total(me.rank)
    if me.rank == LOST:
        me.board.set("began")
        me.board.wait("never")
    if me.rank == 0:
        me.board.wait("began")
        work = dist.isend(torch.ones(1), dst=LOST)
        assert not work.is_completed()
        me.board.set("sent")
        work.wait()
        active = pg.get_active_ranks(dist.group.WORLD).tolist()
        found = pg.get_local_success(work), active, pg.get_failed_ranks_hint(work).tolist()
        work = dist.isend(torch.full((1,), 5.0), dst=2)
        me.board.wait("posted")
        work.wait()
        assert pg.get_local_success(work)
        return found
    if me.rank == 2:
        got = torch.zeros(1)
        work = dist.irecv(got, src=0)
        me.board.set("posted")
        work.wait()
        assert got.item() == 5.0
    return None


def test_a_short_send_to_a_rank_that_dies_has_failed():
    with harness.Crew(SIZE, backend=None) as crew:
        crew.start(short_and_not_received)
        crew.board.wait("sent")
        crew.kill(LOST)
        found = crew.results(dead=[LOST])[0]
        assert found == (False, [1, 0, 1, 1], [0, 1, 0, 0])
        crew.broken = True


# ---- calls with parts for the survivors only


def gathered(me: harness.Rank, ranks: int, count: int) -> None:
    """Collectives whose buffers have parts for that many ranks, the first ones: all that live."""
    input = torch.full((count,), 2.0**me.rank)
    expected = (2.0 ** torch.arange(ranks)).repeat_interleave(count)
    whole = torch.full((ranks * count,), -1.0)
    dist.all_gather_into_tensor(whole, input)
    assert torch.equal(whole, expected)
    parts = [torch.full((count,), -1.0) for _ in range(ranks)]
    dist.all_gather(parts, input)
    assert torch.equal(torch.cat(parts), expected)

    given = torch.arange(ranks * count).float() * (me.rank + 1)
    of_all = torch.arange(ranks * count).float() * sum(range(1, ranks + 1))
    expected = of_all[me.rank * count :][:count]
    mine = torch.zeros(count)
    dist.reduce_scatter_tensor(mine, given)
    assert torch.equal(mine, expected)
    mine = torch.zeros(count)
    dist.reduce_scatter(mine, list(given.chunk(ranks)))
    assert torch.equal(mine, expected)


def refused_calls(me: harness.Rank, count: int):
    """Calls without parts for the last rank, which is there."""
    parts = list(torch.zeros(me.size - 1, count))
    one = torch.ones(count)
    yield lambda: dist.all_gather_into_tensor(torch.cat(parts), one)
    yield lambda: dist.all_gather(parts, one)
    yield lambda: dist.reduce_scatter_tensor(one, torch.cat(parts))
    yield lambda: dist.reduce_scatter(one, parts)


def with_fewer_parts(me: harness.Rank, count: int):
    comes = "MOONCAKE_REJOIN" in os.environ
    begin(me)
    world = dist.group.WORLD
    last = me.size - 1
    if comes:
        pg.join_group(world)
    else:
        gathered(me, me.size, count)
        for call in refused_calls(me, count):
            kind, text = harness.raised(call)
            assert kind == "DistBackendError"
            assert harness.ranks_in(text) >= set(range(me.size))
            assert "parts for 3 ranks without the caller" in text
        me.board.set(f"began-{me.rank}")
        if me.rank == last:
            me.board.wait("never")
        gathered(me, last, count)
        harness.until(lambda: pg.get_peer_state(world, [last]) == [True], "a newcomer")
        assert pg.recover_ranks(world, [last]).status is pg.ProposalStatus.Applied
    gathered(me, me.size, count)


@pytest.mark.parametrize("count", [2, 1 << 18])
def test_parts_for_the_survivors_only(count):
    with harness.Crew(SIZE, backend=None) as crew:
        crew.start(with_fewer_parts, count)
        crew.board.wait_all("began", range(SIZE))
        crew.kill(SIZE - 1)
        crew.replace(SIZE - 1, with_fewer_parts, count)
        crew.results()


# ---- mistakes of a newcomer


def mistaken(me: harness.Rank):
    comes = "MOONCAKE_REJOIN" in os.environ
    begin(me)
    world = dist.group.WORLD
    if not comes:
        me.board.set(f"began-{me.rank}")
        if me.rank == 1:
            me.board.wait("never")
        me.board.wait("asked")
        assert pg.recover_ranks(world, [1]).status is pg.ProposalStatus.Applied
        return total(me.rank), []
    found = [harness.raised(pg.recover_ranks, world, [0])]
    answer = pg.activate_ranks(world, [0])
    assert answer.status is pg.ProposalStatus.Rejected
    found.append(("Rejected", answer.reject_reason))
    me.board.set("asked")
    pg.join_group(world)
    found.append(harness.raised(pg.join_group, world))
    return total(me.rank), found


def test_mistakes_of_a_newcomer():
    with harness.Crew(2, backend=None) as crew:
        crew.start(mistaken)
        crew.board.wait_all("began", range(2))
        crew.kill(1)
        crew.replace(1, mistaken)
        sums, found = zip(*crew.results(), strict=True)
        assert sums == (3, 3)
        early, rejected, late = found[1]
        assert early[0] == late[0] == "DistBackendError"
        for _, text in (early, rejected):
            assert "recover_ranks" in text
            assert "rank 1" in text
            assert "call join_group first" in text
        assert "rank 1 is in group" in late[1]


# ---- Buffers

TOKENS, HIDDEN, EXPERTS = 4, 64, 4


def needed(me: harness.Rank) -> int:
    return Buffer.get_ep_buffer_size_hint(TOKENS, HIDDEN, me.size, EXPERTS)


class Round:
    """A dispatch of tokens, each to one expert of either rank, and the combine of the rows."""

    def __init__(self, buffer: Buffer, rank: int, turn: int) -> None:
        draw = torch.Generator().manual_seed(10 * turn + rank)
        self.buffer = buffer
        self.x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=draw).bfloat16()
        self.chosen = torch.tensor([[0, EXPERTS // 2]] * TOKENS)
        self.active = torch.ones(2, dtype=torch.int32)
        self.rows, _, self.handle, _, _ = buffer.dispatch(
            self.x, self.chosen, self.active, TOKENS, EXPERTS, -1, use_fp8=False
        )

    def combined(self) -> torch.Tensor:
        weights = torch.full((TOKENS, 2), 0.5)
        return self.buffer.combine(
            self.rows, self.chosen, weights, self.active, -1, self.handle
        )[0]  # fmt: skip


def without_a_newcomer(me: harness.Rank):
    buffer = Buffer(dist.group.WORLD, needed(me))
    native = buffer.runtime
    before = Round(buffer, me.rank, 0)
    buffer.update_ep_member()
    assert torch.equal(before.combined(), before.x)
    after = Round(buffer, me.rank, 1)
    assert torch.equal(after.combined(), after.x)
    assert buffer.runtime is native


def test_update_ep_member_without_a_newcomer_has_no_effect():
    harness.run_ranks(2, without_a_newcomer)


def too_small(me: harness.Rank):
    """The newcomer's Buffer is too small for the ranks of the group: its dispatch says so, and the
    others go on without its part."""
    comes = "MOONCAKE_REJOIN" in os.environ
    begin(me)
    world = dist.group.WORLD
    if comes:
        pg.join_group(world)
        found = harness.raised(Round, Buffer(world, needed(me) // 8), me.rank, 1)
    else:
        buffer = Buffer(world, needed(me))
        first = Round(buffer, me.rank, 0)
        assert torch.equal(first.combined(), first.x)
        me.board.set(f"began-{me.rank}")
        if me.rank == 1:
            me.board.wait("never")
        harness.until(lambda: pg.get_active_ranks(world).tolist() == [1, 0], "the loss")
        harness.until(lambda: pg.get_peer_state(world, [1]) == [True], "a newcomer")
        pg.recover_ranks(world, [1])
        buffer.update_ep_member()
        second = Round(buffer, me.rank, 1)
        assert torch.equal(second.combined(), second.x / 2)
        assert second.active.tolist() == [1, 0]
        assert buffer.missing_contributions.all()
        found = None
    return total(me.rank), found


def test_a_newcomer_with_too_small_a_buffer():
    with harness.Crew(2, backend=None) as crew:
        crew.start(too_small)
        crew.board.wait_all("began", range(2))
        crew.kill(1)
        crew.replace(1, too_small)
        sums, found = zip(*crew.results(), strict=True)
        assert sums == (3, 3)
        kind, text = found[1]
        assert kind == "ValueError"
        assert text.startswith("rank 1: ")
        assert "make it as large as the size hint says" in text
