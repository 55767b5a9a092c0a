"""Ranks that die or fall silent around a dispatch and a combine: what the survivors agree on, what
is missing, and that all else has the same bits as without the fault."""

from __future__ import annotations

import contextlib
import os
import signal

import cards
import devices
import ep_crew
import harness
import hosts
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from ep_crew import check_combine, check_dispatch, my_answers, same_bits
from harness import raised, until

from mooncake.ep import reference

SIZE, TOKENS, HIDDEN, TOPK, EXPERTS = 4, 8, 640, 2, 10
OWNERS = reference.default_owners(EXPERTS, SIZE)
SHORT = 1.0  # a failure_timeout that has to pass in the test
COUNTS = [8, 3, 0, 8]
VICTIMS = [0, 2, 3]
# What the buffer is made of: a group of ours, or one that only tells who the ranks are.
OURS, FOREIGN = "mooncake", "gloo"


# The last four: with tensors of a device, over shm or with the ranks on two hosts.
WIRES = [
    "shm", "tcp", "fabric", "device", "device-kernels", "device-kernels-hosts",
    pytest.param("device-host", marks=pytest.mark.slow),
]  # fmt: skip


def over(transports, **more):
    if transports.startswith("device"):
        devices.prepare(DEVICE)
        more[devices.VARIABLE] = DEVICE
        more["MOONCAKE_EP_STREAM_WORDS"] = str(int(transports != "device-host"))
        more["MOONCAKE_EP_KERNELS"] = str(int("kernels" in transports))
        if transports.endswith("-hosts"):
            network = {"MOONCAKE_TRANSPORTS": "shm,tcp", "GLOO_SOCKET_IFNAME": "eth0"}
            return {"env": {**network, **more}, "on_hosts": 2}
        transports = "shm"
    return {"env": {**cards.over(transports), **more}}


@contextlib.contextmanager
def crew(function, *args, size=SIZE, on_hosts=0, **options):
    options = {**over("shm"), **options}
    if on_hosts and hosts.why_not():
        pytest.skip(hosts.why_not())
    with contextlib.ExitStack() as stack:
        if on_hosts:
            made = stack.enter_context(hosts.Hosts(on_hosts))
            options["namespaces"] = made.spread(size)
        yield stack.enter_context(harness.starting(size, function, *args, **options))


def go(me, name, ranks):
    """All these ranks have come here."""
    me.board.set(f"{name}-{me.rank}")
    me.board.wait_all(name, ranks)


def die():
    signal.raise_signal(signal.SIGKILL)


def others(*victims, size=SIZE):
    return [rank for rank in range(size) if rank not in victims]


def inputs():
    return ep_crew.inputs(11, COUNTS, HIDDEN, TOPK, EXPERTS)


def check_other_rows(me, given, combined, victims, **cast):
    """Tokens whose experts live have the bits that they have without the fault."""
    given, combined = ep_crew.on_cpu(given), combined.cpu()
    with torch.device("cpu"):
        unharmed, _ = reference.combine(
            me.rank,
            ep_crew.all_answers(given, TOKENS, EXPERTS, **cast),
            [one.topk_idx for one in given],
            given[me.rank].weights,
            OWNERS,
        )
    lost = torch.tensor(
        [expert for expert in range(EXPERTS) if OWNERS[expert] in victims], device="cpu"
    )
    is_harmed = torch.isin(given[me.rank].topk_idx, lost).any(dim=1)
    if len(is_harmed) == TOKENS:  # enough for both kinds
        assert is_harmed.any()
        assert not is_harmed.all()
    same_bits(combined[~is_harmed], unharmed[~is_harmed])
    return is_harmed


def survive(me, buffer, given, victims, how, cast):
    """Dispatch and combine without them; what was agreed."""
    mine, left = given[me.rank], others(*victims)
    ranks = torch.ones(SIZE, dtype=torch.int32)
    found = buffer.low_latency_dispatch(
        mine.x, mine.topk_idx, TOKENS, EXPERTS, active_ranks=ranks, **how, **cast
    )
    ep_wait(found[3], found[4])
    assert ranks.tolist() == [int(rank in left) for rank in range(SIZE)]
    rows = check_dispatch(me, found, given, TOKENS, EXPERTS, active=left, **cast)
    combined, event, hook = buffer.low_latency_combine(
        my_answers(me, rows, OWNERS), mine.topk_idx, mine.weights, found[2], **how
    )
    ep_wait(event, hook)
    missing = event.missing_contributions
    check_combine(me, combined, missing, given, TOKENS, EXPERTS, active=left, **cast)
    is_harmed = check_other_rows(me, given, combined, victims, **cast)
    assert missing.tolist() == is_harmed.tolist()
    return ranks.tolist()


