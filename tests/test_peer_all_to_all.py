"""all_to_all by kernels. Each rank knows only its own splits, so the ranks agree in the kernel."""

from __future__ import annotations

import os
import signal
import time

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from harness import raised, until
from peer_ranks import LIMIT, crew, run, runs_kernels

VERBS = ["all_to_all_single", "all_to_all"]


def splits_on_rank(me):
    for seed, count in enumerate([0, 1, 5, 64, 1000, 4000, 9001]):
        table = oracle.splits_of(seed, me.size, count)
        for verb in VERBS:
            oracle.exercise(verb, count=count, seed=seed)
            runs_kernels(
                lambda verb=verb, table=table: oracle.exercise(verb, splits=table, seed=3), 1
            )
    table = oracle.splits_of(11, me.size, 300)
    for verb in VERBS:
        for layout in oracle.INPUT_LAYOUTS:
            oracle.exercise(verb, splits=table, layout=layout, seed=7)
            oracle.exercise(verb, count=60, layout=layout, seed=7)
    # One rank has nearly all of the data: it needs pieces, and others none.
    heavy = [[1] * me.size for _ in range(me.size)]
    heavy[me.size - 1] = [3 * LIMIT + 5 * to for to in range(me.size)]
    for verb in VERBS:
        oracle.exercise(verb, splits=heavy, seed=9)
        oracle.exercise(verb, splits=[list(row) for row in zip(*heavy, strict=True)], seed=9)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_splits(size):
    run(size, splits_on_rank)


def test_splits_of_several_blocks():
    run(3, splits_on_rank, env={"MOONCAKE_PEER_BYTES": str(3 * LIMIT + 48)})


def types_on_rank(me):
    for dtype in [*oracle.REAL, *oracle.COMPLEX, *oracle.MOVED_ONLY]:
        for verb in VERBS:
            oracle.exercise(verb, dtype=dtype, splits=oracle.splits_of(5, me.size, 77), seed=3)


def test_types():
    run(3, types_on_rank)


def shapes_on_rank(me):
    """Only some ranks name splits, which are equal all the same. Rows have several elements."""
    splits = [2] * me.size if me.rank else None
    mine = torch.arange(6.0 * me.size).reshape(2 * me.size, 3) + 100 * me.rank
    found = torch.empty(2 * me.size, 3)
    dist.all_to_all_single(found, mine, None if me.rank == 1 else splits, splits)
    rows = torch.arange(6.0).reshape(2, 3) + 6 * me.rank
    assert torch.equal(found, torch.cat([rows + 100 * rank for rank in range(me.size)]))
    # Outputs are inputs, or overlap them.
    for count in (4, 2 * LIMIT):
        both = torch.arange(float(count * me.size)) + 1000.0 * me.rank
        dist.all_to_all_single(both, both)
        part = torch.arange(float(count)) + count * me.rank
        assert torch.equal(both, torch.cat([part + 1000.0 * r for r in range(me.size)]))
        flat = torch.arange(float(count * (me.size + 1))) + 1000.0 * me.rank
        lists = [flat[r * count : (r + 1) * count] for r in range(me.size + 1)]
        dist.all_to_all(lists[1:], lists[:-1])
        assert torch.equal(flat[count:], torch.cat([part + 1000.0 * r for r in range(me.size)]))
        assert torch.equal(flat[:count], torch.arange(float(count)) + 1000.0 * me.rank)


def test_shapes_and_overlaps():
    run(3, shapes_on_rank)


