"""Dispatch and combine of device tensors: their streams, and their ends when something fails. What
they compute is in the suites that run on layout `device`."""

from __future__ import annotations

import signal
from datetime import timedelta

import devices
import ep_crew
import harness
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from ep_crew import check_combine, check_dispatch, my_answers
from harness import raised

from mooncake.ep import Buffer, EventHandle, EventOverlap, reference

SIZE, TOKENS, HIDDEN, TOPK, EXPERTS = 3, 8, 256, 3, 6
OWNERS = reference.default_owners(EXPERTS, SIZE)
COUNTS = [8, 3, 0]
SHARED = {"MOONCAKE_TRANSPORTS": "shm", devices.VARIABLE: DEVICE}
# Without words, a plain call and the waits wait on the host.
FORMS = ["words", "host", "kernels"]
HOOK, EVENT = {"return_recv_hook": True}, {"async_finish": True}


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


def crew(form, size=SIZE, **options):
    devices.prepare(DEVICE)
    env = {
        **SHARED,
        "MOONCAKE_EP_STREAM_WORDS": str(int(form != "host")),
        "MOONCAKE_EP_KERNELS": str(int(form == "kernels")),
        **options.pop("env", {}),
    }
    if form == "words":
        devices.skip_without_queues(env)
    return harness.Crew(size, env=env, **options)


def held(stream=None):
    from fake_device import control

    return control.held(stream)


def inputs(seed):
    return ep_crew.inputs(seed, COUNTS, HIDDEN, TOPK, EXPERTS)


def made_late(given):
    """Copies that the current stream fills when it comes to them. Their memory has other contents
    before, which are no experts."""
    found = {}
    for name, tensor in vars(given).items():
        found[name] = torch.full_like(tensor, 99)
        source = tensor.cpu().pin_memory()
        torch.accelerator.synchronize()
        found[name].source = source
    return found


def fill(late):
    for tensor in late.values():
        tensor.copy_(tensor.source, non_blocking=True)


def finish(event, hook):
    hook() if hook is not None else event.current_stream_wait()


# ---- streams


@devices.on_fake_only
def late_inputs(me, is_host, how):
    """The inputs are written after the call, by the stream that the call was made on. The call
    returns before that, and with words so does the wait."""
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    for seed in (1, 2):
        given = inputs(seed)
        late = made_late(given[me.rank])
        with held() as gate:
            fill(late)
            found = buffer.low_latency_dispatch(
                late["x"], late["topk_idx"], TOKENS, EXPERTS, use_fp8=bool(seed % 2), **how
            )
            if is_host:
                gate.open()
            finish(*found[3:])
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, use_fp8=bool(seed % 2))
        answers = my_answers(me, rows, OWNERS)
        source = answers.cpu().pin_memory()
        answers.fill_(-7)
        torch.accelerator.synchronize()
        late = made_late(given[me.rank])
        with held() as gate:
            answers.copy_(source, non_blocking=True)
            fill(late)
            combined, event, hook = buffer.low_latency_combine(
                answers, late["topk_idx"], late["weights"], found[2], **how
            )
            if is_host:
                gate.open()
            finish(event, hook)
            result, missing = combined.clone(), buffer.missing_contributions.clone()
        check_combine(me, result, missing, given, TOKENS, EXPERTS, use_fp8=bool(seed % 2))
    buffer.destroy()


@pytest.mark.parametrize("how", [HOOK, EVENT], ids=["hook", "event"])
def test_inputs_that_come_late(form, how):
    with crew(form) as ranks:
        ranks.call(late_inputs, form == "host", how)


