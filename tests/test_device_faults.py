"""Devices and their drivers beside losses and failures: threads that must not depend on them, and
programs in which calls of a device fail by seed."""

from __future__ import annotations

import ctypes
import random
import threading

import cards
import devices
import harness
import pytest
import torch
import torch.distributed as dist

from mooncake_backend import MooncakeBackendOptions, get_active_ranks

devices_fake = pytest.mark.skipif(
    devices.TESTED != "fake", reason="only the device fake knows its callers, and fails on purpose"
)
pytestmark = [pytest.mark.ci, devices_fake]

# ---- threads on which liveness and membership depend

# These enqueue work, copy, free, or wait for kernels. No other thread of ours may call a device.
MAY_CALL = {"mooncake-async", "mooncake-msg", "mooncake-done", "mooncake-then", "mooncake-peers"}
# One of these calls it in each round, so such calls are seen.
CALLS_ALWAYS = {
    "words": {"mooncake-async", "mooncake-done"},
    "host": {"mooncake-async", "mooncake-done"},
    "kernels": {"mooncake-peers"},
}
FORMS = {
    "words": {},
    "host": {"MOONCAKE_STREAM_WORDS": "0"},
    "kernels": {"MOONCAKE_PEER_BYTES": "16384"},
}


def callers():
    from fake_device import control

    return {name for name in control.callers() if name.startswith("mooncake-")}


def lasting(me, victims):
    """Operations and messages on device tensors, and groups, until the victims are out."""
    shown = torch.ones(me.size, dtype=torch.int32)
    dist.init_process_group(
        devices.served_by("mooncake"), store=me.store(), rank=me.rank, world_size=me.size,
        pg_options=MooncakeBackendOptions(shown),
    )  # fmt: skip
    left = [r for r in range(me.size) if r not in victims]
    turn = 0
    while True:
        tensor = torch.full((2000,), float(2**me.rank))
        work = dist.all_reduce(tensor, async_op=True)
        taken = torch.empty(30)
        messages = []
        if me.rank in left[:2]:
            other = sum(left[:2]) - me.rank
            messages = [dist.irecv(taken, other), dist.isend(torch.ones(30), other)]
        for one in (work, *messages):
            one.wait()
        assert tensor.unique().tolist() == [sum(2.0**r for r in work.contributors)]
        turn += 1
        if turn == 3:
            me.board.set(f"looping-{me.rank}")
        if work.contributors == left:
            break
    later = dist.new_group()
    dist.all_reduce(tensor, group=later)
    assert get_active_ranks(dist.group.WORLD) is shown
    assert shown.tolist() == [int(r in left) for r in range(me.size)]
    found = callers()
    _call_as("mooncake-live")
    assert callers() == found | {"mooncake-live"}, "a thread that calls a device is not seen"
    me.board.set(f"looked-{me.rank}")
    me.board.wait_all("looked", left)
    return found


def _call_as(name):
    def body():
        ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME
        torch.ones(1, device=devices.kind())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


@pytest.mark.parametrize("form", FORMS)
def test_no_thread_of_liveness_or_membership_calls_a_device(form):
    """One rank is killed, one falls silent; the survivors agree twice."""
    env = {**cards.over("device"), "MOONCAKE_FAILURE_TIMEOUT_MS": "500", **FORMS[form]}
    with harness.starting(4, lasting, [1, 3], backend=None, env=env) as crew:
        crew.board.wait_all("looping", range(4))
        crew.kill(1)
        crew.stop(3)
        found = crew.results(dead=[1, 3])
    for names in (found[0], found[2]):
        assert names <= MAY_CALL, names
        assert names & CALLS_ALWAYS[form], names


# ---- calls of a device that fail by seed

