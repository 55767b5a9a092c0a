"""The device "fake" (tests/fake_device): it is as asynchronous as a GPU, and torch finds on it all
that it asks for. The tests run in another process: a device that is registered stays."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_device
import harness
import pytest
import torch
import torch.distributed as dist
from fake_device import building
from harness import raised, until

BODIES: dict[str, Callable[[], None]] = {}
control: Any = None  # the module, in the other process
GARBAGE = torch.full((4,), 0xDB, dtype=torch.uint8).view(torch.float32).item()
SIZE = 1024


def run_body(_: harness.Rank, name: str) -> None:
    """In the other process."""
    global control
    control = fake_device.register()
    BODIES[name]()


def held(stream: torch.Stream | None = None) -> Any:
    return control.held(stream)


def on_device(body: Callable[[], None]) -> Callable[..., None]:
    """Makes a test of a function that runs in the process with the device."""
    BODIES[body.__name__] = body

    def test(crews: Any) -> None:
        crews.get("fake", 1).call(run_body, body.__name__)

    test.__doc__ = body.__doc__
    return test


def on_own_device(body: Callable[[], None]) -> Callable[..., None]:
    """The same in a process of its own, which the device does not survive."""
    BODIES[body.__name__] = body

    def test() -> None:
        fake_device.build()
        harness.run_ranks(1, run_body, body.__name__, backend=None)

    test.__doc__ = body.__doc__
    return test


def zeros(*size: int, device: str = "fake") -> torch.Tensor:
    """They are there, not only enqueued."""
    made = torch.zeros(*(size or (SIZE,)), device=device)
    torch.accelerator.synchronize()
    return made


def here() -> torch.Stream:
    return torch.accelerator.current_stream()


def first(tensor: torch.Tensor) -> Any:
    """Its first element at the current stream's place."""
    return tensor.cpu().flatten()[0].item()


def is_asleep(thread: threading.Thread) -> bool:
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "S"


# ---- copies


@on_device
def test_a_copy_to_pinned_memory_arrives_later():
    host = torch.zeros(SIZE, pin_memory=True)
    there = zeros()
    with held():
        there.fill_(7)
        host.copy_(there, non_blocking=True)
        assert host[0] == 0
    torch.accelerator.synchronize()
    assert host[0] == 7


@on_device
def test_a_copy_from_pinned_memory_reads_it_later():
    host = torch.ones(SIZE, pin_memory=True)
    with held():
        there = host.to("fake", non_blocking=True)
        host.fill_(2)
    assert first(there) == 2


@on_device
def test_a_copy_that_blocks_is_over_when_it_returns():
    host, there = torch.zeros(SIZE, pin_memory=True), zeros()
    for step in range(1, 20):
        busy = [zeros(1 << 20).fill_(step) for _ in range(10)]
        there.fill_(step)
        host.copy_(there)
        assert host[0] == step
        busy[0].fill_(0)
        there.copy_(host)
        host.fill_(0)
        assert first(there) == step


@on_device
def test_a_copy_from_pageable_memory_is_over_when_it_returns():
    host = torch.ones(SIZE)
    there = host.to("fake", non_blocking=True)
    host.fill_(2)
    assert first(there) == 1


@on_device
def test_freed_pinned_memory_lasts_until_streams_have_passed():
    host = torch.ones(SIZE, pin_memory=True)
    with held():
        there = host.to("fake", non_blocking=True)
        del host
        others = [torch.zeros(SIZE, pin_memory=True) for _ in range(10)]
    assert first(there) == 1
    assert all(other.is_pinned() for other in others)
    assert not torch.zeros(SIZE).is_pinned()


@on_device
def test_copies_change_types_and_layouts():
    grid = torch.arange(12).view(3, 4)
    for host in (grid, grid.pin_memory()):
        for view in (host, host.t(), host[:, 1:3], host[1], host.expand(2, 3, 4)):
            there = view.to("fake", torch.float16, non_blocking=True)
            assert torch.equal(there.cpu(), view.half())
            back = torch.zeros(view.shape[::-1], dtype=torch.int32).permute(
                *reversed(range(view.dim()))
            )
            assert torch.equal(back.copy_(there), view.int())
            on_device = torch.zeros(view.shape, device="fake").copy_(there)
            assert torch.equal(on_device.cpu(), view.float())
    pair = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(pair.conj().to("fake").cpu(), pair.conj())
    assert torch.equal(pair.to("fake").conj().cpu(), pair.conj())
    assert torch.equal(pair.to("fake").conj().imag.cpu(), pair.conj().imag)
    tiny = torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn)
    assert torch.equal(tiny.to("fake").float().cpu(), tiny.float())


