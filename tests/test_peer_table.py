"""MOONCAKE_PEER_TABLE: the forms of collectives by kernels, from a file of measurements."""

from __future__ import annotations

import os

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from harness import raised
from peer_ranks import LIMIT, run, runs_kernels

TABLE = """
# VERB RANKS BYTES EXCHANGES BLOCKS
all_reduce 3 0 2 3
all_reduce 3 4096 1 4
all_reduce 3 65536 1 2
all_gather 3 0 1 2
reduce_scatter 3 1024 1 3
"""


def blocks_of(call):
    """Number of blocks of the kernels that the call runs, where the device counts them."""
    if DEVICE != "fake":
        call()
        return None
    from fake_device import control

    torch.accelerator.synchronize()
    before = control.blocks_run()
    call()
    torch.accelerator.synchronize()
    return control.blocks_run() - before


def forms(me):
    for verb, count, blocks in [
        ("all_reduce", 8, 3),  # two-shot, though it is small
        ("all_reduce", 1024, 4),
        ("all_reduce", LIMIT // 4, 4),
        ("all_reduce", LIMIT, 1 + 2),  # pieces, one-shot; the first kernel waits for all ranks
        ("all_gather", 8, 2),
        ("reduce_scatter", 8, 1),  # below the table's only line
        ("reduce_scatter", 512, 3),
        ("broadcast", 8, 1),
    ]:
        kernels = 2 if count > LIMIT // 4 else 1
        found = blocks_of(
            lambda verb=verb, count=count, kernels=kernels: runs_kernels(
                lambda: oracle.exercise(verb, count=count, seed=count), kernels
            )
        )
        assert found in (None, blocks), (verb, count, found)


def test_forms_of_a_table(tmp_path):
    table = tmp_path / "table.txt"
    table.write_text(TABLE)
    run(3, forms, env={"MOONCAKE_PEER_TABLE": str(table)})


def a_new_group(me, paths):
    os.environ["MOONCAKE_PEER_TABLE"] = paths[me.rank]
    return raised(dist.new_group)


@pytest.mark.parametrize(
    ("text", "part"),
    [(None, "No such file"), ("all_reduce 3 0 1 99", "line 1: BLOCKS is '99'")],
    ids=["missing", "wrong"],
)
def test_wrong_file(tmp_path, text, part):
    path = tmp_path / "table.txt"
    if text:
        path.write_text(text)
    for kind, message in run(2, a_new_group, [str(path)] * 2):
        assert kind == "ValueError", message
        assert "MOONCAKE_PEER_TABLE: " in message, message
        assert str(path) in message, message
        assert part in message, message


def other_lines(me, paths):
    os.environ["MOONCAKE_PEER_TABLE"] = paths[me.rank]
    group = dist.new_group()
    tensor = torch.full((8,), float(me.rank + 1), device=DEVICE)
    runs_kernels(lambda: dist.all_reduce(tensor, group=group), 0)
    assert tensor.tolist() == [3.0] * 8


def test_ranks_with_other_tables_stage(tmp_path):
    paths = []
    for rank in range(2):
        path = tmp_path / f"{rank}.txt"
        path.write_text(f"all_reduce 2 0 1 {rank + 1}\n")
        paths.append(str(path))
    run(2, other_lines, paths)
