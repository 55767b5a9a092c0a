"""Dispatch and combine in graphs of a device, replayed also across the loss of ranks."""

from __future__ import annotations

import signal

import ep_crew
import torch
from conftest import DEVICE
from ep_crew import check_combine, check_dispatch, my_answers
from ep_kernel_ranks import (
    BF16,
    COUNTS,
    EXPERTS,
    HIDDEN,
    HOOK,
    OWNERS,
    SIZE,
    TOKENS,
    TOPK,
    a_buffer,
    crew,
    dispatch,
    inputs,
    run,
)
from harness import raised, until

from mooncake.ep import reference


class Decode:
    """A step of a model in a graph: rows to the experts, which send them back as they are."""

    def __init__(self, me, buffer, **how):
        self.me, self.buffer, self.how = me, buffer, how
        self.x = torch.empty(COUNTS[me.rank], HIDDEN, dtype=torch.bfloat16)
        self.topk_idx = torch.zeros(COUNTS[me.rank], TOPK, dtype=torch.int64)
        self.weights = torch.empty(COUNTS[me.rank], TOPK)
        self.active = torch.ones(SIZE, dtype=torch.int32)
        self.fill(inputs(0))
        self.step()  # sets up the kernels
        self.graph = torch.get_device_module(DEVICE).CUDAGraph()
        with torch.get_device_module(DEVICE).graph(self.graph):
            self.step()

    def fill(self, given):
        mine = given[self.me.rank]
        self.x.copy_(mine.x)
        self.topk_idx.copy_(mine.topk_idx)
        self.weights.copy_(mine.weights)
        self.active.fill_(1)

    def step(self):
        hooked = {"active_ranks": self.active, **HOOK, **self.how}
        self.found = dispatch(self.buffer, self, **hooked)
        self.found[4]()
        self.combined, self.event, hook = self.buffer.low_latency_combine(
            self.found[0], self.topk_idx, self.weights, self.found[2], **hooked
        )
        hook()
        self.missing = self.event.missing_contributions

    def replay(self, given):
        self.fill(given)
        self.graph.replay()

    def check(self, given, active):
        check_dispatch(self.me, self.found, given, TOKENS, EXPERTS, active=active, **BF16)
        given = ep_crew.on_cpu(given)
        with torch.device("cpu"):
            of_all = []
            for rank in range(SIZE):
                mine = reference.local_experts(OWNERS, rank)
                rows = torch.zeros(len(mine), SIZE * TOKENS, HIDDEN, dtype=torch.bfloat16)
                arrived = reference.dispatch(
                    rank, [one.x for one in given], [one.topk_idx for one in given], OWNERS,
                    active=active,
                )  # fmt: skip
                for local, one in enumerate(arrived):
                    rows[local, : len(one.rows)] = one.rows
                of_all.append(rows)
            expected, lacks = reference.combine(
                self.me.rank, of_all, [one.topk_idx for one in given],
                given[self.me.rank].weights, OWNERS, active=active,
            )  # fmt: skip
        assert self.missing.tolist() == lacks.tolist()
        ep_crew.same_bits(self.combined, expected)


def replays(me):
    buffer = a_buffer()
    decode = Decode(me, buffer)
    for seed in range(20):
        given = inputs(seed)
        decode.replay(given)
        if seed % 4 == 0:  # calls between replays, of other rows
            ep_crew.round_trip(me, buffer, inputs(seed + 1), TOKENS, EXPERTS)
        decode.check(given, range(SIZE))
    buffer.destroy()


def test_replays():
    run(replays)


def replays_across_a_loss(me):
    """A replay is one with the victim or one without it, the same on all survivors, and tells the
    missing contributions."""
    buffer = a_buffer()
    decode = Decode(me, buffer)
    me.board.set(f"running-{me.rank}")
    everybody, seen, after = list(range(SIZE)), [], 0
    while after < 3:
        given = inputs(len(seen) % 7)
        decode.replay(given)
        active = [rank for rank in everybody if decode.active.tolist()[rank]]
        rows = decode.found[1].tolist()  # of the dispatch, which may have been one with the victim
        with torch.device("cpu"):
            arrived = reference.dispatch(
                me.rank, [one.x.cpu() for one in given], [one.topk_idx.cpu() for one in given],
                OWNERS,
            )  # fmt: skip
        is_between = active != everybody and rows == [len(one.rows) for one in arrived]
        if not is_between:
            decode.check(given, active)
        seen.append((active, is_between))
        after += active == [0, 2] and not is_between
    buffer.destroy()
    return seen


def test_replays_go_on_after_a_loss():
    with crew() as ranks:
        ranks.start(replays_across_a_loss)
        ranks.board.wait_all("running", range(SIZE))
        ranks.signal(1, signal.SIGKILL)
        first, _, last = ranks.results(dead=[1])
        ranks.broken = True
    assert [active for active, _ in first] == [active for active, _ in last]