SIZE, ROUNDS, TIMEOUT = 3, 12, 3
CALLS = [
    "copy", "record", "block", "hasHappened", "createEvent", "createStream", "allocatePinned",
    "allocate", "synchronize", "enqueue", "isCapturing",
]  # fmt: skip
OF_FORM = {
    "words": ["writeWord", "awaitWord"],
    "host": [],
    "kernels": ["launch", "allocateShared", "mapShared", "checkSharing", "prepareKernels"],
}
CAUSES = ("injected", "context of the device is lost", "out of memory", "device memory")


def fail(drawn, form):
    """Lets something fail in the rounds that come."""
    from fake_device import control

    kind = drawn.choice(["call"] * 6 + ["context", "memory"])
    if kind == "context":
        control.lose_context()
    elif kind == "memory":
        control.limit_memory(1)
    else:
        call = drawn.choice(CALLS + OF_FORM[form] * 2)
        code = drawn.choice(["system", "exhausted"])
        control.inject(call, drawn.randint(1, 40), drawn.randint(1, 3), code)


def collective(me, verb, number, count):
    """Returns the work of a collective, its tensor, and the values that this ends with if these
    ranks take part."""
    given = [float(100 * number + r + 1) for r in range(me.size)]
    mine, root = torch.full((count,), given[me.rank]), number % me.size
    output = torch.full((me.size * count,), -1.0)

    def parts(who):
        return {given[r] if r in who else 0.0 for r in range(me.size)}

    if verb == "all_reduce":
        return dist.all_reduce(mine, async_op=True), mine, lambda who: {sum(given[r] for r in who)}
    if verb == "broadcast":
        return dist.broadcast(mine, root, async_op=True), mine, lambda who: {given[root]}
    if verb == "all_to_all":
        work = dist.all_to_all_single(output, mine.repeat(me.size), async_op=True)
    else:
        work = dist.all_gather_into_tensor(output, mine, async_op=True)
    return work, output, parts


def faulty_on_rank(me, seed, form, victim):
    """Returns the texts of the errors in their order. Outputs of other ranks are right, or have
    their old contents. The victim leaves, and the others may go on without it."""
    me.init(timeout=TIMEOUT)
    program, own = random.Random(seed), random.Random(f"{seed} fails")
    begin, errors = program.randrange(ROUNDS // 2), []

    def attempt(call, *arguments):
        try:
            return call(*arguments)
        except (RuntimeError, dist.DistError) as error:
            errors.append(str(error))

    for number in range(ROUNDS):
        verb = program.choice(["all_reduce", "broadcast", "all_to_all", "all_gather"])
        # The emulator of kernels is slow.
        count = program.choice([1, 300, 5000, 5000 if form == "kernels" else 400_000])
        if me.rank == victim and number == begin:
            fail(own, form)
        called = attempt(collective, me, verb, number, count)
        if called is None:
            continue
        work, tensor, expected = called
        before = len(errors)
        attempt(work.wait)
        found = attempt(lambda tensor=tensor: {*tensor.unique().tolist()})
        who = attempt(lambda work=work: work.contributors)
        if me.rank != victim and len(errors) == before:
            untouched = {-1.0, float(100 * number + me.rank + 1)}
            assert found == expected(who) or found <= untouched, (number, verb, found, who)
    attempt(torch.accelerator.synchronize)
    attempt(dist.destroy_process_group)
    return errors


def check_seed(seed):
    form, victim = random.Random(seed).choice([*FORMS]), seed % SIZE
    env = {**cards.over("device"), "MOONCAKE_FAILURE_TIMEOUT_MS": "2000", **FORMS[form]}
    with harness.starting(SIZE, faulty_on_rank, seed, form, victim, backend=None, env=env) as crew:
        errors = crew.results(90)
    own = errors.pop(victim)
    assert not own or any(cause in own[0] for cause in CAUSES), own
    for others in errors:
        assert own or not others, "an error without a cause"
        assert all(f"rank {victim}" in text for text in others[:1]), others


@pytest.mark.parametrize("seed", [*range(6), *(
    pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 22)
)])  # fmt: skip
def test_whatever_fails_ends_in_time_with_its_cause(seed):
    check_seed(seed)
