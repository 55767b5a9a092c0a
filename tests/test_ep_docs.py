"""The programs of docs/expert-parallelism.md, and the numbers of the page on its internals."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch.distributed as dist

from mooncake.ep import Buffer

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "expert-parallelism.md"
INTERNALS = DOCS / "expert-parallelism-internals.md"


def block(language, behind):
    text = PAGE.read_text(encoding="utf-8").split(behind)[1]
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found
    return found.group(1)


def run(folder, *arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOONCAKE_")}
    done = subprocess.run(
        [sys.executable, "-m", "mooncake_backend.run", *arguments],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=harness.DEADLINE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_for_deepeps_users_survives_a_kill(tmp_path):
    (tmp_path / "experts.py").write_text(block("python", "<!-- experts.py"))
    (command,) = block("bash", "<!-- experts.py").splitlines()
    name, *arguments = shlex.split(command)
    assert name == "mooncake-run"
    shown = block("text", "<!-- experts.py").splitlines()
    # Ranks print at once: the end of a line may stand behind the next line.
    lines = re.findall(r"rank \d, step .*? tokens miss an expert", run(tmp_path, *arguments))
    assert sorted(lines) == sorted(shown)
    assert len(shown) == 7


@pytest.mark.parametrize("program", ["prefill", "elastic"])
def test_programs_of_the_normal_mode_survive_a_kill(tmp_path, program):
    (tmp_path / f"{program}.py").write_text(block("python", f"<!-- {program}.py"))
    printed = run(tmp_path, "--standalone", "--nproc-per-node", "4", f"{program}.py")
    found = re.findall(r"rank (\d), step (\d): (\d+) rows, (\d+) tokens miss an expert", printed)
    calls = sorted(rank + step for rank, step, *_ in found)
    assert calls == ["00", "01", "10", "11", "20", "21", "30"]
    # Four ranks have a quarter of the experts each; a token has two of them.
    assert all(int(missing) == 0 for _, step, _, missing in found if step == "0")
    assert all(0 < int(missing) < 64 for _, step, _, missing in found if step == "1")


def test_the_program_that_catches_a_loss(tmp_path):
    (tmp_path / "raising.py").write_text(block("python", "<!-- raising.py"))
    printed = run(tmp_path, "--standalone", "--nproc-per-node", "4", "raising.py")
    assert sorted(re.findall(r"rank (\d), step (\d): lost \[3\]", printed)) == [
        ("0", "1"), ("1", "1"), ("2", "1"),
    ]  # fmt: skip
    found = re.findall(r"rank (\d), step (\d): (\d+) tokens miss a rank", printed)
    calls = sorted(step + rank for rank, step, _ in found)
    assert calls == ["00", "01", "02", "03", "10", "11", "12", "20", "21", "22"]
    assert all((int(missing) > 0) == (step != "0") for _, step, missing in found)


def test_the_program_that_trains_survives_a_kill(tmp_path):
    (tmp_path / "train_experts.py").write_text(block("python", "<!-- train_experts.py"))
    printed = run(tmp_path, "--standalone", "--nproc-per-node", "4", "train_experts.py")
    found = re.findall(r"step (\d): loss (\S+) over (\d+) of 64 tokens", printed)
    assert [int(step) for step, *_ in found] == list(range(10))
    losses, tokens = [float(one) for _, one, _ in found], [int(one) for *_, one in found]
    assert losses[4] < losses[0]
    assert losses[9] < losses[4]
    assert tokens[:5] == [64] * 5
    assert all(0 < count < 64 for count in tokens[5:])


def test_the_program_for_mooncakes_users(tmp_path):
    (tmp_path / "routed.py").write_text(block("python", "<!-- routed.py"))
    printed = run(tmp_path, "--standalone", "--nproc-per-node", "4", "routed.py")
    found = re.findall(r"rank (\d): \[1, 1, 1, 1\], (\d+) rows received", printed)
    assert sorted(rank for rank, _ in found) == ["0", "1", "2", "3"]
    assert sum(int(rows) for _, rows in found) == 4 * 16 * 8


@pytest.mark.parametrize("ranks", [1, 3, 8, 64])
@pytest.mark.parametrize("experts", [8, 288])
@pytest.mark.parametrize("hidden", [130, 7168])
@pytest.mark.parametrize("tokens", [1, 128])
def test_the_formula_of_the_size(tokens, hidden, experts, ranks):
    """It stands in the page as text: written here again, so that both are changed together."""
    assert "max(T * 2h,  L * R * T * (2h + 8 * ceil(h / 128)))" in INTERNALS.read_text("utf-8")
    rows = -(-experts // ranks) * ranks * tokens
    send = max(tokens * 2 * hidden, rows * (2 * hidden + 8 * -(-hidden // 128)))
    need = 2 * (send + rows * 2 * hidden)
    hint = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks, experts)
    # Rows are aligned to 16 bytes, areas to 128.
    assert need <= hint <= need + 2 * 2 * 16 * max(rows, tokens) + 4096
    assert hint % 128 == 0


def padded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def needed(ranks, hosts, tokens, rows, row, back):
    """The formula of the normal mode."""
    of_host = ranks // hosts
    places = hosts + (hosts - 1) + (-(-(ranks - of_host) // 2) if of_host > 1 else 0)
    return 2 * max(places * tokens * row, rows * back)


def test_the_example_of_the_normal_mode():
    text = INTERNALS.read_text("utf-8")
    assert "2 * max(P * T * d, r * c)    P = H + (H - 1) + ceil((R - G) / 2)" in text
    row, back = 14336 + 64 + 32, 14336 + 8 * 56 + 32
    need = needed(16, 2, 4096, 26_000, row, back)
    assert f"d = {row:,},\nc = {back:,}, so {need:,} bytes" in text
    config = Buffer.get_dispatch_config(16)
    hints = [
        config.get_nvl_buffer_size_hint(14336, 16),
        config.get_rdma_buffer_size_hint(14336, 16),
    ]
    assert f"{sum(hints) // 10**6} MB in the example" in text
    assert 900 < sum(hints) / needed(16, 2, 1, 16, row, back) < 1100


@pytest.mark.parametrize("ranks", [2, 8, 16, 64, 128])
@pytest.mark.parametrize("hidden", [512, 14336])
def test_hints_of_the_normal_mode_are_at_most_deepeps(ranks, hidden):
    """DeepEP's formulas, of its csrc/config.hpp, written again."""
    for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)):
        channels, near, far = config.num_sms // 2, min(ranks, 8), max(1, ranks // 8)
        queue = channels * near * config.num_max_nvl_chunked_recv_tokens
        numbers = channels * near * (2 * far + 3) * 4
        theirs = numbers + queue * (hidden + 8 * 128 + 4 * 128 + 4 * 128)
        mine = config.get_nvl_buffer_size_hint(hidden, ranks)
        assert mine <= -(-theirs // 128) * 128
        assert mine >= needed(ranks, far, 1, ranks, hidden + 96, hidden + hidden // 16)
        queue = channels * far * config.num_max_rdma_chunked_recv_tokens
        theirs = channels * far * 18 * 2 * 4 + 2 * queue * (hidden + 16 * 128)
        mine = config.get_rdma_buffer_size_hint(hidden, ranks)
        assert mine <= (theirs if ranks > 8 else 0)


def room_on_rank(me, hosts, tokens, rows, hidden, topk):
    """A buffer of the formula's size is as large as the call needs, and no larger."""
    sizes = [2 * hidden, 8 * topk, 4 * topk]
    row, back = (
        sum(map(padded, sizes)),
        padded(2 * hidden) + padded(8 * (hidden // 128)) + padded(4 * topk),
    )
    need = needed(me.size, hosts, tokens, rows, row, back)
    for num_bytes, fits in ((need + 256, True), (need * 97 // 100, False)):
        buffer = Buffer(dist.group.WORLD, num_bytes // 128 * 128)
        most = buffer.runtime.most_tokens(sizes, hidden, topk, rows / tokens)
        assert (most >= tokens) == fits, (num_bytes, most)
        buffer.destroy()


@pytest.mark.parametrize(("layout", "hosts"), [("shm", 1), ("hosts", 2), ("tcp", 4)])
@pytest.mark.parametrize(
    ("tokens", "rows"), [(1000, 1000), (1000, 4000), (300, 900)], ids=["few", "most", "small"]
)
def test_the_formula_of_the_normal_mode(layout, hosts, tokens, rows, crews):
    crews.get(layout, 4).call(room_on_rank, hosts, tokens, rows, 256, 3)
