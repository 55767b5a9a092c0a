"""A device or its driver that fails while a rank enqueues a staged call."""

from __future__ import annotations

import devices
import pytest
import torch
import torch.distributed as dist
from harness import raised
from test_device import crew

SIZE = 2


@devices.on_fake_only
def fails_once(me, call, number):
    """Rank 0's device fails, and its program goes on. No rank may take another call's data for that
    call's, and all get an error: rank 1 that of its timeout."""
    from fake_device import control

    tensor = torch.full((100,), float(me.rank + 1))
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    assert tensor.tolist() == [3.0] * 100
    if me.rank == 0:
        control.inject(call, number)
    kinds, values = [], set()
    for round in range(1, 6):
        tensor = torch.full((5000,), 10.0**round * (me.rank + 1))
        try:
            dist.all_reduce(tensor)
        except Exception as error:
            kinds.append(type(error).__name__)
            continue
        torch.accelerator.synchronize()
        values |= {(round, value) for value in tensor.unique().tolist()}
    whole = {(round, 3 * 10.0**round) for round in range(1, 6)}
    untouched = {(round, 10.0**round * (me.rank + 1)) for round in range(1, 6)}
    assert values <= whole | untouched, values
    assert kinds, "no call raised"
    if me.rank == 0:
        kind, text = raised(dist.all_reduce, tensor)
        assert kind == "DistBackendError", text
    return values & whole


@pytest.mark.parametrize(
    ("call", "number"),
    [("writeWord", 1), ("writeWord", 3), ("awaitWord", 1), ("awaitWord", 3), ("allocatePinned", 1)],
)
def test_a_call_that_cannot_be_enqueued(call, number):
    with crew("words", SIZE, timeout=3) as ranks:
        first, second = ranks.call(fails_once, call, number)
        ranks.broken = True
    assert first == second
