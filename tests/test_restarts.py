"""A job that begins again over a store that still holds what an earlier attempt left there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from datetime import timedelta

import harness
import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

TIMES = [3, pytest.param(20, marks=pytest.mark.slow)]
SOON = timedelta(seconds=harness.DEADLINE)


def use():
    tensor = torch.full((5,), 2.0 ** dist.get_rank())
    dist.all_reduce(tensor)
    assert (tensor == 2 ** dist.get_world_size() - 1).all()
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(tensor, group=pair)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


# ---- torchrun


def worker(restarts):
    """Every attempt but the last ends by a death: after the job was made, or half-way."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a program of its own
    turn, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if turn < restarts and turn % 3 == 1 and rank == 1:
        os._exit(1)  # the others have come, or are about to
    dist.init_process_group("mooncake", timeout=SOON)
    use()
    if turn < restarts:
        if rank == turn % 2:
            os._exit(1)
        signal.pause()
    dist.destroy_process_group()
    return turn


def launch_on_rank(me, config):
    """What torchrun does, with workers from a fork server: they need not import torch. They are not
    forked from here: a thread of the launcher's store looks names up, and whoever is forked
    meanwhile waits for the lock of the C library's resolver for ever."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    multiprocessing.current_process()._config["daemon"] = False  # may have children
    multiprocessing.set_forkserver_preload(harness.PRELOAD)
    config.logs_specs = DefaultLogsSpecs(log_dir=str(me.folder / "elastic"))
    return elastic_launch(config, worker)(config.max_restarts)


FORMS = {
    "plain": lambda port: {"rdzv_backend": "static", "rdzv_endpoint": f"127.0.0.1:{port}",
                           "rdzv_configs": {"rank": 0}},
    "standalone": lambda port: {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0"},
    "c10d": lambda port: {"rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{port}"},
}  # fmt: skip


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("form", FORMS)
def test_torchrun_restarts_its_workers(form, times):
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=3, run_id="restarts", start_method="forkserver",
        max_restarts=times - 1, monitor_interval=0.05, **FORMS[form](free_port()),
    )  # fmt: skip
    [results] = harness.run_ranks(1, launch_on_rank, config, backend=None)
    assert results == dict.fromkeys(range(3), times - 1)


# ---- the same processes


def reinit_on_rank(me, times, port, keep):
    """Who keeps a group keeps the store, and in rank 0 its server."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(me.rank), WORLD_SIZE=str(me.size)
    )
    kept = []
    for _ in range(times):
        dist.init_process_group("mooncake", timeout=SOON)
        use()
        if keep:
            kept.append(dist.group.WORLD)
        dist.destroy_process_group()


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_env_again_in_the_same_processes(keep, times):
    harness.run_ranks(3, reinit_on_rank, times, free_port(), keep, backend=None)


# ---- one file


def over_file_on_rank(me, path, ends, absent):
    if me.rank == absent:
        return signal.pause()
    dist.init_process_group(
        "mooncake", init_method=f"file://{path}", rank=me.rank, world_size=me.size, timeout=SOON
    )
    use()
    if ends:
        return dist.destroy_process_group()
    me.board.set(f"up-{me.rank}")
    return signal.pause()


@pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_the_same_file_by_other_processes(tmp_path, times):
    """Attempts that are killed, that are killed before all had come (without rank 0, without rank
    1), and that end well."""
    path = tmp_path / "rendezvous"

    def published():
        return path.read_bytes().count(b"members/2")

    for turn in range(times):
        ends = turn % 4 == 3 or turn == times - 1
        absent = None if ends else [None, 0, 1][turn % 4]
        before = published() if turn else 0
        with harness.starting(3, over_file_on_rank, path, ends, absent, backend=None) as crew:
            if ends:
                crew.results()
            elif absent is None:
                crew.board.wait_all("up", range(3))
            else:
                harness.until(
                    lambda before=before: published() > before, "rank 2 to wait for the absent one"
                )
