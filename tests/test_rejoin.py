"""A new process in the place of a lost rank, while the job runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mooncake_backend
from mooncake import mooncake_elastic_buffer, mooncake_ep_buffer
from mooncake.ep import Buffer
from mooncake_backend import pg, replacing


def part(rank: int, turn: int) -> torch.Tensor:
    """Differs by rank and by round."""
    return torch.arange(5, dtype=torch.float64) * (turn + 1) + 2.0**rank


def total(ranks, turn: int) -> torch.Tensor:
    return torch.stack([part(rank, turn) for rank in ranks]).sum(0)


def turn_of_all(turn: int) -> int:
    """The round that the members are in, as a newcomer learns it."""
    known = torch.tensor(turn)
    dist.all_reduce(known, op=dist.ReduceOp.MAX)
    return int(known)


def rounds(me: harness.Rank, turn: int) -> list[tuple[int, ...]]:
    """Until the test says so: lets in whoever waits, and sums. Returns the contributors of each
    round."""
    seen = []
    while True:
        turn = turn_of_all(turn) + 1
        tensor = part(me.rank, turn)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        ranks = tuple(work.contributors)
        assert torch.equal(tensor, total(ranks, turn)), (turn, ranks, tensor)
        seen.append(ranks)
        if len(ranks) == me.size:
            me.board.set(f"whole-{me.rank}-{os.getpid()}")
        ends = torch.tensor(int(me.board.has("end")))
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends:
            return seen
        replacing.admit(dist.group.WORLD)  # a newcomer goes on with the next line, as all do


def member(me: harness.Rank):
    me.init("mooncake-cpu")
    me.board.set(f"began-{me.rank}")
    return rounds(me, 0)


def newcomer(me: harness.Rank):
    me.init("mooncake-cpu")
    # Before it is in, it acts on itself alone.
    alone = part(me.rank, 7)
    dist.all_reduce(alone)
    assert torch.equal(alone, part(me.rank, 7))
    assert pg.get_active_ranks(dist.group.WORLD).tolist() == [
        int(rank == me.rank) for rank in range(me.size)
    ]
    pg.join_group(dist.group.WORLD)
    assert pg.get_active_ranks(dist.group.WORLD).tolist() == [1] * me.size
    return rounds(me, 0)


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("victim", [2, 0, 3])
def test_a_killed_rank_comes_back(victim, transports):
    with harness.Crew(4, backend=None, env={"MOONCAKE_TRANSPORTS": transports}) as crew:
        crew.start(member)
        crew.board.wait_all("began", range(4))
        crew.kill(victim)
        crew.replace(victim, newcomer)
        for rank in range(4):
            crew.board.wait(f"whole-{rank}-{crew.pid(rank)}")
        crew.board.set("end")
        seen = crew.results()
        survivors = tuple(rank for rank in range(4) if rank != victim)
        for rank, contributors in enumerate(seen):
            everybody = tuple(range(4))
            assert contributors[-1] == everybody
            if rank == victim:
                assert set(contributors) == {everybody}
            else:
                assert set(contributors) <= {everybody, survivors}


def test_each_rank_in_turn():
    with harness.Crew(4, backend=None) as crew:
        crew.start(member)
        crew.board.wait_all("began", range(4))
        for victim in range(4):
            crew.kill(victim)
            crew.replace(victim, newcomer)
            crew.board.wait(f"whole-{victim}-{crew.pid(victim)}")
        crew.board.set("end")
        assert all(contributors[-1] == (0, 1, 2, 3) for contributors in crew.results())


# ---- subgroups, and messages across

PAIR = [1, 2]


def paired(me: harness.Rank):
    """Ranks 1 and 2 have a group of their own. Rank 0 sends to rank 1 before rank 2 comes back, and
    rank 1 receives afterwards: a small message, a large one, and one with another tag."""
    me.init("mooncake-cpu")
    world = dist.group.WORLD
    pair = dist.new_group(PAIR)
    sent = [torch.full((n,), float(n)) for n in (3, 1 << 18, 5)]
    works = []
    if os.environ.get("MOONCAKE_REJOIN"):
        alone = torch.ones(1)
        dist.all_reduce(alone, group=pair)
        assert alone == 1
        pg.join_group(world)
        pg.join_group(pair)
    else:
        me.board.set(f"began-{me.rank}")
        if me.rank == 0:
            works = [dist.isend(tensor, 1, tag=i % 2) for i, tensor in enumerate(sent)]
        if me.rank == 2:
            me.board.wait("never")
        harness.until(lambda: pg.get_active_ranks(world).tolist() == [1, 1, 0], "the loss")
        harness.until(lambda: pg.get_peer_state(world, [2]) == [True], "a newcomer")
        if me.rank == 0:  # one caller is enough
            assert pg.recover_ranks(world, [2]).status is pg.ProposalStatus.Applied
        else:
            harness.until(lambda: pg.get_active_ranks(world).tolist() == [1] * 3, "all ranks")
        # A late call of another one is answered alike.
        assert pg.activate_ranks(world, [2]).status is pg.ProposalStatus.Applied
        if me.rank == 1:
            harness.until(lambda: pg.get_peer_state(pair, [1]) == [True], "a newcomer of the pair")
            assert pg.recover_ranks(pair, [1]).status is pg.ProposalStatus.Applied
            for i in (1, 0, 2):  # of tag 0 there are two, in the order in which they were sent
                got = torch.zeros_like(sent[i])
                dist.recv(got, 0, tag=i % 2)
                assert torch.equal(got, sent[i]), i
        for work in works:
            work.wait()
    if me.rank in PAIR:
        both = torch.tensor(float(me.rank))
        dist.all_reduce(both, group=pair)
        assert both == sum(PAIR)
    if me.rank == 2:
        dist.send(torch.tensor([7.0]), 0)
    if me.rank == 0:
        got = torch.zeros(1)
        dist.recv(got, 2)
        assert got == 7
    everybody = torch.ones(1)
    dist.all_reduce(everybody)
    return everybody.item()


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_subgroups_and_messages_between_survivors(transports):
    with harness.Crew(3, backend=None, env={"MOONCAKE_TRANSPORTS": transports}) as crew:
        crew.start(paired)
        crew.board.wait_all("began", range(3))
        crew.kill(2)
        crew.replace(2, paired)
        assert crew.results() == [3, 3, 3]


# ---- mistakes


def mistaken(me: harness.Rank):
    me.init("mooncake-cpu", timeout=5)
    world = dist.group.WORLD
    found = [harness.raised(pg.recover_ranks, world, ranks) for ranks in ([], [1, 1], [2], [-1])]
    found.append(harness.raised(pg.join_group, world))
    assert pg.recover_ranks(world, [1]).status is pg.ProposalStatus.Applied
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == 2
    return found


def test_mistakes_change_nothing():
    with harness.Crew(2, backend=None) as crew:
        for found in crew.call(mistaken):
            kinds = [kind for kind, _ in found]
            assert kinds == ["ValueError"] * 4 + ["DistBackendError"]
            for text, expected in zip(
                [text for _, text in found],
                ["got no ranks", "twice", "not in a group of 2", "not in a group", "already"],
                strict=True,
            ):
                assert expected in text


def no_newcomer(me: harness.Rank):
    me.init("mooncake-cpu", timeout=2)
    if me.rank == 2:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1))
    kind, text = harness.raised(pg.recover_ranks, dist.group.WORLD, [2])
    assert kind == "DistBackendError"
    answer = pg.activate_ranks(dist.group.WORLD, [2])
    after = torch.ones(1)
    dist.all_reduce(after)
    return answer.status.name, [text, answer.reject_reason], after.item()


def test_without_a_newcomer_it_is_rejected_by_name():
    with harness.starting(3, no_newcomer, backend=None) as crew:
        for status, reasons, after in crew.results(dead=[2])[:2]:
            assert (status, after) == ("Rejected", 2)
            for reason in reasons:
                assert "no process is ready to take the place of rank 2" in reason


def nowhere(me: harness.Rank):
    options = pg.MooncakeBackendOptions(is_extension=True)
    return harness.raised(me.init, "mooncake-cpu", 5, "store", options)


def test_an_extension_where_no_job_runs():
    kind, text = harness.run_ranks(1, nowhere, backend=None)[0]
    assert kind == "DistBackendError"
    assert "no job has begun over this store" in text


def begins_and_ends(me: harness.Rank):
    me.init("mooncake-cpu")
    if me.rank == 1:
        me.board.set("ready")
        me.board.wait("never")
    me.board.wait("killed")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    me.board.set("over")


def comes_too_late(me: harness.Rank):
    return harness.raised(me.init, "mooncake-cpu")


def test_a_newcomer_after_the_jobs_end():
    """It is told, long before its timeout."""
    env = {"MOONCAKE_FAILURE_TIMEOUT_MS": "1000"}
    with harness.Crew(2, env=env, backend=None) as crew:
        crew.start(begins_and_ends)
        crew.board.wait("ready")
        crew.kill(1)
        crew.board.set("killed")
        crew.board.wait("over")
        crew.replace(1, comes_too_late)
        kind, text = crew.results()[1]
        assert kind == "PeerLostError", text
        assert "no member of the job can be reached" in text


# ---- training

STEPS = 40
FEATURES = 6


class Model(torch.nn.Module):
    """Returns the loss. The gradient of `seen` tells the ranks whose gradients are in the mean: it
    is reduced in one operation with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(3))
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor, rank: int) -> torch.Tensor:
        return (self.layers(x) - y).square().mean() + self.seen[rank]