# ---- streams and events


@on_device
def test_a_side_stream_that_does_not_wait_reads_old_data():
    x, side = zeros(), torch.Stream(device="fake")
    with held():
        x.fill_(5)
        with side:
            assert first(x + x) == 0


@on_device
def test_a_side_stream_that_waits_reads_new_data():
    side = torch.Stream(device="fake")
    for wait in (
        lambda: side.wait_stream(here()),
        lambda: side.wait_event(here().record_event()),
        lambda: here().record_event().wait(side),
    ):
        x = zeros()
        with held():
            x.fill_(5)
            wait()
            with side:
                y = x + x
        with side:
            assert first(y) == 10


@on_device
def test_operations_on_the_cpu_wait_for_the_current_stream_alone():
    x, side = zeros(), torch.Stream(device="fake")
    with held():
        x.fill_(5)
        with side:
            assert torch.exp(x)[0].item() == 1
            assert x.sum() == 0
    assert x.sum() == 5 * SIZE


@on_device
def test_deferred_operations_run_at_their_place_in_the_stream():
    """The host waits only for those of which it has to know the data."""
    numbers = [3, -1, 2, 0]
    expected, x = torch.tensor(numbers), zeros(4).long()
    given = torch.tensor(numbers).pin_memory()
    with control.deferred():
        with held():
            x.copy_(given, non_blocking=True)
            rows = x.clamp(min=0)
            found = [rows[rows], (x >= 0).any(), torch.where(x < 0, rows, x), x.cumsum(0)]
            found += [torch.stack([x, rows]), torch.searchsorted(rows[:1], x)]
            written = torch.full_like(x, -7)
            written[rows] = x
            longer = torch.arange(6, device=x.device) % 4
        are_there = x.nonzero().flatten(), x[x > 0]
    rows = expected.clamp(min=0)
    same = [rows[rows], (expected >= 0).any(), torch.where(expected < 0, rows, expected)]
    same += [expected.cumsum(0), torch.stack([expected, rows])]
    same += [torch.searchsorted(rows[:1], expected)]
    for one, other in zip(found, same, strict=True):
        assert torch.equal(one.cpu(), other)
    assert written[2:].tolist() == [2, 3]
    assert longer.tolist() == [0, 1, 2, 3, 0, 1]
    assert [one.tolist() for one in are_there] == [[0, 1, 2], [3, 2]]


@on_device
def test_an_event_means_its_last_record():
    side, event = torch.Stream(device="fake"), torch.Event(device="fake")
    x = zeros()
    event.record()
    event.synchronize()
    assert event.query()
    with held():
        side.wait_event(event)  # the record before, so the side stream goes on
        event.record()
        assert not event.query()
        x.fill_(1)
        side.synchronize()
        assert side.query()
        assert not here().query()
    event.synchronize()
    assert event.query()


@on_device
def test_a_wait_means_the_record_before_it():
    x, side, other = zeros(), torch.Stream(device="fake"), torch.Stream(device="fake")
    event = here().record_event()
    side.wait_event(event)
    with held(other):
        event.record(other)
        with side:
            assert first(x) == 0


@on_device
def test_time_between_events():
    start, end = (torch.Event(device="fake", enable_timing=True) for _ in range(2))
    start.record()
    zeros()
    with held():
        end.record()
        assert "must be completed" in raised(start.elapsed_time, end)[1]
    end.synchronize()
    assert start.elapsed_time(end) > 0


@on_device
def test_streams_come_from_a_pool():
    streams = [torch.Stream(device="fake") for _ in range(9)]
    urgent = torch.Stream(device="fake", priority=-1)
    assert streams[8] == streams[0]
    assert len({stream.stream_id for stream in [*streams, urgent]}) == 9
    assert all(stream != here() for stream in streams)
    if hasattr(urgent, "native_handle"):
        assert len({stream.native_handle for stream in [*streams, urgent]}) == 9


