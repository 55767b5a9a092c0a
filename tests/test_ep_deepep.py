"""Programs that import deep_ep, and what they find."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref

import harness
import pytest
import torch

from mooncake.ep import Buffer, Config, EventHandle, EventOverlap, fp8
from mooncake.ep.on_path.deep_ep.utils import gate, math, semantic, testing
from mooncake_backend import extension

IMPORTS = """
import multiprocessing, subprocess, sys, deep_ep
import deep_ep.buffers, deep_ep.buffers.elastic, deep_ep.buffers.legacy, deep_ep.utils.event
from deep_ep.buffer import Buffer

def child(where):
    import deep_ep.utils.math
    from helper_of_program import here
    print(where, deep_ep.Buffer.__module__, here, flush=True)

if __name__ == "__main__":
    assert Buffer is deep_ep.Buffer is deep_ep.buffers.legacy.Buffer
    assert deep_ep.buffers.elastic.ElasticBuffer is deep_ep.ElasticBuffer
    assert deep_ep.buffers.elastic.EPHandle is deep_ep.EPHandle
    for name in ("EventHandle", "EventOverlap"):
        assert getattr(deep_ep.utils.event, name) is getattr(deep_ep, name)
    print(sys.argv)
    child("itself")
    for method in ("spawn", "fork", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=child, args=(method,))
        process.start()
        process.join()
        assert process.exitcode == 0
    subprocess.run([sys.executable, "-c", "import deep_ep; print('a program')"], check=True)
"""
SPAWNS = """
import sys, torch, torch.distributed as dist, deep_ep
from deep_ep.utils.envs import init_dist
from deep_ep.utils.math import calc_diff
from deep_ep.utils.testing import bench, bench_kineto

def loop(local_rank, num_local_ranks):
    rank, num_ranks, group = init_dist(local_rank, num_local_ranks)
    tokens, hidden, experts = 4, 256, 4
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, num_ranks, experts)
    buffer = deep_ep.Buffer(group, num_rdma_bytes=size, low_latency_mode=True,
                            num_qps_per_rank=experts // num_ranks, explicitly_destroy=True)
    x = torch.randn((tokens, hidden))
    assert x.dtype == torch.bfloat16
    topk_idx = torch.arange(tokens).view(-1, 1) % experts
    weights = torch.ones((tokens, 1), dtype=torch.float32)

    def both(hooked=False):
        recv_x, count, handle, event, hook = buffer.low_latency_dispatch(
            x, topk_idx, tokens, experts, use_fp8=False, return_recv_hook=hooked)
        hook() if hooked else event.current_stream_wait()
        combined, event, hook = buffer.low_latency_combine(
            recv_x.clone(), topk_idx, weights, handle, return_recv_hook=hooked)
        hook() if hooked else event.current_stream_wait()
        return combined

    assert calc_diff(both(), x) == 0
    mean, least, most = bench(both, num_warmups=2, num_tests=3)
    assert 0 < least <= mean <= most
    for hooked in (False, True):
        times = bench_kineto(lambda: both(hooked), ("dispatch", "combine"), num_tests=3,
                             barrier_comm_profiling=True, suppress_kineto_output=True,
                             num_kernels_per_period=2 if hooked else 1)
        flat = [t for pair in times for t in pair] if hooked else list(times)
        assert len(flat) == (4 if hooked else 2) and min(flat) > 0, times
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} of {num_ranks} is through\\n", end="", flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(loop, args=(int(sys.argv[1]),), nprocs=int(sys.argv[1]))
"""

ELASTIC = """
import sys, torch, torch.distributed as dist, deep_ep
from deep_ep.utils import gate, refs
from deep_ep.utils.envs import dist_print, init_dist, init_seed, get_global_seed, get_local_seed
from deep_ep.utils.math import align
from deep_ep.utils.testing import bench_kineto

def profile(buffer, call, names):
    return bench_kineto(call, names, num_tests=3, suppress_kineto_output=True,
                        barrier_comm_profiling=True, barrier=buffer.barrier)

