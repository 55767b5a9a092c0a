"""Ranks whose collectives on tensors of a device go by kernels."""

from __future__ import annotations

import os
import signal

import devices
import harness
import torch
import torch.distributed as dist
from conftest import DEVICE

import mooncake_backend as mb

LIMIT = 16384  # bytes of an input
# Returns the network namespaces of so many ranks. None: they are on this host. Tests set it.
places = None


def on_hosts(size):
    """Options of a crew, where the ranks are where `places` says."""
    if places is None:
        return {"MOONCAKE_TRANSPORTS": "shm"}, {}
    return {"MOONCAKE_TRANSPORTS": "shm,tcp"}, {"namespaces": places(size)}


def crew(size, **options):
    devices.prepare(DEVICE)
    transports, namespaces = on_hosts(size)
    env = {
        **transports,
        "MOONCAKE_PEER_BYTES": str(LIMIT),
        devices.VARIABLE: DEVICE,
        **options.pop("env", {}),
    }
    devices.skip_without_queues(env)
    return harness.Crew(size, env=env, **{**namespaces, **options})


def run(size, function, *args, **options):
    ranks = crew(size, **options)
    try:
        return ranks.call(function, *args)
    finally:
        ranks.close()


def runs_kernels(call, number):
    """Checks how many kernels the call runs, where the device counts them."""
    if DEVICE != "fake":
        call()
        return
    from fake_device import control

    torch.accelerator.synchronize()
    before = control.kernels_run()
    call()
    torch.accelerator.synchronize()
    assert control.kernels_run() - before == number


def dies(me, victim, left):
    """Kills the victim. Returns on the ranks that are left, when all of them know it."""
    me.board.set(f"up-{victim}-{me.rank}")
    me.board.wait_all(f"up-{victim}", [victim, *left])
    if me.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    world = dist.group.WORLD
    harness.until(lambda: mb.get_active_ranks(world)[victim] == 0, f"the loss of {victim}")
    me.board.set(f"knows-{victim}-{me.rank}")
    me.board.wait_all(f"knows-{victim}", left)