@on_device
def test_the_current_stream_is_the_threads_own():
    side, seen = torch.Stream(device="fake"), []
    with side:
        thread = threading.Thread(target=lambda: seen.append(here()))
        thread.start()
        thread.join()
        assert here() == side
    assert seen == [torch.fake.default_stream()]
    assert here() == torch.fake.default_stream()


@on_device
def test_waits_release_pythons_lock():
    x, event = zeros(), torch.Event(device="fake")
    waits = (
        x.cpu,
        x[0].item,
        x.exp,
        here().synchronize,
        event.synchronize,
        torch.accelerator.synchronize,
        torch.fake.synchronize,
    )
    for wait in waits:
        thread = threading.Thread(target=wait)
        with held() as gate:
            event.record()
            thread.start()
            until(lambda thread=thread: is_asleep(thread), "the thread to wait")
            gate.open()
            thread.join(harness.DEADLINE)
            assert not thread.is_alive()


# ---- memory


@on_device
def test_memory_that_a_recorded_stream_uses_is_not_used_again():
    side = torch.Stream(device="fake")
    for is_recorded, expected in ((False, 4.0), (True, 2.0)):
        x = zeros(7777).fill_(1)  # a size of no other test, so the next tensor gets this memory
        here().synchronize()
        with held(side):
            with side:
                y = x + x
            if is_recorded:
                x.record_stream(side)
            del x
            other = torch.full((7777,), 2.0, device="fake")
            here().synchronize()
        with side:
            assert first(y) == expected
        del other


@on_device
def test_freed_memory_is_garbage_once_its_stream_allocates_again():
    side = torch.Stream(device="fake")
    for allocates, expected in ((False, 7), (True, GARBAGE)):
        x = zeros().fill_(7)
        here().synchronize()
        with held(side):
            with side:
                late = x + 0
            del x
            if allocates:
                other = torch.empty(3, device="fake")  # of another size
            here().synchronize()
        with side:
            assert first(late) == pytest.approx(expected)
    del other
    # The stream's own work before the end is done with right data.
    x = zeros().fill_(3)
    with held():
        y = x + 0
        del x
    assert first(y) == 3
    assert first(torch.empty(3, device="fake")) == pytest.approx(GARBAGE)


@on_device
def test_freed_memory_is_used_again_by_its_stream_at_once():
    side = torch.Stream(device="fake")
    x = zeros(12345)
    address = x.data_ptr()
    with held():
        del x
        with side:
            assert torch.empty(12345, device="fake").data_ptr() != address
        x = torch.empty(12345, device="fake")
        assert x.data_ptr() == address
    with held(side):
        x.record_stream(side)
        del x
        assert torch.empty(12345, device="fake").data_ptr() != address
    side.synchronize()
    assert address in [torch.empty(12345, device="fake").data_ptr() for _ in range(2)]


@on_device
def test_storages_change_their_size():
    x = torch.arange(4, device="fake")
    x.resize_(6)
    assert x[:4].tolist() == [0, 1, 2, 3]
    storage = x.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(48)
    x.copy_(torch.arange(6))
    view = torch.empty(0, dtype=torch.int64, device="fake").set_(storage, 1, (2,), (3,))
    assert view.tolist() == [1, 4]
    with held():
        y = torch.ones(2, device="fake")
        y.resize_(4)
    assert y[:2].tolist() == [1, 1]


@on_device
def test_memory_is_counted():
    torch.fake.empty_cache()
    before = torch.fake.memory_allocated()
    torch.fake.reset_peak_memory_stats()
    x = torch.empty(SIZE, device="fake")
    del x
    assert torch.fake.max_memory_allocated() == before + 4 * SIZE
    assert torch.fake.memory_allocated() == before
    assert torch.fake.memory_reserved() >= before + 4 * SIZE
    if hasattr(torch.accelerator, "max_memory_allocated"):
        assert torch.accelerator.max_memory_allocated() == torch.fake.max_memory_allocated()
        torch.accelerator.empty_cache()
    torch.fake.empty_cache()
    assert torch.fake.memory_reserved() >= before


@on_own_device
def test_memory_runs_out():
    x = torch.empty(100_000, device="fake")
    control.limit_memory(1_000_000)
    del x
    assert torch.empty(200_000, device="fake").numel() == 200_000  # the cache was given back
    kind, text = raised(torch.empty, 300_000, device="fake")
    assert kind == "OutOfMemoryError"
    assert "out of memory on device 0" in text