@devices.on_fake_only
def plain_calls_do_not_wait(me):
    """With words, no call waits on the host for a stream or for other ranks."""
    buffer = ep_crew.mooncake_buffer(TOKENS, HIDDEN, EXPERTS)
    given = inputs(3)
    mine = given[me.rank]
    active = torch.ones(SIZE, dtype=torch.int32)
    torch.accelerator.synchronize()
    with held():
        found = buffer.dispatch(mine.x, mine.topk_idx, active, TOKENS, EXPERTS, -1, use_fp8=False)
        combined = buffer.combine(
            found[0], mine.topk_idx, mine.weights, active, -1, found[2], zero_copy=False
        )[0].clone()
    check_dispatch(me, found, given, TOKENS, EXPERTS, use_fp8=False)
    expected = mine.x.cpu() * mine.weights.masked_fill(mine.topk_idx < 0, 0).sum(1, True).cpu()
    torch.testing.assert_close(combined.cpu().float(), expected.float(), rtol=0.05, atol=0.05)


def test_plain_calls_do_not_wait_on_the_host():
    with crew("words") as ranks:
        ranks.call(plain_calls_do_not_wait)


def copies_of_rows(me, kernels):
    """A kernel copies the used rows of recv_x, of its scales and of x. Without kernels all rows are
    copied, and the results are the same."""
    from fake_device import control

    if not kernels:
        control.inject("prepareKernels", code="unsupported")
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    given = inputs(12)
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS, use_fp8=True)
    before = control.kernels_run()
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS, use_fp8=True)
    assert control.kernels_run() - before == 3 * kernels
    buffer.destroy()


@pytest.mark.parametrize("kernels", [False, True])
def test_used_rows_are_copied(kernels):
    with crew("words") as ranks:
        ranks.call(copies_of_rows, kernels)


def results_come_before_later_work(me, how):
    """The stream that waits has the last row that was copied. Nothing else waits for that."""
    tokens, hidden = 256, 8192  # copies of milliseconds
    given = ep_crew.inputs(4, [tokens] * SIZE, hidden, 1, SIZE)
    mine = given[me.rank]
    for one in given:
        one.topk_idx.zero_()
    buffer = ep_crew.deepep_buffer(tokens, hidden, SIZE)
    for _ in range(3):
        found = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, tokens, SIZE, use_fp8=False, **how
        )
        finish(*found[3:])
        last = found[0][0, -1].clone()
        out = torch.full_like(mine.x, -7.0)
        _, event, hook = buffer.low_latency_combine(
            found[0], mine.topk_idx, mine.weights, found[2], out=out, **how
        )
        finish(event, hook)
        end = out[-1].clone()
        if me.rank == 0:
            assert torch.equal(last.cpu(), given[-1].x[-1].cpu())
        expected = mine.x[-1].float() * mine.weights[-1].float()
        torch.testing.assert_close(end.cpu(), expected.bfloat16().cpu(), rtol=0.01, atol=0.01)
    buffer.destroy()


@pytest.mark.ci
@pytest.mark.parametrize("how", [{}, HOOK, EVENT], ids=["plain", "hook", "event"])
def test_results_come_before_later_work(form, how):
    with crew(form) as ranks:
        ranks.call(results_come_before_later_work, how)


