"""A job whose store died with rank 0: a new process finds it by a token that a member hands out."""

from __future__ import annotations

import os
from datetime import timedelta

import harness
import pytest
import torch
import torch.distributed as dist

import mooncake_backend
from mooncake import pg

SIZE = 4
KEY = "a key that all ranks know"
ENV = {"MOONCAKE_JOB_KEY": KEY, "MOONCAKE_FAILURE_TIMEOUT_MS": "1000"}
PARTS = 1 << 16  # elements: more than a slot holds


def total(group=None) -> int:
    """Sum over the ranks that take part. Each gives another power of two."""
    tensor = torch.full((PARTS,), float(2 ** dist.get_rank()))
    dist.all_reduce(tensor, group=group)
    assert (tensor == tensor[0]).all()
    return int(tensor[0])


def begin(me: harness.Rank) -> None:
    """Makes the default group over a store that rank 0's process serves."""
    dist.init_process_group(
        "mooncake-cpu",
        store=me.tcp_store(),
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=harness.DEADLINE),
    )


def come(me: harness.Rank, token: str, in_url: bool = True) -> None:
    os.environ.pop("MOONCAKE_REJOIN")  # the token says it
    url, given = f"mooncake://{token}", {"rank": me.rank, "world_size": me.size}
    if not in_url:
        url, given = "mooncake://", {}
        os.environ.update(MOONCAKE_JOIN=token, RANK=str(me.rank), WORLD_SIZE=str(me.size))
    timeout = timedelta(seconds=harness.DEADLINE)
    dist.init_process_group("mooncake-cpu", init_method=url, timeout=timeout, **given)


def replaced(me: harness.Rank, victims: list[int], life: int):
    """Each victim in turn is killed and replaced. `life`: number of the victim that this process
    replaces; -1: none."""
    ends = (0, SIZE - 1)
    everybody = 2**SIZE - 1
    if life < 0:
        begin(me)
    else:
        come(me, me.board.wait(f"token-{life}"), in_url=life % 2 == 0)
        pair = dist.new_group(ends)
        pg.join_group(dist.group.WORLD)
        if me.rank in ends:
            pg.join_group(pair)
    world = dist.group.WORLD
    assert total() == everybody
    for turn in range(life + 1, len(victims)):
        victim = victims[turn]
        me.board.set(f"turn-{turn}-{me.rank}")
        if me.rank == victim:
            me.board.wait("never")
        assert total() == everybody - 2**victim
        if turn == 0:
            pair = dist.new_group(ends)  # the store is dead
        # The last newcomer hands out the next token.
        if me.rank == (victims[turn - 1] if turn else SIZE - 1):
            me.board.set(f"token-{turn}", mooncake_backend.join_token(world))
        recover(world, victim)
        if victim in ends and me.rank in ends:
            recover(pair, ends.index(victim))
        assert total() == everybody
    if me.rank in ends:
        assert total(pair) == sum(2**rank for rank in ends)
    return mooncake_backend.get_active_ranks(world).tolist()


def recover(group, rank: int) -> None:
    harness.until(lambda: pg.get_peer_state(group, [rank]) == [True], "a newcomer")
    pg.recover_ranks(group, [rank])


def test_ranks_come_back_after_the_store_has_died():
    victims = [0, 2, SIZE - 1]
    with harness.Crew(SIZE, backend=None, env=ENV) as crew:
        crew.start(replaced, victims, -1)
        for turn, victim in enumerate(victims):
            crew.board.wait_all(f"turn-{turn}", range(SIZE))
            crew.kill(victim)
            crew.replace(victim, replaced, victims, turn)
        assert crew.results() == [[1] * SIZE] * SIZE


# ---- mistakes


def hand_out(me: harness.Rank):
    begin(me)
    total()
    if me.rank == 1:
        me.board.set("token", mooncake_backend.join_token(dist.group.WORLD))
    me.board.set(f"began-{me.rank}")
    if me.rank == 0:
        me.board.wait("never")
    assert total() == 2**SIZE - 2
    me.board.set(f"without-{me.rank}")
    me.board.wait("over")
    assert total() == 2**SIZE - 2
    recover(dist.group.WORLD, 0)
    return total()


def come_rightly(me: harness.Rank):
    come(me, me.board.wait("token"))
    pg.join_group(dist.group.WORLD)
    return total()


def come_wrongly(me: harness.Rank, name: str, changes: dict[str, str | None], edit: str):
    token = me.board.wait("token")
    for variable, value in changes.items():
        if value is None:
            del os.environ[variable]
        else:
            os.environ[variable] = value
    if edit == "size":
        me.size += 1
    if edit == "held":
        me.rank = 1
    token = {"cut": token[:-12], "text": "no-token!", "none": ""}.get(edit, token)
    me.board.set(name, harness.raised(come, me, token))


MISTAKES = {
    "cut": ({}, "cut", "ValueError", "join token"),
    "text": ({}, "text", "ValueError", "not the text of a join_token()"),
    "none": ({}, "none", "ValueError", "is for a process that joins a running job"),
    "no key": ({"MOONCAKE_JOB_KEY": None}, "", "ValueError", "MOONCAKE_JOB_KEY must be set"),
    "another key": ({"MOONCAKE_JOB_KEY": KEY[::-1]}, "", "PeerLostError", "job's key"),
    "another size": ({}, "size", "DistBackendError", "has 4 ranks, not 5"),
    "held": ({}, "held", "DistBackendError", "rank 1"),
    "another mode": ({"MOONCAKE_ON_FAILURE": "raise"}, "", "DistBackendError", "mode"),
}


def test_wrong_tokens_are_refused_and_cost_the_members_nothing():
    with harness.Crew(SIZE, backend=None, env=ENV) as crew:
        crew.start(hand_out)
        crew.board.wait_all("began", range(SIZE))
        crew.kill(0)
        crew.board.wait_all("without", range(1, SIZE))
        for name, (changes, edit, kind, part) in MISTAKES.items():
            crew.replace(0, come_wrongly, name, changes, edit)
            found, text = crew.board.wait(name)
            assert found == kind, (name, found, text)
            assert part in text, (name, text)
            crew.kill(0)
        crew.board.set("over")
        crew.replace(0, come_rightly)
        assert crew.results() == [2**SIZE - 1] * SIZE


def no_key(me: harness.Rank):
    begin(me)
    return harness.raised(mooncake_backend.join_token, dist.group.WORLD)


def test_without_a_key_of_its_own_a_job_has_no_token():
    with harness.Crew(2, backend=None) as crew:
        for kind, text in crew.call(no_key):
            assert kind == "ValueError"
            assert "MOONCAKE_JOB_KEY must be set" in text


def test_nobody_answers():
    """All members of the token are dead."""
    with harness.Crew(SIZE, backend=None, env=ENV) as crew:
        crew.start(hand_out)
        crew.board.wait_all("began", range(SIZE))
        for rank in range(SIZE):
            crew.kill(rank)
        crew.replace(0, come_wrongly, "nobody", {}, "")
        kind, text = crew.board.wait("nobody")
        assert kind == "PeerLostError"
        assert "no member of the job can be reached" in text
        crew.broken = True  # nobody is left that could leave


@pytest.mark.parametrize("missing", ["rank", "world_size"])
def test_rank_and_size_are_needed(missing, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    given = {"rank": 0, "world_size": 2}
    del given[missing]
    kind, text = harness.raised(
        dist.init_process_group, "mooncake-cpu", init_method="mooncake://abc", **given
    )
    assert kind == "ValueError"
    assert missing in text
