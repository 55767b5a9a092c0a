"""Measures times, in seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_PREFIX = "mooncake_ep::"
# DeepEP 2's kernels, and the calls of ElasticBuffer that do their work.
_CALLS = {
    "dispatch_impl": "dispatch",
    "dispatch_copy_epilogue_impl": "dispatch",
    "combine_impl": "combine",
    "combine_reduce_epilogue_impl": "combine",
}


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
) -> tuple[float, float, float]:
    """Mean, least and largest time of the calls after the warm-up."""
    times = []
    for number in range(num_warmups + num_tests):
        begin = time.perf_counter()
        fn()
        if number >= num_warmups:
            times.append(time.perf_counter() - begin)
        if post_fn is not None:
            post_fn()
    return sum(times) / len(times), min(times), max(times)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] = dist.barrier,
    flush_l2: bool = True,
) -> Any:
    """Mean times from torch's profiler: a number for each name, or a list if a period has several
    launches. Kernels are the calls of a Buffer, and the waits of its hooks. A call and its epilogue
    are one kernel here, so DeepEP 2's names of the two give the same time."""
    fn()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profiler:
        for _ in range(num_tests):
            if barrier_comm_profiling:
                barrier()
            fn()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    if not suppress_kineto_output:
        print(profiler.key_averages().table(max_name_column_width=100))
    several = isinstance(kernel_names, tuple)
    means = []
    for name in kernel_names if isinstance(kernel_names, tuple) else (kernel_names,):
        launches = sorted(
            (event.time_range.start, event.time_range.elapsed_us() / 1e6)
            for event in profiler.events() or []
            if event.name.startswith(_PREFIX) and _CALLS.get(name, name) in event.name
        )
        # A call of `fn` may make several launches, as DeepEP's test of barriers does.
        is_single = num_kernels_per_period == 1 and len(launches) >= num_tests
        if not is_single and len(launches) != num_tests * num_kernels_per_period:
            raise ValueError(
                f"{len(launches)} launches of {name!r} in {num_tests} calls, not "
                f"{num_kernels_per_period} in each"
            )
        times = [seconds for _, seconds in launches]
        phases = [
            statistics.mean(times[phase::num_kernels_per_period])
            for phase in range(num_kernels_per_period)
        ]
        means.append(phases if num_kernels_per_period > 1 else phases[0])
    return tuple(means) if several else means[0]