@on_own_device
def test_devices_fail():
    x = torch.ones(4, device="fake")
    control.inject("copy")
    assert "fake copy" in raised(x.cpu)[1]
    assert x.tolist() == [1] * 4
    host = torch.zeros(4, pin_memory=True)
    with held():
        host.copy_(x, non_blocking=True)
        control.lose_context()
    assert "context" in raised(torch.accelerator.synchronize)[1]
    assert "context" in raised(x.add, 1)[1]
    assert host.tolist() == [0] * 4
    del x, host  # does not fail


# ---- two devices


@on_device
def test_two_devices_have_streams_of_their_own():
    x, y = zeros(device="fake:0"), zeros(device="fake:1")
    with held():
        x.fill_(1)
        assert first(y.fill_(2)) == 2
    assert torch.accelerator.device_count() == 2
    assert "same device" in raised(lambda: x + y)[1]
    assert "same device" in raised(lambda: x + torch.ones(SIZE))[1]
    assert "no device 2" in raised(torch.ones, 1, device="fake:2")[1]


@on_device
def test_a_copy_between_devices_is_in_the_order_of_both():
    other = torch.fake.current_stream(1)
    for _ in range(20):  # a wait that is missing may still come to pass
        x, y = zeros(device="fake:0"), zeros(device="fake:1")
        other.synchronize()
        with held():
            x.fill_(1)
            y.copy_(x)
            y.add_(1)
            x.fill_(5)
            assert not other.query()
        assert first(y) == 2
        with held(other):
            seen = y + 0
            y.copy_(x)
            assert not here().query()
        assert (first(seen), first(y)) == (2, 5)


@on_device
def test_the_current_device():
    assert torch.accelerator.current_accelerator() == torch.device("fake")
    assert torch.empty(1, device="fake").device.index == 0
    with torch.fake.device(1):
        assert torch.empty(1, device="fake").device.index == torch.fake.current_device() == 1
        assert torch.fake.current_stream().device_index == 1
    with torch.fake.stream(torch.Stream(device="fake:1")) as side:
        assert torch.fake.current_device() == 1
        assert torch.fake.current_stream() == side
    torch.fake.set_device("fake:1")
    assert torch.accelerator.current_device_index() == 1
    torch.fake.set_device(0)


# ---- operations


@on_device
def test_arithmetic_is_the_cpus():
    a, b = torch.randn(3, 4), torch.randn(4)
    cases: list[Callable[[Any, Any], Any]] = [
        lambda x, y: x + y,
        lambda x, y: torch.add(x, y, alpha=3),
        lambda x, y: x - 2 * y,
        lambda x, y: 2 - x,
        lambda x, y: x.t() / 3,
        lambda x, y: x.int() / 2,
        lambda x, y: x.int() * 2.5,
        lambda x, y: x * torch.tensor(2.0, dtype=torch.float64),
        lambda x, y: x.bfloat16() + y,
        lambda x, y: x.clone().mul_(y).sub_(1).div_(3).add_(y, alpha=2),
        lambda x, y: torch.mul(x, y, out=torch.empty(0, device=x.device)),
        lambda x, y: torch.add(x[:, ::2], 1, out=x.clone()[:, 1:3]),
        lambda x, y: x.clone().fill_(y[0]).zero_(),
        lambda x, y: x > 0,
        lambda x, y: x @ x.t(),
        lambda x, y: torch.cat([x, x])[1:3].unfold(1, 2, 1),
        lambda x, y: x.view(2, 6).expand(2, 2, 6).reshape(-1),
        lambda x, y: torch.view_as_complex(x.view(6, 2)).conj() * 1j,
    ]
    for case in cases:
        expected = case(a, b)
        got = case(a.to("fake"), b.to("fake"))
        assert got.device.type == "fake"
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0)


@on_device
def test_a_scalar_of_the_host_has_its_value_of_the_call():
    x, two = zeros(), torch.tensor(2.0)
    with held():
        y = x + two
        two.fill_(3)
    assert first(y) == 2