def made() -> tuple[Model, torch.optim.Optimizer]:
    model = Model().double()
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(5, FEATURES, generator=draw, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def trainer(me: harness.Rank):
    """Trains until the test has seen the newcomer take part, and STEPS steps at least. Returns the
    parameters, and the ranks of each step that this process has done."""
    me.init("mooncake-cpu")
    torch.manual_seed(me.rank)
    model, optimizer = made()
    job = mooncake_backend.elastic(model, optimizer, wrap=DistributedDataParallel)
    took_part = {}
    for step in job.steps(10**6):
        if step >= 3:  # in its first steps, DDP itself broadcasts from rank 0
            me.board.set(f"training-{me.rank}-{os.getpid()}")
        optimizer.zero_grad()
        job.model(*batch(step, me.rank), me.rank).backward()
        took_part[step] = tuple(model.seen.grad.nonzero().flatten().tolist())
        optimizer.step()
        ends = torch.tensor(float(me.board.has("end") and step >= STEPS))
        dist.all_reduce(ends)
        if ends > 0:
            break
    return [p.detach() for p in model.parameters()], took_part


def reference(took_part: dict[int, tuple[int, ...]]) -> list[torch.Tensor]:
    """The parameters after the same steps, without any process group."""
    torch.manual_seed(0)
    model, optimizer = made()
    for step, ranks in sorted(took_part.items()):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for place, rank in enumerate(ranks):
            optimizer.zero_grad()
            model(*batch(step, rank), rank).backward()
            sums = [
                p.grad.clone() if place == 0 else total + p.grad
                for total, p in zip(sums, model.parameters(), strict=True)
            ]
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = total / len(ranks)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("victim", [1, 0])
def test_training_goes_on_as_with_the_same_contributors(victim):
    """To the last bit."""
    with harness.Crew(3, backend=None) as crew:
        crew.start(trainer)
        for rank in range(3):
            crew.board.wait(f"training-{rank}-{crew.pid(rank)}")
        crew.kill(victim)
        crew.replace(victim, trainer)
        crew.board.wait(f"training-{victim}-{crew.pid(victim)}")
        crew.board.set("end")
        results = crew.results()
        survivor = next(rank for rank in range(3) if rank != victim)
        parameters, took_part = results[survivor]
        assert set(took_part.values()) == {(0, 1, 2), tuple(r for r in range(3) if r != victim)}
        for other, theirs in results:
            assert theirs.items() <= took_part.items()
            assert all(torch.equal(a, b) for a, b in zip(other, parameters, strict=True))
        expected = reference(took_part)
        assert all(torch.equal(a, b) for a, b in zip(expected, parameters, strict=True))


# ---- experts

EXPERTS, TOKENS, HIDDEN = 8, 6, 64


def tokens(rank: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 [TOKENS, HIDDEN], and two different experts for each: int64 [TOKENS, 2]."""
    draw = torch.Generator().manual_seed(100 * turn + rank)
    x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=draw).bfloat16()
    chosen = torch.stack([torch.randperm(EXPERTS, generator=draw)[:2] for _ in range(TOKENS)])
    return x, chosen


class Mooncakes:
    """Calls Mooncake's Buffer. `late`: combines with the handles of the last turn."""

    def __init__(self, me: harness.Rank) -> None:
        size = mooncake_ep_buffer.Buffer.get_ep_buffer_size_hint(TOKENS, HIDDEN, me.size, EXPERTS)
        self.buffer = mooncake_ep_buffer.Buffer(dist.group.WORLD, size, on_failure="continue")

    def turn(self, turn: int, x, chosen, weights, active) -> torch.Tensor:
        rows, _, handle, _, _ = self.buffer.dispatch(
            x, chosen, active, TOKENS, EXPERTS, -1, use_fp8=False
        )
        self.late = [partial(self.buffer.combine, rows, chosen, weights, active, -1, handle)]
        return self.late[0]()[0]


class MooncakesElastic:
    def __init__(self, me: harness.Rank) -> None:
        self.buffer = mooncake_elastic_buffer.ElasticBuffer(
            dist.group.WORLD, 1 << 21, on_failure="continue"
        )

    def turn(self, turn: int, x, chosen, weights, active) -> torch.Tensor:
        rows, _, given, handle, _ = self.buffer.dispatch(
            x, chosen, weights, num_experts=EXPERTS, num_max_tokens_per_rank=TOKENS,
            active_ranks=active,
        )  # fmt: skip
        rows = (rows.float() * given.sum(1, keepdim=True)).bfloat16()
        self.late = [partial(self.buffer.combine, rows, handle, active_ranks=active)]
        return self.late[0]()[0]


class DeepEPs:
    """Both modes in each turn: the first dispatch of either one begins with a newcomer."""

    def __init__(self, me: harness.Rank) -> None:
        size = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, me.size, EXPERTS)
        self.buffer = Buffer(
            dist.group.WORLD, 1 << 21, size, low_latency_mode=True, on_failure="continue"
        )

    def turn(self, turn: int, x, chosen, weights, active) -> torch.Tensor:
        modes = [self.low_latency, self.normal]
        first, second = modes if turn % 2 else modes[::-1]
        self.late = []
        results = first(x, chosen, weights, active), second(x, chosen, weights, active)
        # A loss between the two is of the second one only; then the next turn compares them.
        if active.all():
            assert torch.equal(*results)
        return results[1]

    def low_latency(self, x, chosen, weights, active) -> torch.Tensor:
        rows, _, handle, _, _ = self.buffer.low_latency_dispatch(
            x, chosen, TOKENS, EXPERTS, use_fp8=False, active_ranks=active
        )
        combine = partial(
            self.buffer.low_latency_combine, rows, chosen, weights, handle, active_ranks=active
        )
        self.late.append(combine)
        return combine()[0]

    def normal(self, x, chosen, weights, active) -> torch.Tensor:
        _, _, counts, in_rank, _ = self.buffer.get_dispatch_layout(chosen, EXPERTS)
        rows, experts, given, _, handle, _ = self.buffer.dispatch(
            x, is_token_in_rank=in_rank, num_tokens_per_expert=counts, topk_idx=chosen,
            topk_weights=weights, active_ranks=active,
        )  # fmt: skip
        given = torch.where(experts >= 0, given, 0.0).sum(1, keepdim=True)
        rows = (rows.float() * given).bfloat16()
        combine = partial(self.buffer.combine, rows, handle, active_ranks=active)
        self.late += [combine, partial(self.buffer.dispatch, x, handle)]
        return combine()[0]


KINDS = {"mooncake": Mooncakes, "elastic": MooncakesElastic, "deepep": DeepEPs}


def infer(me: harness.Rank, kind: str):
    """Experts give rows back as they are, so a token of weights 1/2 and 1/2 comes back as it was if
    both experts are there, and as its half if one is."""
    me.init("mooncake-cpu")
    group = dist.group.WORLD
    if os.environ.get("MOONCAKE_REJOIN"):
        pg.join_group(group)
    calls = None
    weights = torch.full((TOKENS, 2), 0.5)
    turn, whole, late = 0, 0, []
    while True:
        turn = turn_of_all(turn) + 1
        if calls is None:  # a newcomer's: the others make theirs anew in their next dispatch
            calls = KINDS[kind](me)
        x, chosen = tokens(me.rank, turn)
        active = torch.ones(me.size, dtype=torch.int32)
        combined = calls.turn(turn, x, chosen, weights, active)
        there = active.bool()
        parts = there[chosen // (EXPERTS // me.size)].sum(1, keepdim=True)
        assert torch.equal(combined, (x.float() * parts * 0.5).bfloat16()), (turn, there)
        whole += bool(there.all())
        if there.all():
            me.board.set(f"whole-{me.rank}-{os.getpid()}")
        # Handles of dispatches with the lost rank are of no use any more and say so before anything
        # is sent: the newcomer does not call this.
        for call in late:
            error, text = harness.raised(call)
            assert (error, "obsolete generation" in text) == ("RuntimeError", True), (error, text)
        late = []
        ends = torch.tensor(int(me.board.has("end")))
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends:
            return whole
        if replacing.admit(group):
            late = calls.late
            calls.buffer.update_ep_member()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", [2, 0])
def test_experts_come_back(kind, victim):
    with harness.Crew(4, backend=None) as crew:
        crew.start(infer, kind)
        for rank in range(4):
            crew.board.wait(f"whole-{rank}-{crew.pid(rank)}")
        crew.kill(victim)
        crew.replace(victim, infer, kind)
        crew.board.wait(f"whole-{victim}-{crew.pid(victim)}")
        crew.board.set("end")
        assert all(whole > 0 for whole in crew.results())


# ---- docs

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("page", "name", "first", "last"),
    [
        ("replacing.md", "replaceable.py", "step 100: 4 ranks", "step 600: 4 ranks"),
        ("serving.md", "serve.py", "step 100: 0 of 16 tokens", "step 600: 0 of 16 tokens"),
        ("changing.md", "drain.py", "step 100: 4 ranks", "step 600: 4 ranks"),
        ("changing.md", "asleep.py", "step 100: 4 ranks", "step 600: 4 ranks"),
    ],
)
def test_the_program_of_the_page(tmp_path, page, name, first, last):
    replaces = page != "changing.md"
    page = (ROOT / "docs" / page).read_text(encoding="utf-8")
    program = re.search(rf"<!-- {name}.*?```python\n(.*?)```", page, re.DOTALL)
    command = re.search(rf"```bash\n(mooncake-run .*?{name})\n```", page)
    assert program
    assert command
    (tmp_path / name).write_text(program[1], encoding="utf-8")
    words = command[1].split()
    assert words[0] == "mooncake-run"
    ended = subprocess.run(
        [sys.executable, "-m", "mooncake_backend.run", *words[1:]],
        cwd=tmp_path, capture_output=True, text=True, timeout=harness.scaled(120),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("step ")]
    assert lines[0].startswith(first)
    assert lines[-1].startswith(last), lines
    assert ("1 replacement was started" in ended.stderr + ended.stdout) == replaces
    if not replaces:
        assert "step 200: 3 ranks" in lines