def replays_of_masks(me):
    """A graph reads the Buffer's mask when it is replayed."""
    buffer = a_buffer()
    decode = Decode(me, buffer)
    for seed in range(6):
        masked = seed % 3 if seed % 2 else None
        if masked is not None and me.rank != masked:
            buffer.low_latency_update_mask_buffer(masked, True)
        given = inputs(seed)
        decode.replay(given)
        decode.check(given, [rank for rank in range(SIZE) if rank != masked])
        buffer.low_latency_clean_mask_buffer()
    buffer.destroy()


def test_replays_read_the_mask():
    run(replays_of_masks)


def replay_before_a_hook(me):
    """A graph that is replayed between a call and its hook would overwrite the call's rows."""
    buffer = a_buffer()
    decode = Decode(me, buffer)
    given = inputs(1)
    found = dispatch(buffer, given[me.rank], **HOOK)
    decode.graph.replay()
    found[4]()
    kind, text = raised(lambda: until(lambda: found[4]() is not None, "the error"))
    assert (kind, "between a call and its hook" in text) == ("ValueError", True), text
    torch.accelerator.synchronize()
    buffer.destroy()


def test_a_replay_before_a_hook():
    with crew() as ranks:
        ranks.call(replay_before_a_hook)


def refused_captures(me):
    """Calls that cannot be recorded say so, and the next call is as before."""
    graphs = torch.get_device_module(DEVICE)
    buffer = a_buffer()
    given = inputs(7)
    mine = given[me.rank]

    def recorded(call):
        with graphs.graph(graphs.CUDAGraph()):
            return raised(call)

    kind, text = recorded(lambda: dispatch(buffer, mine))
    assert (kind, "before the capture" in text) == ("NotImplementedError", True), text
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    kind, text = recorded(
        lambda: buffer.low_latency_dispatch(mine.x, mine.topk_idx, TOKENS, EXPERTS - 1, **BF16)
    )
    assert (kind, "other experts" in text) == ("NotImplementedError", True), text
    found = dispatch(buffer, mine, **HOOK)
    kind, text = recorded(lambda: dispatch(buffer, mine))
    assert (kind, "has not been received" in text) == ("NotImplementedError", True), text
    found[4]()
    check_dispatch(me, found, given, TOKENS, EXPERTS, **BF16)
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    buffer.destroy()


def test_captures_that_are_refused():
    run(refused_captures)


def rows_before_a_graph(me):
    """Rows that were written into published memory before a capture: its replays have other
    numbers than calls, so a combine of these rows is refused."""
    buffer = a_buffer()
    given = inputs(10)
    mine = given[me.rank]
    found = dispatch(buffer, mine)
    rows = check_dispatch(me, found, given, TOKENS, EXPERTS, **BF16)
    published = buffer.get_next_low_latency_combine_buffer(found[2])
    published.copy_(rows)
    module = torch.get_device_module(DEVICE)
    graph = module.CUDAGraph()
    with module.graph(graph):
        dispatch(buffer, mine)
    graph.replay()
    given_back = (rows, mine.topk_idx, mine.weights, found[2])
    kind, text = raised(buffer.low_latency_combine, *given_back, zero_copy=True)
    assert (kind, "another operation" in text) == ("ValueError", True), text
    plain = buffer.get_next_low_latency_combine_buffer(found[2])  # is copied
    plain.copy_(my_answers(me, rows, OWNERS))
    combined, event, _ = buffer.low_latency_combine(
        torch.zeros_like(rows), mine.topk_idx, mine.weights, found[2], zero_copy=True
    )
    check_combine(me, combined, event.missing_contributions, given, TOKENS, EXPERTS)
    buffer.destroy()


def test_rows_in_published_memory_before_a_graph():
    run(rows_before_a_graph)


def a_capture_that_fails(me):
    """The program's own error ends a capture before the hook of a recorded call. Later calls and
    captures are as before."""
    buffer = a_buffer()
    decode = Decode(me, buffer)
    given = inputs(11)
    module = torch.get_device_module(DEVICE)

    def fails():
        with module.graph(module.CUDAGraph()):
            dispatch(buffer, given[me.rank], **HOOK)
            raise KeyError("the program's")

    assert raised(fails)[0] == "KeyError"
    ep_crew.round_trip(me, buffer, given, TOKENS, EXPERTS)
    decode.replay(given)
    decode.check(given, range(SIZE))
    again = Decode(me, buffer)
    again.replay(given)
    again.check(given, range(SIZE))
    buffer.destroy()


def test_a_capture_that_fails():
    run(a_capture_that_fails)