@on_device
def test_mistakes_are_named_at_the_call():
    x = torch.ones(3, dtype=torch.int32, device="fake")
    with held():
        assert "can't be cast" in raised(x.add_, 1.5)[1]
        assert "size" in raised(lambda: x + torch.ones(4, device="fake"))[1]
        assert "broadcast" in raised(x.clone()[:1].add_, x)[1]
        assert "memory location" in raised(x[:1].expand(3).add_, 1)[1]
        assert "memory location" in raised(torch.add, x[:2], 1, out=x[1:])[1]
        assert "overflow" in raised(torch.full, (2,), 300, dtype=torch.uint8, device="fake")[1]
    assert x.tolist() == [1, 1, 1]
    tiny = torch.zeros(2, device="fake").to(torch.float8_e4m3fn)
    assert raised(lambda: tiny + tiny)[0] == "NotImplementedError"


# ---- training


def losses_on(device: str, optimizer: type[torch.optim.Optimizer], wrap: Any = lambda m: m) -> Any:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = wrap(model.to(device))
    steps = optimizer(model.parameters(), lr=0.05)
    seen = []
    for _ in range(5):
        x = torch.randn(4, 8).to(device)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
        seen.append(loss.item())
    return seen


@on_device
def test_a_model_trains_as_on_the_cpu():
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        expected = losses_on("cpu", optimizer)
        assert losses_on("fake", optimizer) == expected
        assert losses_on("fake:1", optimizer) == expected
        assert len(set(expected)) == len(expected)


@on_device
def test_backward_runs_on_the_streams_of_forward():
    side, seen = torch.Stream(device="fake"), []
    x = torch.ones(4, device="fake", requires_grad=True)
    side.wait_stream(here())
    with side:
        y = x * 3
        y.register_hook(lambda gradient: seen.append(here()))
        loss = (y * y).sum()
    loss.backward()
    assert seen == [side]
    assert x.grad.tolist() == [18] * 4


@on_device
def test_backward_waits_for_the_stream_of_the_gradient():
    x = torch.ones(SIZE, device="fake", requires_grad=True)
    y, gradient = x * 3, zeros()
    side = torch.Stream(device="fake")
    with held(side):
        side.wait_stream(here())
        with side:
            z = y * 1
            gradient.fill_(2)
        with side:
            z.backward(gradient)
    assert x.grad[0] == 6