@devices.on_fake_only
def held_copies(me):
    """The stream of the copies is held: only streams that wait for it see no old contents."""
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    given = inputs(5)
    mine = given[me.rank]
    other = torch.Stream(device=torch.accelerator.current_accelerator())
    stats = torch.full((len(OWNERS) // SIZE,), 100, dtype=torch.int32)
    torch.accelerator.synchronize()
    dist.barrier()
    with held(buffer.get_comm_stream()):
        found = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, TOKENS, EXPERTS, stats, use_fp8=False, return_recv_hook=True
        )
        with other:
            early = stats.clone()
        other.synchronize()
        found[4]()
        late = stats.clone()
    assert early.tolist() == [100] * len(early)
    assert late.tolist() == [100 + count for count in found[1].tolist()]
    check_dispatch(me, found, given, TOKENS, EXPERTS, use_fp8=False)
    buffer.destroy()


def test_copies_have_a_stream_of_their_own():
    with crew("words") as ranks:
        ranks.call(held_copies)


@devices.on_fake_only
def masks_in_order(me):
    """The masks are written where the current stream is, after its earlier work, and no call waits
    for that."""
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    nines = torch.full((SIZE,), 9, dtype=torch.int32, device="cpu").pin_memory()
    status = torch.zeros(SIZE, dtype=torch.int32)
    torch.accelerator.synchronize()
    if me.rank == 0:
        buffer.low_latency_update_mask_buffer(2, True)
    with held():
        status.copy_(nines, non_blocking=True)
        buffer.low_latency_query_mask_buffer(status)
        seen = status.clone()
    assert seen.tolist() == [0, 0, int(me.rank == 0)]
    kind, text = raised(buffer.low_latency_query_mask_buffer, status.long())
    assert (kind, "int32" in text) == ("ValueError", True), text
    buffer.destroy()


@pytest.mark.ci
def test_masks_in_the_order_of_the_stream(form):
    with crew(form) as ranks:
        ranks.call(masks_in_order)


def side_streams(me, how):
    """Two micro-batches, each on a stream of its own; statistics are added for both."""
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    streams = [torch.Stream(device=torch.accelerator.current_accelerator()) for _ in range(2)]
    stats = torch.zeros(len(OWNERS) // SIZE, dtype=torch.int32)
    counts = torch.zeros(len(OWNERS) // SIZE, dtype=torch.int64, device="cpu")
    torch.accelerator.synchronize()
    for round in range(4):
        batches, found = [inputs(10 * round + i) for i in range(2)], []
        for stream, given in zip(streams, batches, strict=True):
            late = made_late(given[me.rank])
            with stream:
                fill(late)
                found.append(
                    buffer.low_latency_dispatch(
                        late["x"], late["topk_idx"], TOKENS, EXPERTS, stats, use_fp8=False, **how
                    )
                )
        for stream, given, one in zip(streams, batches, found, strict=True):
            with stream:
                finish(*one[3:])
                rows = check_dispatch(me, one, given, TOKENS, EXPERTS, use_fp8=False)
                counts += one[1].cpu()
                combined, event, hook = buffer.low_latency_combine(
                    my_answers(me, rows, OWNERS), given[me.rank].topk_idx, given[me.rank].weights,
                    one[2], **how,
                )  # fmt: skip
                finish(event, hook)
                missing = buffer.missing_contributions
                check_combine(me, combined, missing, given, TOKENS, EXPERTS)
    torch.accelerator.synchronize()
    assert stats.tolist() == counts.tolist()
    buffer.destroy()


@pytest.mark.ci
@pytest.mark.parametrize("how", [HOOK, EVENT], ids=["hook", "event"])
def test_side_streams(form, how):
    with crew(form) as ranks:
        ranks.call(side_streams, how)


def dropped_tensors(me):
    """Tensors of calls under way outlive the caller's references."""
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    for round in range(20):
        given = inputs(round)
        late = made_late(given[me.rank])
        fill(late)
        found = buffer.low_latency_dispatch(
            late["x"], late["topk_idx"], TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
        )
        shape = late["x"].shape
        del late
        torch.full(shape, -1.0, dtype=torch.bfloat16)  # in the memory of x, were that free
        found[4]()
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, use_fp8=False)
        mine = given[me.rank]
        answers = my_answers(me, rows, OWNERS)
        combined, event, hook = buffer.low_latency_combine(
            answers, mine.topk_idx.clone(), mine.weights.clone(), found[2], return_recv_hook=True
        )
        shape = answers.shape
        del answers
        torch.full(shape, -1.0, dtype=torch.bfloat16)
        hook()
        kept = combined.clone()
        del combined
        # No late copy of results lands in memory that is used again.
        fresh = [torch.full(mine.x.shape, float(round), dtype=torch.bfloat16) for _ in range(4)]
        check_combine(me, kept, event.missing_contributions, given, TOKENS, EXPERTS)
        for one in fresh:
            assert (one.cpu() == round).all()
    buffer.destroy()


@pytest.mark.ci
def test_dropped_tensors(form):
    with crew(form) as ranks:
        ranks.call(dropped_tensors)


def dropped_results(me):
    """The memory of results that are dropped at once is not used again before the copies into it
    are over, even if only another stream than the caller's waits for these."""
    tokens, hidden = 256, 8192  # copies of milliseconds
    given = ep_crew.inputs(4, [tokens] * SIZE, hidden, 1, SIZE)
    for one in given:
        one.topk_idx.zero_()
    mine = given[me.rank]
    buffer = ep_crew.deepep_buffer(tokens, hidden, SIZE)
    side = torch.Stream(device=torch.accelerator.current_accelerator())
    for round in range(5):
        found = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, tokens, SIZE, use_fp8=False, **HOOK
        )
        with side:
            found[4]()
        shape = found[0].shape
        del found
        fresh = torch.full(shape, float(round), dtype=torch.bfloat16)
        torch.accelerator.synchronize()
        assert (fresh.cpu() == round).all()
    buffer.destroy()


@pytest.mark.ci
def test_dropped_results(form):
    with crew(form) as ranks:
        ranks.call(dropped_results)


@devices.on_fake_only
def zero_copy(me, is_host):
    """Rows are written late, into the tensor of get_next_low_latency_combine_buffer()."""
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    for seed in (1, 2):
        given = inputs(seed)
        mine = given[me.rank]
        found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False)
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, use_fp8=False)
        answers = my_answers(me, rows, OWNERS)
        source, ignored = answers.cpu().pin_memory(), torch.empty_like(answers)
        torch.accelerator.synchronize()
        with held() as gate:
            buffer.get_next_low_latency_combine_buffer(found[2]).copy_(source, non_blocking=True)
            combined, _, hook = buffer.low_latency_combine(
                ignored, mine.topk_idx, mine.weights, found[2], zero_copy=True,
                return_recv_hook=True,
            )  # fmt: skip
            if is_host:
                gate.open()
            hook()
        check_combine(me, combined, buffer.missing_contributions, given, TOKENS, EXPERTS)
    given = (ignored, mine.topk_idx, mine.weights, found[2])
    kind, text = raised(buffer.low_latency_combine, *given, zero_copy=True)
    assert (kind, "get_next_combine_buffer" in text) == ("ValueError", True), text
    buffer.destroy()