def ep_wait(event, hook):
    hook() if hook is not None else event.current_stream_wait()


def check_group(victims, size=SIZE):
    """The group that the buffer was made of goes on, too."""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size - len(victims)


HOWS = [{}, {"async_finish": True}, {"return_recv_hook": True}]
CASTS = [{"use_fp8": False}, {"use_fp8": True}]


# ---- before the dispatch


def before_dispatch_on_rank(me, victim, how, cast):
    given = inputs()
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    go(me, "ready", range(SIZE))
    if me.rank == victim:
        die()
    agreed = [survive(me, buffer, given, [victim], how, cast) for _ in range(3)]
    status = torch.zeros(SIZE, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(rank == victim) for rank in range(SIZE)]
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(rank == victim) for rank in range(SIZE)]
    check_group([victim])
    buffer.destroy()
    return agreed


@pytest.mark.parametrize("transports", WIRES)
@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_before_a_dispatch(victim, how, transports):
    cast = CASTS[victim % 2]
    with crew(before_dispatch_on_rank, victim, how, cast, **over(transports)) as ranks:
        results = ranks.results(dead=[victim])
    agreed = [result for rank, result in enumerate(results) if rank != victim]
    assert all(result == agreed[0] for result in agreed)


# ---- between dispatch and combine


def before_combine_on_rank(me, victim, how, cast, again):
    given = inputs()
    mine, left = given[me.rank], others(victim)
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, **how, **cast)
    ep_wait(found[3], found[4])
    rows = check_dispatch(me, found, given, TOKENS, EXPERTS, **cast)
    go(me, "dispatched", range(SIZE))
    if me.rank == victim:
        die()
    ranks = torch.ones(SIZE, dtype=torch.int32)
    out = torch.full_like(mine.x, float("nan"))
    for _ in range(2 if again else 1):
        combined, event, hook = buffer.low_latency_combine(
            my_answers(me, rows, OWNERS), mine.topk_idx, mine.weights, found[2], out=out,
            active_ranks=ranks, **how,
        )  # fmt: skip
        ep_wait(event, hook)
        assert ranks.tolist() == [int(rank in left) for rank in range(SIZE)]
        missing = event.missing_contributions
        check_combine(me, out, missing, given, TOKENS, EXPERTS, still_active=left, **cast)
        is_harmed = check_other_rows(me, given, combined, [victim], **cast)
        assert missing.tolist() == is_harmed.tolist()
    survive(me, buffer, given, [victim], {}, cast)
    check_group([victim])
    buffer.destroy()
    return ranks.tolist()


@pytest.mark.parametrize("transports", WIRES)
@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_between_dispatch_and_combine(victim, how, transports):
    cast = CASTS[1 - victim % 2]
    arguments = (victim, how, cast, victim == 2)
    with crew(before_combine_on_rank, *arguments, **over(transports)) as ranks:
        results = ranks.results(dead=[victim])
    agreed = [result for rank, result in enumerate(results) if rank != victim]
    assert all(result == agreed[0] for result in agreed)


# ---- anywhere


def anywhere_on_rank(me, victim, group_of, hidden):
    """The victim is killed by the test while all go on and on: whenever that was, every operation
    is one with it or one without it, the same on all survivors."""
    given = ep_crew.inputs(11, COUNTS, hidden, TOPK, EXPERTS)
    mine = given[me.rank]
    group = dist.group.WORLD if group_of == OURS else dist.new_group(backend="gloo")
    buffer = ep_crew.deepep_buffer(TOKENS, hidden, EXPERTS, group)
    everybody, seen, after = list(range(SIZE)), [], 0
    me.board.set(f"running-{me.rank}")
    while after < 5:
        assert len(seen) < 100_000
        ranks = torch.ones(SIZE, dtype=torch.int32)
        found = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False, active_ranks=ranks
        )
        first = [rank for rank in everybody if ranks[rank]]
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, active=first, use_fp8=False)
        combined, event, _ = buffer.low_latency_combine(
            my_answers(me, rows, OWNERS), mine.topk_idx, mine.weights, found[2], active_ranks=ranks
        )
        then = [rank for rank in everybody if ranks[rank]]
        check_combine(
            me, combined, event.missing_contributions, given, TOKENS, EXPERTS, active=first,
            still_active=then,
        )  # fmt: skip
        seen.append((first, then))
        after += first == then == others(victim)
    return [step for step in seen if step != (everybody, everybody)], len(seen)