@on_device
def test_checkpoints_of_activations():
    x = torch.ones(64, device="fake", requires_grad=True)

    def drop(t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(t * 2)

    y = torch.utils.checkpoint.checkpoint(drop, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@on_device
def test_random_numbers():
    torch.manual_seed(5)
    x = torch.randn(3, device="fake")
    state = torch.fake.get_rng_state()
    y = torch.randn(3, device="fake")
    torch.fake.set_rng_state(state)
    assert torch.equal(torch.randn(3, device="fake"), y)
    torch.manual_seed(5)
    assert torch.equal(torch.randn(3), x.cpu())
    assert not torch.equal(x, y)
    own = torch.Generator(device="fake").manual_seed(5)
    assert torch.equal(torch.randn(3, device="fake", generator=own), x)
    assert own.get_state().tolist() == torch.fake.get_rng_state().tolist()[:8] + [4] + [0] * 7
    assert sorted(torch.randperm(5, device="fake:1").tolist()) == [0, 1, 2, 3, 4]


@on_device
def test_mixed_precision():
    x = torch.ones(2, 2, device="fake")
    with torch.autocast("fake", dtype=torch.bfloat16):
        y = torch.nn.functional.linear(x, x)
        assert y.dtype == torch.bfloat16
        assert torch.nn.functional.mse_loss(y, y).dtype == torch.float32


@on_device
def test_tensors_are_saved():
    file = io.BytesIO()
    torch.save({"x": torch.arange(3, device="fake:1")}, file)
    for place, expected in ((None, "fake:1"), ("cpu", "cpu"), ("fake:0", "fake:0")):
        file.seek(0)
        x = torch.load(file, map_location=place)["x"]
        assert (x.tolist(), x.device) == ([0, 1, 2], torch.device(expected))


@on_device
def test_a_loader_pins_its_batches():
    loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2, pin_memory=True)
    assert [batch.is_pinned() for batch in loader] == [True, True]


# ---- graphs


@on_device
def test_recorded_work_runs_when_it_is_replayed():
    side, x = torch.Stream(device="fake"), zeros()
    with control.recorded(side) as graph:
        y = (x + 1) * 2  # the sum is freed in between
        x.add_(1)
    torch.accelerator.synchronize()
    assert first(x) == 0
    others = [torch.ones(SIZE, device="fake") for _ in range(4)]
    graph.replay()
    graph.replay()
    assert (first(x), first(y)) == (2, 4)
    with side:
        others += [torch.ones(SIZE, device="fake") for _ in range(4)]
    torch.accelerator.synchronize()
    graph.replay()
    assert (first(x), first(y)) == (3, 6)
    assert all(first(other) == 1 for other in others)  # the graph has memory of its own


# ---- torch's wrappers


class Alone(dist.ProcessGroup):
    """A group of one rank, whose operations are copies on a stream of its own."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.stream = torch.Stream(device="fake")

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802
        return "alone"

    def copies(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        self.stream.wait_stream(here())
        with self.stream:
            for output, given in zip(outputs, inputs, strict=True):
                output.copy_(given.clone())
                output.record_stream(self.stream)
                given.record_stream(self.stream)
            future = torch.futures.Future(devices=[outputs[0].device])
            future.set_result(outputs)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        return self.copies(tensors, tensors)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        return self.copies(tensors, tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return self.copies([parts[0] for parts in outputs], inputs)

    def scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return self.copies(outputs, [parts[0] for parts in inputs])

    def _allgather_base(self, output: Any, given: Any, options: Any = None) -> Any:
        return self.copies([output], [given])

    def _reduce_scatter_base(self, output: Any, given: Any, options: Any = None) -> Any:
        return self.copies([output], [given])


needs_functional = pytest.mark.skipif(
    torch.__version__.startswith("2.8."),
    reason="torch 2.8 has functional collectives for the CPU and CUDA alone",
)


def in_group(body: Callable[[], None]) -> None:
    dist.Backend.register_backend("alone", lambda *_: Alone(), devices=["fake"])
    dist.init_process_group("alone", store=dist.HashStore(), rank=0, world_size=1)
    try:
        body()
    finally:
        dist.destroy_process_group()


@on_own_device
def test_ddp():
    from torch.nn.parallel import DistributedDataParallel

    def body() -> None:
        expected = losses_on("cpu", torch.optim.SGD)
        assert losses_on("fake", torch.optim.SGD, DistributedDataParallel) == expected

    in_group(body)


@needs_functional
@on_own_device
def test_fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def shard(model: torch.nn.Module) -> torch.nn.Module:
        mesh = init_device_mesh("fake", (1,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        return model

    def body() -> None:
        for optimizer in (torch.optim.SGD, torch.optim.AdamW):
            assert losses_on("fake", optimizer, shard) == losses_on("cpu", optimizer)

    in_group(body)


@needs_functional
@on_own_device
def test_dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor, randn

    def body() -> None:
        mesh = init_device_mesh("fake", (1,))
        x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        assert (x + x).full_tensor().tolist() == [[0, 2], [4, 6], [8, 10], [12, 14]]
        drawn = [randn(4, 2, device_mesh=mesh, placements=[Shard(0)]) for _ in range(2)]
        assert not torch.equal(drawn[0].full_tensor(), drawn[1].full_tensor())

    in_group(body)


@on_device
def test_the_module_has_the_names_that_torch_uses():
    names = """_is_in_bad_fork _lazy_init Event Stream current_device current_stream
    default_stream device device_count empty_cache get_amp_supported_dtype get_rng_state
    is_available is_bf16_supported is_initialized manual_seed manual_seed_all max_memory_allocated
    memory_stats set_device set_rng_state set_stream stream synchronize"""
    assert not [name for name in names.split() if not hasattr(torch.fake, name)]
    assert torch.get_device_module("fake") is torch.fake
    stream, event = torch.fake.Stream(device=1, priority=-1), torch.fake.Event(enable_timing=True)
    event.record(stream)
    torch.fake.synchronize(1)
    assert event.query()
    assert stream.device == torch.device("fake:1")


# ---- the build


def test_one_process_builds_for_all(tmp_path, monkeypatch):
    built = []

    def compile_into(folder: Path, library: Path) -> None:
        built.append(library)
        library.touch()

    monkeypatch.setattr(building, "ROOT", tmp_path)
    monkeypatch.setattr(building, "HEADERS", ())
    monkeypatch.setattr(building, "compile_into", compile_into)
    threads = [threading.Thread(target=fake_device.build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    monkeypatch.setattr(building, "key", lambda: "other")
    assert fake_device.build().name == "_fake_device.other.so"
    assert not built[0].exists()