@pytest.mark.ci
def test_zero_copy(form):
    with crew(form) as ranks:
        ranks.call(zero_copy, form == "host")


@devices.on_fake_only
def events(me):
    """capture() notes the place of the current stream; other streams wait for that."""
    source = torch.ones(1000, device="cpu").pin_memory()
    tensor = torch.zeros(1000)
    side = torch.Stream(device=torch.accelerator.current_accelerator())
    torch.accelerator.synchronize()
    with held():
        tensor.copy_(source, non_blocking=True)
        event = Buffer.capture()
        with side:
            event.current_stream_wait()
            seen = tensor.clone()
    side.synchronize()
    assert seen.tolist() == [1.0] * 1000
    with held() as gate:
        tensor.zero_()
        handle = EventHandle()
        gate.open()
        EventOverlap(handle).event.synchronize()
    # And those of a call.
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    given = inputs(6)
    mine = given[me.rank]
    found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, **EVENT)
    found[3].event.synchronize()
    with side:  # waits for nothing more
        check_dispatch(me, found, given, TOKENS, EXPERTS, use_fp8=True)
    stream = buffer.get_comm_stream()
    assert stream.device == torch.get_default_device()
    assert stream != torch.accelerator.current_stream()
    buffer.destroy()


@pytest.mark.ci
def test_events(form):
    with crew(form) as ranks:
        ranks.call(events)


# ---- what is refused, and errors


