"""Ranks with dispatches and combines of tensors of a device by kernels."""

from __future__ import annotations

import devices
import ep_crew
import harness
import peer_ranks
from conftest import DEVICE

from mooncake.ep import reference

SIZE, TOKENS, HIDDEN, TOPK, EXPERTS = 3, 8, 256, 3, 7
OWNERS = reference.default_owners(EXPERTS, SIZE)
COUNTS = [8, 3, 5]
HOOK = {"return_recv_hook": True}
BF16 = {"use_fp8": False}


def crew(size=SIZE, **options):
    devices.prepare(DEVICE)
    transports, namespaces = peer_ranks.on_hosts(size)
    env = {
        **transports,
        "MOONCAKE_EP_KERNELS": "1",
        devices.VARIABLE: DEVICE,
        **options.pop("env", {}),
    }
    devices.skip_without_queues(env, least=2)
    return harness.Crew(size, env=env, **{**namespaces, **options})


def run(function, *args, **options):
    ranks = crew(**options)
    try:
        return ranks.call(function, *args)
    finally:
        ranks.close()


def held(stream=None):
    from fake_device import control

    return control.held(stream)


def inputs(seed):
    return ep_crew.inputs(seed, COUNTS, HIDDEN, TOPK, EXPERTS)


def a_buffer(**options):
    return ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS, **options)


def dispatch(buffer, mine, **how):
    return buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, **BF16, **how)