def error_of(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        text = str(error)
        return type(error).__name__, text[text.find("the splits") :]
    return None, ""


def misfits_on_rank(me):
    """Splits that do not fit fail the call on all ranks, and change nothing. Later calls go on."""
    errors = []
    for number in range(12):
        sends = [3, 4, 5]
        receives = [3 + me.rank] * 3
        if number % 3 == 1 and me.rank == 0:
            receives[1 + number % 2] += 1  # rank 0 waits for more
        if number % 3 == 2:
            receives = [count + (me.rank != 1) for count in receives]
        mine = torch.full((sum(sends),), float(me.rank + number))
        found = torch.full((sum(receives),), -1.0)
        if number % 2:
            kind, text = error_of(dist.all_to_all_single, found, mine, receives, sends)
        else:
            lists = list(found.split(receives)), list(mine.split(sends))
            kind, text = error_of(dist.all_to_all, *lists)
        errors.append((kind, text))
        if kind is None:
            values = torch.tensor([float(rank + number) for rank in range(3)])
            assert torch.equal(found, values.repeat_interleave(3 + me.rank))
        else:
            assert found.unique().tolist() == [-1.0]
    return errors


def test_splits_that_do_not_fit():
    """The same errors as those of staged calls."""
    found = []
    for way in ({}, {"MOONCAKE_PEER_BYTES": "0"}):
        env = {"MOONCAKE_BLOCKING_WAIT": "1", **way}
        found.append(run(3, misfits_on_rank, env=env))
    assert found[0] == found[1]
    assert found[0][0] == found[0][1] == found[0][2]
    for number, (kind, text) in enumerate(found[0][0]):
        assert (kind is None) == (number % 3 == 0)
        if kind:
            assert kind == "DistBackendError"
            assert "the splits do not fit: rank" in text
            assert "Nothing was changed" in text


def late_error_on_rank(me):
    """A later call raises the error, once, if wait() returned before it was known."""
    dist.all_reduce(torch.ones(4))
    works, outputs = [], []
    for number in range(5):
        count = 2 + (number == 2 and me.rank == 0)
        outputs.append(torch.full((2 * count,), -1.0))
        mine = torch.full((4,), float(number + 10 * me.rank))
        works.append(dist.all_to_all_single(outputs[-1], mine, async_op=True))
    errors = []
    for work in works:
        try:
            work.wait()
        except dist.DistBackendError as error:
            errors.append(str(error))
    torch.accelerator.synchronize()
    for _ in range(3):
        kind, text = error_of(dist.all_reduce, torch.ones(4))
        errors += [text] if kind else []
    assert len(errors) == 1, errors
    assert "rank 1 sends 8 bytes to rank 0, which expects 12" in errors[0]
    assert [work.is_success() for work in works] == [True, True, False, True, True]
    for number, output in enumerate(outputs):
        values = [number, number + 10] if number != 2 else [-1]
        assert output.unique().tolist() == [float(value) for value in values]


def test_a_later_call_raises_that_splits_do_not_fit():
    run(2, late_error_on_rank)


def only(tensor):
    """The value of all elements."""
    values = tensor.unique().tolist()
    assert len(values) == 1, values
    return int(values[0])


def splits_in(number, size, count):
    """[from][to]. In some rounds a rank has no data for others, or much more than they."""
    return [
        [1 + (number * 7 + sender * 3 + to) % 5 * count for to in range(size)]
        for sender in range(size)
    ]


def exchange(me, number, count):
    """Returns what each rank's part has; all elements of a part are equal. 0: the rank is lost."""
    table = splits_in(number, me.size, count)
    mine = torch.cat(
        [torch.full((n,), 1.0 + number * 100 + 10 * me.rank + to)
         for to, n in enumerate(table[me.rank])]
    )  # fmt: skip
    receives = [row[me.rank] for row in table]
    found = torch.full((sum(receives),), -1.0)
    dist.all_to_all_single(found, mine, receives, table[me.rank])
    parts = [only(part) for part in found.split(receives)]
    for sender, value in enumerate(parts):
        assert value in (0, 1 + number * 100 + 10 * sender + me.rank), (number, sender, value)
    return [value != 0 for value in parts]


def until_one_dies(me, victim, count, fatal):
    found, after = [], 0
    while after < 12:
        number = len(found)
        if number == 6:
            me.board.set(f"going-{me.rank}")
        if fatal and me.rank == victim and number == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        found.append(exchange(me, number, count))
        after += not all(found[-1])
        assert number < 3000
    return found


def check_loss(results, victim):
    survivors = [found for rank, found in enumerate(results) if rank != victim]
    assert all(found == survivors[0] for found in survivors)
    size = len(results)
    last = max(number for number, parts in enumerate(survivors[0]) if all(parts))
    for number, parts in enumerate(survivors[0]):
        assert parts == [number <= last or rank != victim for rank in range(size)]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank(victim):
    ranks = crew(3)
    ranks.start(until_one_dies, victim, 40, True)
    results = ranks.results(dead=[victim])
    ranks.end()
    check_loss(results, victim)


@pytest.mark.parametrize("delay", [0.0, 0.004, 0.011, 0.023])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_within_a_call_of_many_pieces(victim, delay):
    ranks = crew(3, env={"MOONCAKE_BLOCKING_WAIT": "1"})
    ranks.start(until_one_dies, victim, LIMIT, False)
    ranks.board.wait_all("going", range(3))
    time.sleep(delay)
    ranks.kill(victim)
    results = ranks.results(dead=[victim])
    ranks.end()
    check_loss(results, victim)


def with_a_late_rank(me, count, late):
    for number in range(14):
        if me.rank == late and number == 6:
            me.board.set("stopping")
        assert all(exchange(me, number, count))


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("count", [40, LIMIT])
def test_a_stopped_rank_is_waited_for(count, late):
    ranks = crew(3)
    ranks.start(with_a_late_rank, count, late)
    ranks.board.wait("stopping")
    ranks.stop(late)
    time.sleep(0.3)  # longer than the patience of kernels
    ranks.cont(late)
    ranks.results()
    ranks.close()


class Recorded:
    """An all_to_all in a graph. The splits are those of the capture."""

    def __init__(self, me, count):
        self.me = me
        self.table = splits_in(1, me.size, count)
        self.receives = [row[me.rank] for row in self.table]
        self.input = torch.empty(sum(self.table[me.rank]))
        self.found = torch.empty(sum(self.receives))
        dist.all_reduce(torch.ones(4))  # sets up the kernels
        module = torch.get_device_module(DEVICE)
        self.graph = module.CUDAGraph()
        with module.graph(self.graph):
            doubled = self.input * 2
            dist.all_to_all_single(self.found, doubled, self.receives, self.table[me.rank])
            self.found += 1

    def replay(self, number):
        """Returns the ranks with data, as exchange() does."""
        for to, part in enumerate(self.input.split(self.table[self.me.rank])):
            part.fill_(1 + number * 100 + 10 * self.me.rank + to)
        self.graph.replay()
        parts = [only(part) - 1 for part in self.found.split(self.receives)]
        for sender, value in enumerate(parts):
            assert value in (0, 2 * (1 + number * 100 + 10 * sender + self.me.rank))
        return [value != 0 for value in parts]


def replays_until_one_dies(me, victim, count):
    recorded = Recorded(me, count)
    found, after = [], 0
    while after < 12:
        number = len(found)
        if me.rank == victim and number == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        call = exchange if number % 3 == 2 else lambda me, number, _: recorded.replay(number)
        found.append(call(me, number, count))
        after += not all(found[-1])
        assert number < 3000
    return found


# Inputs of graphs may be larger than the limit: the kernel finds the number of pieces.
@pytest.mark.parametrize("count", [40, LIMIT])
@pytest.mark.parametrize("victim", [0, 1])
def test_replays_across_a_loss(victim, count):
    ranks = crew(3)
    ranks.start(replays_until_one_dies, victim, count)
    results = ranks.results(dead=[victim])
    ranks.end()
    check_loss(results, victim)


def misfit_in_a_graph(me):
    dist.all_reduce(torch.ones(4))
    found, mine = torch.full((4 + 2 * me.rank,), -1.0), torch.ones(4)
    module = torch.get_device_module(DEVICE)
    graph = module.CUDAGraph()
    with module.graph(graph):
        dist.all_to_all_single(found, mine)
    graph.replay()
    torch.accelerator.synchronize()
    texts = []

    def fails():
        try:
            dist.all_reduce(torch.ones(4))
        except dist.DistBackendError as error:
            texts.append(str(error))
        return texts

    until(fails, "the error")
    assert "the splits of a replayed all_to_all do not fit" in texts[0], texts
    assert found.unique().tolist() == [-1.0]


def test_a_replay_with_splits_that_do_not_fit():
    run(2, misfit_in_a_graph)


def wrong_on_rank(me):
    """Arguments that are wrong on all ranks are refused before anything is enqueued."""
    four, five = torch.ones(4), torch.ones(5)
    for call in (
        lambda: dist.all_to_all_single(four, five, [2, 2], [2, 2]),
        lambda: dist.all_to_all_single(four, four, [2, 2], [5, -1]),
        lambda: dist.all_to_all_single(torch.ones(1).expand(4), four),
        lambda: dist.all_to_all([four], [four]),
    ):
        kind, _ = raised(call)
        assert kind == "ValueError"
    oracle.exercise("all_to_all_single", count=8)


def test_wrong_arguments():
    run(2, wrong_on_rank)