@devices.on_fake_only
def refused(me, records):
    from fake_device import control

    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    given = inputs(7)
    mine = given[me.rank]
    there = torch.device("fake", 1 - torch.accelerator.current_device_index())
    for wrong in ("cpu", there):
        for name in ("x", "topk_idx"):
            arguments = {"x": mine.x, "topk_idx": mine.topk_idx}
            arguments[name] = arguments[name].to(wrong)
            kind, text = raised(buffer.low_latency_dispatch, *arguments.values(), TOKENS, EXPERTS)
            assert (kind, "one device" in text) == ("ValueError", True), text
    found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False)
    parts = found[0], mine.topk_idx, mine.weights
    kind, text = raised(buffer.low_latency_combine, *(one.cpu() for one in parts), found[2])
    assert (kind, "one device" in text) == ("ValueError", True), text
    if records:
        with control.recorded(torch.Stream(device=torch.accelerator.current_accelerator())):
            kind, text = raised(buffer.low_latency_dispatch, mine.x, mine.topk_idx, TOKENS, EXPERTS)
        assert kind == "NotImplementedError", text
        assert "recorded into a graph" in text
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    buffer.destroy()


def test_refused(form):
    with crew(form) as ranks:
        ranks.call(refused, form != "kernels")


def wrong_values(me, is_host):
    """An expert that does not exist, on one rank: an error on all. Without words the buffer goes
    on."""
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    given = inputs(8)
    mine = given[me.rank]
    topk_idx = mine.topk_idx.clone()
    if me.rank == 1:
        topk_idx[2, 1] = EXPERTS
    found = buffer.low_latency_dispatch(mine.x, topk_idx, TOKENS, EXPERTS, **EVENT)
    kind, text = raised(found[3].event.synchronize)
    assert kind == "ValueError", text
    assert f"token 2 chooses expert {EXPERTS} of {EXPERTS}" in text
    if is_host:
        ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    else:
        kind, text = raised(buffer.low_latency_dispatch, mine.x, mine.topk_idx, TOKENS, EXPERTS)
        assert (kind, "chooses expert" in text) == ("ValueError", True), text
    torch.accelerator.synchronize()
    buffer.destroy()


# By kernels: tests/test_ep_kernels.py.
@pytest.mark.ci
@pytest.mark.parametrize("form", FORMS[:2], indirect=True)
def test_wrong_values(form):
    with crew(form) as ranks:
        ranks.call(wrong_values, form == "host")


@devices.on_fake_only
def stuck_stream(me):
    """One rank's stream does not come to the call in time: an error on all that names it."""
    limit = timedelta(seconds=0.5) if me.rank == 1 else None
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS, timeout=limit)
    given = inputs(9)
    mine = given[me.rank]
    torch.accelerator.synchronize()
    with held() as gate:
        found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, **EVENT)
        if me.rank != 1:
            gate.open()
        kind, text = raised(found[3].event.synchronize)
    assert kind == "DistBackendError", text
    assert "fake:1 on rank 1 has not come to the operation after 500 ms" in text
    torch.accelerator.synchronize()
    buffer.destroy()


@pytest.mark.ci
@pytest.mark.parametrize("form", FORMS[:2], indirect=True)
def test_a_stream_that_hangs_is_named(form):
    with crew(form) as ranks:
        ranks.call(stuck_stream)


# ---- losses


def killed_anywhere(me, how):
    """Each operation is one with the victim or one without it, the same on all survivors. The
    device's mask and the host's show the loss."""
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    everybody, seen, after = list(range(SIZE)), [], 0
    without = [rank for rank in everybody if rank != 1]
    me.board.set(f"running-{me.rank}")
    while after < 3:
        given = inputs(len(seen) % 7)
        mine = given[me.rank]
        active = torch.ones(SIZE, dtype=torch.int32)
        found = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False, active_ranks=active, **how
        )
        finish(*found[3:])
        first = [rank for rank in everybody if active.tolist()[rank]]
        rows = check_dispatch(me, found, given, TOKENS, EXPERTS, active=first, use_fp8=False)
        combined, event, hook = buffer.low_latency_combine(
            my_answers(me, rows, OWNERS), mine.topk_idx, mine.weights, found[2],
            active_ranks=active, **how,
        )  # fmt: skip
        finish(event, hook)
        then = [rank for rank in everybody if active.tolist()[rank]]
        check_combine(
            me, combined, event.missing_contributions, given, TOKENS, EXPERTS, active=first,
            still_active=then,
        )  # fmt: skip
        seen.append((first, then))
        after += first == then == without
    assert buffer.runtime.active_ranks == [rank in without for rank in everybody]
    status = torch.full((SIZE,), 9, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(rank not in without) for rank in everybody]
    buffer.destroy()
    return [step for step in seen if step != (everybody, everybody)], len(seen)


