"""torch's own suite of torch.distributed, from the installed torch, made ready for CPU tensors.

torch/testing/_internal/distributed/distributed_test.py decides when it is imported what to skip.
Here it is imported as for Gloo, so nothing is skipped for one backend and not for the other, and
without the skips that ask for GPUs, for more than four ranks or for NCCL or MPI by name: whatever
such a test needs beyond that, it fails on Gloo, too. `use()` then names the backend to run on.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import sys
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import all_reduce_check
import on_cpu
import on_device
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))
import devices

WORLD_SIZE = 4
device: str | None = None  # of the tensors; None: the CPU
# Longer than torch's, for a machine that does other things, too. Seconds.
DEADLINE = int(os.environ.get("RANKS_DEADLINE", "120"))
OPERATION_TIMEOUT = 2 * DEADLINE
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

os.environ.update(
    BACKEND="gloo",
    PYTORCH_NVML_BASED_CUDA_CHECK="1",  # CUDA does not survive the fork of ranks
    INIT_METHOD="file://",
    PYTORCH_PRINT_REPRO_ON_FAILURE="0",
    TORCHINDUCTOR_CACHE_DIR=str(Path(__file__).resolve().parents[2] / "build/conformance/compiled"),
    TORCHINDUCTOR_VEC_ISA_OK="0",  # else it tries vectors out with the compiler, most of a minute
    WORLD_SIZE=str(WORLD_SIZE),
)
if devices.kind() != "cuda":
    os.environ.update(CUDA_VISIBLE_DEVICES="")
# torch's TestCase derives from this package's, and no test of the suite uses what it adds.
sys.modules.setdefault(
    "expecttest",
    types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False),  # type: ignore[arg-type]
)

from torch.testing._internal import common_distributed, common_utils  # noqa: E402

# Reasons to skip that name another backend, of tests that any backend could pass.
_FOR_ANOTHER = re.compile(
    r"only (mpi|nccl) supports|nccl (batch )?send recv only|nccl only|one of {'nccl'}", re.I
)


def _lifted(skip: Callable[..., Any]) -> Callable[..., Any]:
    def decorator(*condition_and_reason: Any) -> Any:
        if _FOR_ANOTHER.search(condition_and_reason[-1]):
            return _unchanged
        return skip(*condition_and_reason)

    return decorator


def _unchanged(test: Callable[..., Any]) -> Callable[..., Any]:
    return test


def _never_skip(*_: Any, **__: Any) -> Callable[..., Any]:
    return _unchanged


def _one_device_each(world_size: int, _: str) -> dict[int, list[int]]:
    return {rank: [rank] for rank in range(world_size)}


for _name in ("skip_but_pass_in_sandcastle", "skip_but_pass_in_sandcastle_if"):
    setattr(common_utils, _name, _lifted(getattr(common_utils, _name)))
common_distributed.init_multigpu_helper = _one_device_each
common_distributed.skip_if_no_gpu = _unchanged
common_distributed.skip_if_small_worldsize = _unchanged
common_distributed.skip_if_lt_x_gpu = _never_skip
common_distributed.nccl_skip_if_lt_x_gpu = _never_skip
common_distributed.require_n_gpus_for_nccl_backend = _never_skip
common_distributed.TIMEOUT_DEFAULT = DEADLINE
common_distributed.TIMEOUT_OVERRIDE = {}

import torch.testing._internal.distributed.fake_pg  # noqa: E402  registers the backend fake
from torch.testing._internal.distributed import distributed_test  # noqa: E402

distributed_test.default_pg_timeout = OPERATION_TIMEOUT


def end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """As torch's test_distributed_spawn.py makes it, but ranks are forked: one import for all."""

    def setUp(self) -> None:
        super().setUp()
        distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]  # of this test
        self._start_processes(multiprocessing.get_context("fork").Process)

    def tearDown(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        super().tearDown()

    def _barrier(self, wait_for: int | None = None, timeout: float = 0) -> None:
        distributed_test.Barrier.sync(wait_for, max(timeout, DEADLINE))

    @classmethod
    def _run(cls, rank: int, *args: Any, **named: Any) -> None:
        end_with_parent()
        torch.set_num_threads(1)
        all_reduce_check.begin(rank, os.environ["TEMP_DIR"])
        if device is None:
            where = on_cpu.everything()
        else:
            devices.register(device)
            where = on_device.everything(device, rank)
        with where:
            super()._run(rank, *args, **named)


def names() -> list[str]:
    return sorted(unittest.TestLoader().getTestCaseNames(Suite))


class _LikeGloo(str):
    """The name of a backend, in tests that ask for it: what they want of Gloo they want of it."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class _ForEvents(str):
    """Backends by device. In a longer text only the last one's name, with which events of the
    profiler begin."""

    def __add__(self, other: str) -> str:
        return f"{self}{other}"

    def __format__(self, spec: str) -> str:
        return self.rsplit(":", 1)[1]


def use(backend: str, on: str | None = None) -> None:
    """The tests run on this backend from now on, with tensors of the CPU or of the device `on`."""
    global device
    device = on
    os.environ.update(BACKEND=backend)
    distributed_test.BACKEND = _LikeGloo(backend)
    if on is not None:
        find = dist.get_backend
        dist.get_backend = lambda group=None: _ForEvents(find(group))
    for profiled in (
        distributed_test.PROFILING_SUPPORTED_BACKENDS,
        distributed_test.CUDA_PROFILING_SUPPORTED_BACKENDS,
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        profiled.append(dist.Backend(backend))