@pytest.mark.parametrize("hidden", [HIDDEN, 49152], ids=["few", "many"])
@pytest.mark.parametrize("transports", WIRES)
@pytest.mark.parametrize("group_of", [OURS, FOREIGN])
@pytest.mark.parametrize("victim", [0, 3])
def test_killed_anywhere(victim, group_of, transports, hidden):
    """`many` bytes do not go with a table: they are pushed over TCP and fetched by cards."""
    arguments = (victim, group_of, hidden)
    with crew(anywhere_on_rank, *arguments, **over(transports)) as ranks:
        for rank in range(SIZE):
            ranks.board.wait(f"running-{rank}")
        ranks.kill(victim)
        results = ranks.results(dead=[victim])
    found = [result for rank, result in enumerate(results) if rank != victim]
    assert all(result == found[0] for result in found), found
    without = others(victim)
    for first, then in found[0][0]:
        assert set(first) >= set(then) >= set(without)


# ---- stopped


def stopped_on_rank(me, victim, where):
    given = inputs()
    mine = given[me.rank]
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    found = None
    if where == "combine":
        found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False)
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, use_fp8=False)
    go(me, "ready", range(SIZE))
    if me.rank == victim:
        me.board.set("victim", os.getpid())
        me.board.wait("go on")
        if where == "combine":
            given_back = (rows, mine.topk_idx, mine.weights, found[2])
            kind, text = raised(buffer.low_latency_combine, *given_back)
        else:
            kind, text = raised(survive, me, buffer, given, [], {}, {"use_fp8": False})
        assert kind == "EvictedError", text
        return None
    me.board.wait("stopped")
    left = others(victim)
    if where == "combine":
        combined, event, _ = buffer.low_latency_combine(
            my_answers(me, rows, OWNERS), mine.topk_idx, mine.weights, found[2]
        )
        missing = event.missing_contributions
        check_combine(me, combined, missing, given, TOKENS, EXPERTS, still_active=left)
    agreed = survive(me, buffer, given, [victim], {}, {"use_fp8": False})
    go(me, "without", left)
    me.board.set("go on")
    check_group([victim])
    me.board.wait("over")
    buffer.destroy()
    return agreed


@pytest.mark.parametrize("transports", WIRES)
@pytest.mark.parametrize("where", ["dispatch", "combine"])
@pytest.mark.parametrize("victim", [0, 2])
def test_stopped(victim, where, transports):
    # An error may come after wait() has returned, unless that waits on the host.
    more = {"MOONCAKE_FAILURE_TIMEOUT_MS": str(int(SHORT * 1000)), "MOONCAKE_BLOCKING_WAIT": "1"}
    with crew(stopped_on_rank, victim, where, **over(transports, **more)) as ranks:
        ranks.board.wait("victim")
        ranks.stop(victim)
        ranks.board.set("stopped")
        ranks.board.wait("go on")
        ranks.cont(victim)
        until(lambda: ranks.links[victim].poll(), "the victim's end")
        ranks.board.set("over")
        results = ranks.results()
    agreed = [result for rank, result in enumerate(results) if rank != victim]
    assert all(result == agreed[0] for result in agreed)


# ---- several, one after the other