def loop(local_rank, num_local_ranks):
    rank, num_ranks, group = init_dist(local_rank, num_local_ranks, seed=3)
    assert (get_global_seed(), get_local_seed()) == (3, 3 + rank)
    tokens, most, hidden, topk, experts = 20 + rank, 30, 256, 4, 8 * num_ranks
    for once in (False, True):
        buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=most, hidden=hidden,
                                       num_topk=topk, allow_multiple_reduction=not once)
        scores = gate.get_unbalanced_scores(tokens, experts, num_ranks, topk, 1.5, once)
        weights, topk_idx = scores.topk(topk, dim=1)
        x, bias = torch.randn(2, tokens, hidden).unbind()
        ref_x, ref_idx, ref_weights, ref_sources, ref_counts = refs.dispatch(
            x, topk_idx, weights, most, experts)
        recv_x, recv_idx, recv_weights, handle, _ = buffer.dispatch(
            x, topk_idx, weights, num_experts=experts)
        assert torch.equal(recv_x, ref_x) and torch.equal(recv_idx, ref_idx)
        assert torch.equal(recv_weights, ref_weights.masked_fill(ref_idx < 0, 0))
        assert torch.equal(handle.recv_src_metadata[:, 0], ref_sources)
        ends = handle.psum_num_recv_tokens_per_scaleup_rank
        assert torch.equal(ends, ref_counts.cumsum(0))
        _, _, recv_weights, handle, _ = buffer.dispatch(
            x, topk_idx, weights, num_experts=experts, do_expand=True, expert_alignment=4)
        y = refs.generate_pre_combine_data(ref_sources, most, topk, hidden)
        assert 0 < y.float().std()
        slots = handle.recv_src_metadata[:, 2:]
        rows = torch.zeros(handle.num_expanded_tokens, hidden)
        rows[slots[slots >= 0]] = y[slots >= 0]
        combined, _, _ = buffer.combine(rows, handle, bias=bias)
        own = torch.arange(tokens) + rank * most
        every = refs.generate_pre_combine_data(own, most, topk, hidden)
        levels = (False, False) if once else (True, False)
        expected = refs.combine(every, topk_idx, 1, num_ranks, experts, bias, *levels)
        assert torch.equal(combined, expected)
        kernels = ("dispatch_impl", "dispatch_copy_epilogue_impl")
        for sent in (dict(topk_idx=topk_idx, topk_weights=weights, num_experts=experts),
                     dict(topk_weights=weights, handle=handle, do_expand=True)):
            whole, copy = profile(buffer, lambda: buffer.dispatch(x, **sent), kernels)
            assert whole == copy > 0
        kernels = ("combine_impl", "combine_reduce_epilogue_impl")
        whole, copy = profile(buffer, lambda: buffer.combine(rows, handle), kernels)
        assert whole == copy > 0
        assert profile(buffer, lambda: [buffer.barrier() for _ in range(4)], "barrier") > 0
        buffer.destroy()
    dist_print(f"rank {rank} of {num_ranks} is through")
    dist_print("once", once_in_node=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(loop, args=(int(sys.argv[1]),), nprocs=int(sys.argv[1]))
"""


def run(folder, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "mooncake.ep.deepep", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=harness.DEADLINE,
    )


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "programs"
    home.mkdir()
    (home / "imports.py").write_text(IMPORTS)
    (home / "spawns.py").write_text(SPAWNS)
    (home / "elastic.py").write_text(ELASTIC)
    (home / "helper_of_program.py").write_text("here = 'with its neighbours'\n")
    return tmp_path


def test_a_program_and_its_children_find_deep_ep(folder):
    done = run(folder, "programs/imports.py", "--flag", "3")
    assert done.returncode == 0, done.stderr
    found = "mooncake_backend.ep.buffer with its neighbours"
    assert done.stdout.splitlines() == [
        "['programs/imports.py', '--flag', '3']",
        *(f"{where} {found}" for where in ("itself", "spawn", "fork", "forkserver")),
        "a program",
    ]


def test_a_module(folder):
    done = run(folder / "programs", "-m", "imports", "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("with its neighbours") == 4


@pytest.mark.parametrize("arguments", [[], ["-h"], ["-m"], ["no_such_program.py"]], ids=str)
def test_how_it_is_called(folder, arguments):
    done = run(folder, *arguments)
    assert done.returncode == 1
    assert "usage: python -m mooncake.ep.deepep" in done.stderr


def test_nothing_is_installed_as_deep_ep(tmp_path):
    code = "import importlib.util, mooncake.ep; print(importlib.util.find_spec('deep_ep'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "None\n", done.stderr


@pytest.mark.parametrize(("program", "more"), [("spawns", []), ("elastic", ["once"])])
def test_ranks_that_the_program_spawns(folder, program, more):
    if not hasattr(extension.load(), "EpBuffer"):
        pytest.skip("the extension has no EpBuffer")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    clean = dict.fromkeys(("WORLD_SIZE", "RANK"))
    environment = {key: value for key, value in os.environ.items() if key not in clean}
    done = subprocess.run(
        [sys.executable, "-m", "mooncake.ep.deepep", f"programs/{program}.py", "3"],
        cwd=folder, env={**environment, "MASTER_PORT": port}, capture_output=True, text=True,
        timeout=harness.DEADLINE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    through = [f"rank {r} of 3 is through" for r in range(3)]
    assert sorted(done.stdout.split()) == sorted(" ".join(more + through).split())


def test_calc_diff():
    x = torch.randn(8, 16)
    assert math.calc_diff(x, x) == 0
    assert math.calc_diff(torch.zeros(3), torch.zeros(3)) == 0
    a, b = x.double() + 1, 2 * x.double() + 1
    expected = 1 - 2 * (a * b).sum() / ((a * a).sum() + (b * b).sum())
    assert math.calc_diff(x, 2 * x) == pytest.approx(float(expected))
    assert math.calc_diff(torch.ones(4), torch.full((4,), -1.0)) == 1


@pytest.mark.parametrize("hidden", [1, 128, 130, 512])
def test_casts(hidden):
    x = torch.randn(5, hidden).bfloat16()
    values, scales = math.per_token_cast_to_fp8(x)
    assert scales.shape == (5, -(-hidden // 128))
    torch.testing.assert_close(math.per_token_cast_back(values, scales), x, rtol=0.07, atol=0.02)
    values, scales = fp8.cast_to_fp8(x, round_scale=True)
    packed = fp8.pack_ue8m0(scales)
    assert packed.shape == (5, -(-hidden // 512))
    back = math.per_token_cast_back(values, packed)
    assert torch.equal(back, math.per_token_cast_back(values, scales))
    assert (torch.log2(scales) % 1 == 0).all()
    assert math.per_token_cast_back(values[:0], scales[:0]).shape == (0, hidden)


def test_scales_are_the_least_powers_of_two_that_suffice():
    x = torch.tensor([[448.0, 449.0, 896.0, 1.0, 0.0]]).t().bfloat16()
    _, scales = fp8.cast_to_fp8(x, round_scale=True)
    assert scales.flatten().tolist() == [1.0, 1.0, 2.0, 2.0**-8, 2.0**-22]
    _, scales = fp8.cast_to_fp8(x)
    expected = x.float().clamp(min=1e-4) / 448
    assert torch.equal(scales, expected)


def test_sizes():
    assert (math.align(9, 4), math.align(8, 4), math.ceil_div(9, 4)) == (12, 8, 3)
    assert (math.safe_div(0, 0), math.safe_div(3, 2)) == (0, 1.5)
    with pytest.raises(ZeroDivisionError):
        math.safe_div(1, 0)
    pair = (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64))
    assert math.count_bytes(pair, None, [torch.zeros(5, dtype=torch.uint8)]) == 24 + 16 + 5


@pytest.mark.parametrize(("ratio", "precise"), [(1.0, False), (3.0, False), (3.0, True)])
def test_unbalanced_scores(ratio, precise):
    ranks, per_rank, topk = 4, 8, 2
    scores = gate.get_unbalanced_scores(4000, ranks * per_rank, ranks, topk, ratio, precise)
    chosen = scores.topk(topk, dim=1).indices // per_rank
    counts = torch.nn.functional.one_hot(chosen, ranks).amax(1).sum(0).tolist()
    allowed = 0.01 if precise else 0.15
    assert abs(counts[0] / (sum(counts[1:]) / 3) / ratio - 1) < allowed, counts


def test_a_cache_does_not_keep_its_objects():
    class Owner:
        calls = 0

        @semantic.weak_lru(maxsize=None)
        def double(self, number):
            self.calls += 1
            return 2 * number

    owner = Owner()
    assert [owner.double(3), owner.double(3), owner.double(4), owner.calls] == [6, 6, 8, 2]
    seen = weakref.ref(owner)
    del owner
    assert seen() is None
    assert (semantic.value_or(None, 3), semantic.value_or(0, 3)) == (3, 0)


def test_unique_rows():
    rows = torch.tensor([[3, 1, 3, 3], [-1, 0, -1, 0], [-1, -1, -1, -1], [3, 2, 1, 0]])
    math.inplace_unique(rows, 4)
    assert rows.tolist() == [[1, 3, -1, -1], [0, -1, -1, -1], [-1] * 4, [0, 1, 2, 3]]
    few = torch.tensor([[1, 1, 1, 0, 1]])
    math.inplace_unique(few, 2)
    assert few.tolist() == [[0, 1, -1, -1, -1]]


def test_grouped_scores():
    scores = torch.arange(1.0, 13.0).view(2, 6)
    grouped = math.create_grouped_scores(scores, torch.tensor([[0, 2], [1, 1]]), 3)
    assert grouped.tolist() == [[1, 2, 0, 0, 5, 6], [0, 0, 9, 10, 0, 0]]


def test_hashes():
    x = torch.randn(3, 5)
    assert math.hash_tensor(x) == math.hash_tensor(x.t().contiguous().t())
    assert math.hash_tensor(x) != math.hash_tensor(x + 1)
    assert isinstance(math.hash_tensor(x.to(torch.float8_e4m3fn)[:0]), int)


def test_a_kernel_that_is_not_there():
    with pytest.raises(ValueError, match="0 launches of 'dispatch'"):
        testing.bench_kineto(lambda: torch.ones(3).sum(), "dispatch", 2, True)


# ---- configurations and events


def test_configurations():
    for ranks in (*range(1, 9), 16, 24, 144, 160):
        for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)):
            assert config.num_sms == Buffer.num_sms
            assert config.get_nvl_buffer_size_hint(14336, ranks) % 128 == 0
            assert (config.get_rdma_buffer_size_hint(14336, ranks) > 0) == (ranks > 8)
    assert Buffer.get_dispatch_config(2).num_max_nvl_chunked_send_tokens == 24
    assert Buffer.get_combine_config(4).num_max_nvl_chunked_send_tokens == 9
    for wrong in (0, 161):
        with pytest.raises(ValueError, match="1 to 160 ranks"):
            Buffer.get_combine_config(wrong)


@pytest.mark.parametrize(
    "numbers", [(24, 256, 256), (24, 8, 256, 65, 128), (-1,), (24, 0, 256)], ids=str
)
def test_configurations_that_make_no_sense(numbers):
    with pytest.raises(ValueError, match=r"must|num_sms"):
        Config(*numbers)


def test_the_number_of_sms():
    before = Buffer.num_sms
    try:
        Buffer.set_num_sms(8)
        assert Buffer.get_dispatch_config(4).num_sms == 8
        with pytest.raises(ValueError, match="even"):
            Buffer.set_num_sms(7)
    finally:
        Buffer.num_sms = before
    assert not Buffer.is_sm90_compiled()


def test_an_event_has_one_hook():
    event = EventOverlap(EventHandle())
    assert event.hook_after_wait is None
    assert event.wait() is None
    event.register_hook_after_wait(lambda: 7)
    with pytest.raises(RuntimeError, match="hook"):
        event.register_hook_after_wait(lambda: 8)
    assert event.current_stream_wait() == 7
    assert event.hook_after_wait is None
    assert event.current_stream_wait() is None
    event.hook_after_wait = lambda: 9
    assert event.wait() == 9
    # A `with` releases the event only if the call before it said so.
    with event(release_handle=True):
        event(release_handle=False)
    assert event.event is not None
    with event(True):
        pass
    assert event.event is None
    event.hook_after_wait = lambda: 10
    assert event.wait() == 10


def test_events_without_an_operation():
    EventOverlap().current_stream_wait()
    called = []
    event = EventOverlap(EventHandle(), (torch.zeros(1),))
    event.register_hook_after_wait(lambda: called.append(1))
    with event as entered:
        assert entered is event
        assert not called
    assert called == [1]
    assert event(release_handle=True) is event  # it only prepares the next `with`
    assert event.event is not None
    with event(release_handle=True):
        assert event.event is not None
    assert event.event is None
    assert called == [1]
    Buffer.capture().event.synchronize()
    with pytest.raises(AttributeError):
        _ = EventOverlap().missing_contributions
