"""set_transfer_engine(): process groups and Buffers on a program's own engine."""

from __future__ import annotations

import engines
import harness
import pytest
import torch
import torch.distributed as dist
from engines import BYTES, pattern
from harness import raised

KEY = "a key that all ranks of the job have"


@pytest.fixture(params=engines.WIRES)
def env(request):
    return {"MOONCAKE_TRANSPORTS": request.param, "MOONCAKE_JOB_KEY": KEY}


def transfers(me, side):
    """Every rank reads the next one's memory, which is there until it has been read."""
    me.board.set(f"at-{me.rank}-{transfers.turn}", (side.session, side.address))
    target, there = me.board.wait(f"at-{(me.rank + 1) % me.size}-{transfers.turn}")
    taken = side.engine.allocate_managed_buffer(BYTES)
    assert side.engine.transfer_sync_read(target, taken, there, BYTES) == 0
    got = side.engine.read_bytes_from_buffer(taken, BYTES)
    assert got == pattern(BYTES, (me.rank + 1) % me.size).tobytes()
    assert side.engine.free_managed_buffer(taken, BYTES) == 0
    me.board.set(f"read-{me.rank}-{transfers.turn}")
    me.board.wait(f"read-{(me.rank - 1) % me.size}-{transfers.turn}")
    transfers.turn += 1


transfers.turn = 0


def job_on_an_engine(me):
    from mooncake import pg

    side = engines.make()
    side.fill(me.rank)
    transfers(me, side)
    pg.set_transfer_engine(side.engine)
    for turn in range(2):
        me.init(name=f"store-{turn}")
        for count in (4, 100_000):
            total = torch.full((count,), float(me.rank))
            dist.all_reduce(total)
            assert (total == sum(range(me.size))).all()
        transfers(me, side)
        assert "another group" in raised(second_group, me)[1]
        child = dist.new_group([0, 1])
        if me.rank < 2:
            dist.all_reduce(total, group=child)
        dist.destroy_process_group()
        del child
        # The engine is as it was.
        transfers(me, side)
    pg.set_transfer_engine(None)
    me.init(name="store-own")
    dist.barrier()
    transfers(me, side)


def second_group(me):
    from mooncake_backend import extension
    from mooncake_backend.options import MooncakeBackendOptions

    return extension.load().create_backend(
        dist.HashStore(), 0, 1, [0], "second", harness.timedelta(seconds=5), "mooncake",
        MooncakeBackendOptions().for_group(1), None,
    )  # fmt: skip


def test_a_job_on_an_engine(env):
    harness.run_ranks(3, job_on_an_engine, env=env, backend=None)


def buffer_over_gloo(me):
    from mooncake import pg
    from mooncake.mooncake_ep_buffer import Buffer

    side = engines.make()
    side.fill(me.rank)
    pg.set_transfer_engine(side.engine.get_engine())
    me.init(backend="gloo")
    size = Buffer.get_ep_buffer_size_hint(8, 64, me.size, me.size)
    buffer = Buffer(dist.group.WORLD, size)
    tokens = torch.full((4, 64), float(me.rank + 1), dtype=torch.bfloat16)
    chosen = torch.full((4, 1), (me.rank + 1) % me.size, dtype=torch.int64)
    active = torch.ones(me.size, dtype=torch.int32)
    received, counts, handle, *_ = buffer.dispatch(
        tokens, chosen, active, 8, me.size, -1, use_fp8=False
    )
    assert int(counts.sum()) == 4
    transfers(me, side)
    combined, *_ = buffer.combine(received, chosen, torch.ones(4, 1), active, -1, handle)
    assert torch.equal(combined, tokens)


def test_a_buffer_on_an_engine(env):
    harness.run_ranks(2, buffer_over_gloo, env=env, backend=None)


def without_a_key(me):
    from mooncake_backend import set_transfer_engine

    side = engines.make()
    return raised(set_transfer_engine, side.engine), raised(set_transfer_engine, object())


def test_an_engine_without_a_key_runs_no_job():
    ((refused, wrong),) = harness.run_ranks(1, without_a_key, backend=None)
    assert refused[0] == "ValueError"
    assert "MOONCAKE_JOB_KEY" in refused[1]
    assert wrong[0] == "TypeError"