def shrink_on_rank(me):
    """As in DeepEP's test of shrinking: one leaves before a dispatch, one before a combine, one
    before the cleaning; the query shows exactly them."""
    size, gone = 7, []
    given = ep_crew.inputs(12, [4, 0, 3, 4, 2, 4, 1], HIDDEN, TOPK, 14)
    mine = given[me.rank]
    owners = reference.default_owners(14, size)
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, 14, enable_shrink=True)
    status = torch.zeros(size, dtype=torch.int32)

    def leaves(rank):
        go(me, f"before-{rank}", others(*gone, size=size))
        if me.rank == rank:
            die()
        gone.append(rank)

    def check_query():
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(rank in gone) for rank in range(size)]

    ep_crew.round_trip(me, buffer, given, TOKENS, 14)
    check_query()
    leaves(1)
    found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, 14, use_fp8=False)
    first = others(*gone, size=size)
    rows = check_dispatch(me, found, given, TOKENS, 14, active=first)
    check_query()
    leaves(3)
    combined, event, _ = buffer.low_latency_combine(
        my_answers(me, rows, owners), mine.topk_idx, mine.weights, found[2]
    )
    check_combine(
        me, combined, event.missing_contributions, given, TOKENS, 14, active=first,
        still_active=others(*gone, size=size),
    )  # fmt: skip
    check_query()
    leaves(5)
    buffer.clean_low_latency_buffer(TOKENS, HIDDEN, 14)
    check_query()
    check_group(gone, size)
    buffer.destroy()


def test_three_leave_one_after_the_other():
    with crew(shrink_on_rank, size=7) as ranks:
        ranks.results(dead=[1, 3, 5])


# ---- a loss as an error


def raises_on_rank(me, where):
    victim, given = 1, inputs()
    mine = given[me.rank]
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS, on_failure="raise")
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    ranks = torch.ones(SIZE, dtype=torch.int32)
    if where == "combine":
        found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False)
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS)
    go(me, "ready", range(SIZE))
    if me.rank == victim:
        die()
    if where == "combine":
        call, arguments = buffer.low_latency_combine, (
            my_answers(me, rows, OWNERS), mine.topk_idx, mine.weights, found[2],
        )  # fmt: skip
    else:
        call, arguments = buffer.low_latency_dispatch, (mine.x, mine.topk_idx, TOKENS, EXPERTS)
    kind, text = raised(call, *arguments, active_ranks=ranks)
    assert kind == "PeerLostError"
    assert str(victim) in text
    survive(me, buffer, given, [victim], {}, {"use_fp8": False})
    buffer.destroy()


@pytest.mark.parametrize("where", ["dispatch", "combine"])
def test_a_loss_can_be_an_error(where):
    with crew(raises_on_rank, where) as ranks:
        ranks.results(dead=[1])


def repeats_on_rank(me, how, cleans):
    """The rows of a dispatch stay as they are while a lost one after it is called again."""
    victim, both = 1, (inputs(), ep_crew.inputs(12, COUNTS, HIDDEN, TOPK, EXPERTS))
    left, cast = others(victim), {"use_fp8": False}
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS, on_failure="raise")
    calls = [(given[me.rank].x, given[me.rank].topk_idx, TOKENS, EXPERTS) for given in both]

    def dispatch(call):
        found = buffer.low_latency_dispatch(*call, **how, **cast)
        if how:
            ep_wait(found[3], found[4])
        return found

    kept = dispatch(calls[0])
    if cleans:
        buffer.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS)
    go(me, "ready", range(SIZE))
    if me.rank == victim:
        die()
    kind, text = raised(dispatch, calls[1])
    assert kind == "PeerLostError", text
    if cleans:
        buffer.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS)
    repeated = dispatch(calls[1])
    for found, given, active in zip((kept, repeated), both, (None, left), strict=True):
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, active=active, **cast)
        mine = given[me.rank]
        combined, event, _ = buffer.low_latency_combine(
            my_answers(me, rows, OWNERS), mine.topk_idx, mine.weights, found[2]
        )
        missing = event.missing_contributions
        check_combine(
            me, combined, missing, given, TOKENS, EXPERTS, active=active, still_active=left
        )
    buffer.destroy()


@pytest.mark.parametrize(
    ("how", "cleans"),
    [(HOWS[0], False), (HOWS[0], True), (HOWS[1], False), (HOWS[2], True)],
    ids=str,
)
def test_a_lost_dispatch_is_repeated_beside_one_that_is_kept(how, cleans):
    with crew(repeats_on_rank, how, cleans) as ranks:
        ranks.results(dead=[1])


