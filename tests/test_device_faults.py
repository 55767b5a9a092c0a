"""Devices and their drivers beside losses and failures: threads that must not depend on them, and
programs in which calls of a device fail by seed."""

from __future__ import annotations

import ctypes
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
        assert "mooncake-done" in names or "mooncake-async" in names, names