@pytest.mark.ci
@pytest.mark.parametrize("how", [{}, HOOK, EVENT], ids=["plain", "hook", "event"])
def test_killed_anywhere(form, how):
    with crew(form) as ranks:
        ranks.start(killed_anywhere, how)
        ranks.board.wait_all("running", range(SIZE))
        ranks.signal(1, signal.SIGKILL)
        first, _, last = ranks.results(dead=[1])
        ranks.broken = True
    assert first == last


def killed_under_way(me):
    """The victim dies after the others have called, and before it calls: their streams go on."""
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
    given = inputs(10)
    mine = given[me.rank]
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    if me.rank == 1:
        me.board.wait_all("called", [0, 2])
        signal.raise_signal(signal.SIGKILL)
    active = torch.ones(SIZE, dtype=torch.int32)
    found = buffer.low_latency_dispatch(
        mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False, active_ranks=active, **HOOK
    )
    me.board.set(f"called-{me.rank}")
    found[4]()
    shown = active.clone()
    check_dispatch(me, found, given, TOKENS, EXPERTS, active=[0, 2], use_fp8=False)
    assert shown.tolist() == [1, 0, 1]
    buffer.destroy()


def test_killed_under_way(form):
    with crew(form) as ranks:
        ranks.start(killed_under_way)
        ranks.results(dead=[1])
        ranks.broken = True


def loss_in_mode_raise(me):
    """The call that sees it raises, on the host, and leaves the outputs as they were."""
    buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS, on_failure="raise")
    given = inputs(11)
    mine = given[me.rank]
    found = buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False)
    rows = check_dispatch(me, found, given, TOKENS, EXPERTS, use_fp8=False)
    dist.barrier()
    if me.rank == 1:
        signal.raise_signal(signal.SIGKILL)
    out = torch.full_like(mine.x, -7.0)
    active = torch.ones(SIZE, dtype=torch.int32)
    answers = my_answers(me, rows, OWNERS)
    kind, text = raised(
        buffer.low_latency_combine, answers, mine.topk_idx, mine.weights, found[2], out=out,
        active_ranks=active,
    )  # fmt: skip
    assert kind == "PeerLostError", text
    assert (out.cpu() == -7.0).all()
    assert active.tolist() == [1] * SIZE
    combined, event, _ = buffer.low_latency_combine(
        answers, mine.topk_idx, mine.weights, found[2], out=out
    )
    check_combine(
        me, combined, event.missing_contributions, given, TOKENS, EXPERTS, still_active=[0, 2]
    )
    buffer.destroy()


@pytest.mark.ci
def test_a_loss_is_raised(form):
    with crew(form) as ranks:
        ranks.start(loss_in_mode_raise)
        ranks.results(dead=[1])
        ranks.broken = True


# ---- when not waited for


def destroyed_under_way(me):
    """The buffer is destroyed while its calls are under way."""
    for round in range(5):
        buffer = ep_crew.deepep_buffer(TOKENS, HIDDEN, EXPERTS)
        given = inputs(round)
        mine = given[me.rank]
        found = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, TOKENS, EXPERTS, use_fp8=False, **HOOK
        )
        if round % 2:
            buffer.destroy()
            found[4]()
            check_dispatch(me, found, given, TOKENS, EXPERTS, use_fp8=False)
        else:
            del buffer, found
    torch.accelerator.synchronize()


@pytest.mark.ci
def test_destroyed_under_way(form):
    with crew(form) as ranks:
        ranks.call(destroyed_under_way)