def repeats_the_first_on_rank(me):
    """The first of two dispatches under way is lost. The second keeps its rows."""
    victim, both = 1, (inputs(), ep_crew.inputs(12, COUNTS, HIDDEN, TOPK, EXPERTS))
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS, on_failure="raise")

    def begin(given):
        mine = given[me.rank]
        return buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
        )

    go(me, "ready", range(SIZE))
    if me.rank == victim:
        die()
    lost, kept = begin(both[0]), begin(both[1])
    kind, text = raised(lost[4])
    assert kind == "PeerLostError", text
    kept[4]()
    repeated = begin(both[0])
    repeated[4]()
    for found, given in zip((repeated, kept), both, strict=True):
        check_dispatch(me, found, given, TOKENS, EXPERTS, active=others(victim))
    buffer.destroy()


def test_the_first_of_two_dispatches_is_lost():
    with crew(repeats_the_first_on_rank) as ranks:
        ranks.results(dead=[1])


# ---- Mooncake's tests: stale data, and a rank that left before


def stale_on_rank(me, victim):
    """What the victim sent in an earlier operation does not appear in a later one."""
    given = inputs()
    buffer = ep_crew.mooncake_buffer(TOKENS, HIDDEN, EXPERTS)
    mine, ranks = given[me.rank], torch.ones(SIZE, dtype=torch.int32)
    zeros = torch.zeros_like(mine.weights)
    for _ in range(2):  # both memories hold rows of all
        found = buffer.dispatch(mine.x, mine.topk_idx, ranks, TOKENS, EXPERTS, -1, use_fp8=False)
        recv_x, recv_count = found[0], found[1].clone()
        rows = torch.full_like(recv_x, 5.0)
        buffer.combine(rows, mine.topk_idx, mine.weights, ranks, -1, found[2])
    found = buffer.dispatch(mine.x, mine.topk_idx, ranks, TOKENS, EXPERTS, -1, use_fp8=False)
    assert torch.equal(found[1], recv_count)
    rows = torch.ones_like(found[0])
    go(me, "ready", range(SIZE))
    if me.rank == victim:
        die()
    combined, event, _ = buffer.combine(
        rows, mine.topk_idx, mine.weights, ranks, 30_000_000, found[2]
    )
    named = mine.topk_idx >= 0
    lost = torch.tensor([expert for expert in range(EXPERTS) if OWNERS[expert] == victim])
    weights = torch.where(named & ~torch.isin(mine.topk_idx, lost), mine.weights, zeros)
    expected = weights.sum(dim=1, keepdim=True).expand_as(combined)
    torch.testing.assert_close(combined.float(), expected, rtol=5e-2, atol=1e-3)
    assert ranks.tolist() == [int(rank != victim) for rank in range(SIZE)]
    assert torch.equal(event.missing_contributions, torch.isin(mine.topk_idx, lost).any(dim=1))
    buffer.update_ep_member()
    found = buffer.dispatch(mine.x, mine.topk_idx, ranks, TOKENS, EXPERTS, -1, use_fp8=False)
    check_dispatch(me, found, given, TOKENS, EXPERTS, active=others(victim))


@pytest.mark.parametrize("victim", [0, 1])
def test_no_old_rows_appear(victim):
    with crew(stale_on_rank, victim) as ranks:
        ranks.results(dead=[victim])


def update_on_some_on_rank(me, victim, callers):
    given = inputs()
    buffer = ep_crew.mooncake_buffer(TOKENS, HIDDEN, EXPERTS)
    mine, ranks = given[me.rank], torch.ones(SIZE, dtype=torch.int32)
    left = others(victim)
    go(me, "ready", range(SIZE))
    if me.rank == victim:
        die()
    for _ in range(3):
        if me.rank in callers:
            buffer.update_ep_member()
            buffer.connect(is_update=True)
        found = buffer.dispatch(mine.x, mine.topk_idx, ranks, TOKENS, EXPERTS, -1, use_fp8=False)
        assert ranks.tolist() == [int(rank in left) for rank in range(SIZE)]
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, active=left)
        rows = ep_crew.my_answers(me, rows, OWNERS)
        combined, event, _ = buffer.combine(rows, mine.topk_idx, mine.weights, ranks, -1, found[2])
        missing = event.missing_contributions
        check_combine(me, combined, missing, given, TOKENS, EXPERTS, active=left)
    check_group([victim])


@pytest.mark.parametrize("callers", [[0], [2], []])
def test_members_are_updated_by_some_ranks_only(callers):
    """Who calls it and who does not go on together."""
    with crew(update_on_some_on_rank, 1, callers) as ranks:
        ranks.results(dead=[1])
