"""Wrong arguments in the normal mode and in ElasticBuffer: an error on all ranks that names the
rank and the cause, and then the buffer goes on.

The buffers' timeout is far beyond the deadline of the tests, so a rank that waits for the others
fails them.
"""

from __future__ import annotations

import functools
import re
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import elastic_crew
import ep_crew
import harness
import normal_crew
import pytest
import torch
import torch.distributed as dist
from harness import raised
from normal_crew import HIDDEN, SIZE, layout

from mooncake.ep import Buffer, ElasticBuffer, functional
from mooncake.mooncake_elastic_buffer import ElasticBuffer as MooncakeElasticBuffer
from mooncake_backend import extension

EXPERTS, TOPK, MOST = 8, 3, elastic_crew.MOST
COUNTS = [40, 0, 33, 61]
TIMEOUT = timedelta(seconds=100 * harness.DEADLINE)
Arguments = dict[str, Any]
# The changes to right arguments, and the cause that all ranks learn.
Mistakes = dict[str, tuple[Callable[[Arguments], Arguments], str]]


def of(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda given: {name: change(given[name])}


def always(**changes: Any) -> Callable[[Arguments], Arguments]:
    return lambda _: changes


ROWS: Mistakes = {
    "x is no tensor": (always(x=[[1.0]]), "x must be a tensor, not list"),
    "x is None": (always(x=None), "x must be a tensor, not NoneType"),
    "x has one dimension": (of("x", torch.flatten), r"x has the sizes \[\d+\]"),
    "x is sparse": (of("x", lambda x: x.float().to_sparse()), "x is torch.sparse_coo"),
    "x is elsewhere": (of("x", lambda x: x.to("meta")), "x is torch.strided on meta"),
    "no channels": (of("x", lambda x: x[:, :0]), "x has the sizes"),
    "three parts": (of("x", lambda x: (x, x, x)), "x has 3 parts"),
    "scales of other tokens": (
        of("x", lambda x: (x, torch.ones(len(x) + 1, 2))), r"x has \d+ tokens, and scales for",
    ),
    "a float mask": (always(active_ranks=torch.ones(SIZE)), "active_ranks must be int32"),
    "a short mask": (always(active_ranks=torch.ones(2).int()), "active_ranks must be int32"),
    "no mask": (always(active_ranks=3), "active_ranks must be a tensor"),
    "a timeout in words": (always(timeout_us="1 s"), "'<'"),
}  # fmt: skip
CHOICES: Mistakes = {
    "topk_idx of other tokens": (
        of("topk_idx", lambda topk: torch.zeros(len(topk) + 1, TOPK).long()),
        r"topk_idx has the sizes",
    ),
    "topk_idx is float": (of("topk_idx", torch.Tensor.float), "topk_idx is float32"),
    "topk_idx is no tensor": (always(topk_idx=3), "topk_idx must be a tensor"),
    "weights are double": (
        of("topk_weights", torch.Tensor.double), "topk_weights is float64",
    ),
    "weights of other tokens": (
        always(topk_weights=torch.zeros(99, TOPK)), r"topk_weights is float32 \[99, 3\]",
    ),
    "no alignment": (always(expert_alignment=0), "expert_alignment is 0"),
    "an alignment in words": (always(expert_alignment="16"), "expert_alignment must be an int"),
}  # fmt: skip
NORMAL: Mistakes = {
    **ROWS,
    **CHOICES,
    "an expert that is not there": (
        of("topk_idx", lambda topk: torch.zeros(len(topk) or 1, TOPK).long() + EXPERTS),
        r"names expert 8 of 8|topk_idx has the sizes \[1, 3\]",
    ),
    "weights without experts": (always(topk_idx=None), "give both or none"),
    "no layout": (always(is_token_in_rank=None), "results of get_dispatch_layout"),
    "a layout of other tokens": (
        always(is_token_in_rank=torch.ones(99, SIZE).bool()), "is_token_in_rank is bool",
    ),
    "a layout of numbers": (
        of("is_token_in_rank", torch.Tensor.int), "is_token_in_rank is int32",
    ),
    "counts in a list": (
        always(num_tokens_per_expert=[1] * EXPERTS), "num_tokens_per_expert must be a tensor",
    ),
    "counts below 0": (
        of("num_tokens_per_expert", lambda counts: counts - 99), "num_tokens_per_expert has the",
    ),
    "worst tokens below 0": (always(num_worst_tokens=-1), "num_worst_tokens is -1"),
    "too many worst tokens": (always(num_worst_tokens=2**62), f"num_worst_tokens is {2**62}"),
    "too few worst tokens": (always(num_worst_tokens=1), "num_worst_tokens is 1"),
    "no configuration": (always(config="fast"), "AttributeError.*num_sms"),
    "a handle of parts": (always(handle=(1, 2)), "handle must be that of a dispatch"),
    "a handle of nothing": (always(handle=()), "handle must be that of a dispatch"),
    "no event": (always(previous_event=1), "AttributeError.*current_stream_wait"),
}  # fmt: skip
ELASTIC: Mistakes = {
    **ROWS,
    **CHOICES,
    "an expert below -1": (
        of("topk_idx", lambda topk: torch.zeros(len(topk) or 1, TOPK).long() - 2),
        r"names expert -2 of 8|topk_idx has the sizes \[1, 3\]",
    ),
    "no experts": (always(num_experts=0), "num_experts is 0"),
    "experts without end": (always(num_experts=2**62), f"num_experts is {2**62}"),
    "tokens without end": (
        always(num_max_tokens_per_rank=2**62), f"num_max_tokens_per_rank is {2**62}",
    ),
    "experts in words": (always(num_experts="8"), "num_experts must be an int"),
    "neither experts nor a handle": (always(topk_idx=None), "give a handle, or topk_idx"),
    "tokens below 0": (always(num_max_tokens_per_rank=-1), "num_max_tokens_per_rank is -1"),
    "more tokens than promised": (
        lambda _: {
            "x": torch.zeros(MOST + 1, HIDDEN).bfloat16(),
            "topk_idx": torch.zeros(MOST + 1, TOPK).long(),
            "topk_weights": None,
        },
        f"x has {MOST + 1} tokens, num_max_tokens_per_rank is {MOST}",
    ),
    "padding without expansion": (always(do_zero_padding=True), "do_zero_padding needs"),
    "statistics of other experts": (
        always(cumulative_local_expert_recv_stats=torch.zeros(9).int()),
        "cumulative_local_expert_recv_stats is int32",
    ),
    "a handle of parts": (always(handle=(1, 2)), "handle must be the EPHandle"),
}  # fmt: skip
SUMS: Mistakes = {
    "x is no tensor": (always(x=None), "x must be a tensor"),
    "x is float32": (of("x", torch.Tensor.float), "x is float32"),
    "x is elsewhere": (of("x", lambda x: x.to("meta")), "on meta"),
    "other channels": (of("x", lambda x: x[:, 1:]), "x is bfloat16"),
    "too few rows": (of("x", lambda x: x[1:]), "x has .* rows, the dispatch received"),
    "double weights": (of("topk_weights", torch.Tensor.double), "topk_weights is float64"),
    "a bias of other tokens": (
        always(bias=torch.zeros(99, HIDDEN).bfloat16()), r"bias is bfloat16 \[99",
    ),
    "a double bias": (always(bias=torch.zeros(99, HIDDEN).double()), "bias is float64"),
    "a bias in words": (always(bias="none"), "bias must be a tensor"),
    "too many biases": (
        always(bias=(torch.zeros(1, HIDDEN).bfloat16(),) * 3), "bias has 3 tensors",
    ),
    "a float mask": (always(active_ranks=torch.ones(SIZE)), "active_ranks must be int32"),
    "no handle": (always(handle=None), "handle must be the|handle must be that of a dispatch"),
    "another buffer's handle": (
        lambda given: {"handle": given["of_other"]}, "of a dispatch of another buffer",
    ),
}  # fmt: skip
OF_A_TUPLE: Mistakes = {
    "copied parts of a handle": (
        of("handle", lambda handle: tuple(one.clone() for one in handle)), "keep the handle as it",
    ),
}  # fmt: skip
AGAIN: Mistakes = {
    **ROWS,
    "other tokens": (
        of("x", lambda x: torch.zeros(len(x) + 1, x.size(1)).bfloat16()),
        "those of the handle's dispatch were",
    ),
    "another buffer's handle": (
        lambda given: {"handle": given["of_other"]}, "of a dispatch of another buffer",
    ),
}  # fmt: skip


def check_mistakes(
    me: harness.Rank,
    by: Sequence[int],
    name: str,
    function: Callable[..., Any],
    right: Arguments,
    mistakes: Mistakes,
    then: Callable[[], None],
) -> None:
    """Each mistake by these ranks ends the call on all ranks, and then they go on."""
    arguments = {key: value for key, value in right.items() if key != "of_other"}
    for mistake, (change, cause) in mistakes.items():
        wrong = {**arguments, **(change(right) if me.rank in by else {})}
        try:
            kind, text = raised(function, **wrong)
        except AssertionError as error:
            raise AssertionError(mistake) from error
        begins = f"rank {me.rank}, {name}: "
        if me.rank not in by:
            assert kind == "ValueError", (mistake, kind, text)
            begins = f"rank {by[0]} could not go on: {name}: "
        elif kind == "AttributeError":
            begins, cause = "", ""  # as Python raises it
        assert re.search(f"(?s){begins}.*({cause})", text), (mistake, kind, text)
        then()


def go_on(me: harness.Rank, buffer: Buffer, seeds: Any) -> None:
    """A round trip with new data."""
    given = normal_crew.drawn(next(seeds), COUNTS, EXPERTS)
    mine = given[me.rank]
    found = buffer.dispatch(
        mine.x, **layout(buffer, mine.topk_idx, EXPERTS),
        topk_idx=mine.topk_idx, topk_weights=mine.weights,
    )  # fmt: skip
    normal_crew.check_dispatch(me, found, given, EXPERTS)
    answers = normal_crew.answers_of(given, EXPERTS)
    combined = buffer.combine(answers[me.rank], found[4])
    normal_crew.check_combine(me, combined, answers, given, EXPERTS, buffer.missing_contributions)


def go_on_elastic(me: harness.Rank, buffer: ElasticBuffer, expand: bool, seeds: Any) -> None:
    form = elastic_crew.Form(expand, True, 1, False)
    given = ep_crew.inputs(next(seeds), COUNTS, HIDDEN, TOPK, EXPERTS)
    mine, expected = given[me.rank], elastic_crew.Expected(me.rank, given, EXPERTS)
    found = buffer.dispatch(mine.x, mine.topk_idx, mine.weights, **form.arguments(EXPERTS))
    elastic_crew.check_dispatch(found, form, expected)
    answers = elastic_crew.answers_of(given, EXPERTS, expand)
    combined = buffer.combine(elastic_crew.given_to_combine(answers[me.rank], found[3]), found[3])
    elastic_crew.check_combine(
        buffer, combined, answers, expected, rounds_once=not buffer.allow_multiple_reduction
    )


def finished(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, in the background, and its end."""

    def function(**arguments: Any) -> None:
        call(**arguments)[2].current_stream_wait()

    return function


def normal_on_rank(me: harness.Rank, by: Sequence[int], num_bytes: int) -> None:
    buffer = Buffer(dist.group.WORLD, num_bytes, timeout=TIMEOUT)
    other = Buffer(dist.group.WORLD, num_bytes, timeout=TIMEOUT)
    mine = normal_crew.drawn(1, COUNTS, EXPERTS)[me.rank]
    if me.rank == 1:  # it has no tokens
        assert len(mine.x) == 0
    call = {
        "x": mine.x,
        **layout(buffer, mine.topk_idx, EXPERTS),
        "topk_idx": mine.topk_idx,
        "topk_weights": mine.weights,
    }
    seeds = iter(range(100, 1000))
    then = functools.partial(go_on, me, buffer, seeds)
    check_mistakes(me, by, "dispatch", buffer.dispatch, call, NORMAL, then)
    found, of_other = buffer.dispatch(**call), other.dispatch(**call)
    handles = {"handle": found[4], "of_other": of_other[4]}
    assert (len(found[4].route.pieces) > 1) == (num_bytes == normal_crew.LITTLE)
    again = {"x": mine.x, **handles}
    check_mistakes(me, by, "dispatch", buffer.dispatch, again, AGAIN, then)
    sums = {"x": found[0], "topk_weights": found[2], **handles}
    check_mistakes(me, by, "combine", buffer.combine, sums, {**SUMS, **OF_A_TUPLE}, then)
    # In the background the pieces behind the error send nothing.
    background = finished(functools.partial(buffer.combine, async_finish=True))
    check_mistakes(me, by, "combine", background, sums, SUMS, then)
    # The handles work as before.
    assert torch.equal(buffer.dispatch(mine.x, handle=found[4])[0], found[0])
    buffer.combine(found[0], found[4])
    assert not buffer.missing_contributions.any()
    gradients = {
        "buffer": buffer, "x": mine.x, "topk_idx": mine.topk_idx, "topk_weights": mine.weights,
        "num_experts": EXPERTS,
    }  # fmt: skip
    ghosts: Mistakes = {
        "an expert that is not there": (
            always(topk_idx=torch.full((9, TOPK), EXPERTS)), "names expert 8 of 8",
        )
    }  # fmt: skip
    check_mistakes(me, by, "dispatch", functional.dispatch, gradients, ghosts, then)


# The layouts of ranks, and those with the wrong arguments.
WHERE = pytest.mark.parametrize(
    ("layout", "by"),
    [("shm", [0]), ("shm", [2]), ("shm", list(range(SIZE))), ("hosts", [1])],
    ids=["first", "one", "all", "hosts"],
)


@WHERE
@pytest.mark.parametrize("num_bytes", [normal_crew.AMPLE, normal_crew.LITTLE])
def test_mistakes_in_the_normal_mode(layout, num_bytes, by, crews):
    crews.get(layout, SIZE).call(normal_on_rank, by, num_bytes)


def elastic_on_rank(me: harness.Rank, by: Sequence[int], expand: bool, once: bool) -> None:
    make = functools.partial(
        ElasticBuffer, dist.group.WORLD, elastic_crew.LITTLE, timeout=TIMEOUT,
        num_max_tokens_per_rank=MOST, allow_multiple_reduction=not once,
    )  # fmt: skip
    buffer, other = make(), make()
    mine = ep_crew.inputs(1, COUNTS, HIDDEN, TOPK, EXPERTS)[me.rank]
    call = {
        "x": mine.x, "topk_idx": mine.topk_idx, "topk_weights": mine.weights,
        "num_experts": EXPERTS,
    }  # fmt: skip
    seeds = iter(range(100, 1000))
    then = functools.partial(go_on_elastic, me, buffer, expand, seeds)
    check_mistakes(me, by, "dispatch", buffer.dispatch, call, ELASTIC, then)
    found, of_other = (one.dispatch(**call, do_expand=expand) for one in (buffer, other))
    handles = {"handle": found[3], "of_other": of_other[3]}
    again = {"x": mine.x, "do_expand": expand, **handles}
    differing: Mistakes = {
        "another form": (always(do_expand=not expand), "do_expand is"),
        "other experts": (always(num_experts=9), "num_experts is 9"),
        "experts beside the handle": (always(topk_idx=mine.topk_idx), "the handle has its own"),
        "sizes beside the handle": (always(do_cpu_sync=True), "it has the sizes"),
        "other weights": (always(topk_weights=torch.zeros(9, 9)), "topk_weights is float32"),
    }
    check_mistakes(me, by, "dispatch", buffer.dispatch, again, {**AGAIN, **differing}, then)
    sums = {"x": found[0], "topk_weights": None if once and expand else found[2], **handles}
    mistakes = {
        name: one
        for name, one in SUMS.items()
        if sums["topk_weights"] is not None or "weights" not in name
    }
    if sums["topk_weights"] is None:
        mistakes["weights"] = (always(topk_weights=found[2]), "only with allow_multiple_reduction")
    check_mistakes(me, by, "combine", buffer.combine, sums, mistakes, then)
    background = finished(functools.partial(buffer.combine, async_with_compute_stream=True))
    check_mistakes(me, by, "combine", background, sums, mistakes, then)
    buffer.combine(found[0], found[3])
    assert not buffer.missing_contributions.any()


@WHERE
@pytest.mark.parametrize(
    ("expand", "once"), [(False, False), (True, False), (True, True)],
    ids=["compact", "expanded", "once"],
)  # fmt: skip
def test_mistakes_in_elastic_buffers(layout, expand, once, by, crews):
    crews.get(layout, SIZE).call(elastic_on_rank, by, expand, once)


def mooncakes_on_rank(me: harness.Rank) -> None:
    """A rank that alone has begun a new generation."""
    buffer = MooncakeElasticBuffer(dist.group.WORLD, elastic_crew.LITTLE, timeout=TIMEOUT)
    mine = ep_crew.inputs(1, COUNTS, HIDDEN, TOPK, EXPERTS)[me.rank]
    call = {"num_experts": EXPERTS, "num_max_tokens_per_rank": MOST}
    rows, _, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, **call)
    if me.rank == 2:
        buffer.update_ep_member()
    for function in (
        functools.partial(buffer.dispatch, mine.x, handle=handle),
        functools.partial(buffer.combine, rows, handle),
    ):
        kind, text = raised(function)
        assert kind == ("RuntimeError" if me.rank == 2 else "ValueError")
        assert "rank 2: the handle is of an obsolete generation" in text
    again = buffer.dispatch(mine.x, mine.topk_idx, **call)
    assert torch.equal(again[0], rows)


def test_a_generation_of_one_rank(crews):
    crews.get("shm", SIZE).call(mooncakes_on_rank)


# ---- arguments that are right, but not the same on all ranks


def differences_on_rank(me: harness.Rank, odd: int) -> None:
    buffer = Buffer(dist.group.WORLD, normal_crew.AMPLE, timeout=TIMEOUT)
    seeds = iter(range(100, 1000))
    mine = normal_crew.drawn(1, COUNTS, EXPERTS)[me.rank]
    is_odd = me.rank == odd
    where = layout(buffer, mine.topk_idx, EXPERTS)
    more = layout(buffer, mine.topk_idx, EXPERTS + 1)
    topk = {"topk_idx": mine.topk_idx, "topk_weights": mine.weights}
    wide = {name: torch.cat([one, one[:, :1]], dim=1) for name, one in topk.items()}
    at, scales = f"on rank {odd}", torch.ones(len(mine.x), 2)
    found, later = (buffer.dispatch(mine.x, **where, **topk) for _ in range(2))
    differing: list[tuple[Callable[..., Any], Arguments, Arguments, str]] = [
        (buffer.dispatch, {"x": mine.x, **where}, {"x": mine.x.half()},
         f"x differs between the ranks: .*float16 .n, 96. {at}"),
        (buffer.dispatch, {"x": mine.x, **where}, {"x": mine.x[:, 1:]},
         f"x differs between the ranks: .*bfloat16 .n, 95. {at}"),
        (buffer.dispatch, {"x": mine.x, **where}, {"x": (mine.x, scales)},
         f"the scales of x differs between the ranks: .*float32 .n, 2. {at}"),
        (buffer.dispatch, {"x": mine.x, **where, **topk}, wide,
         f"topk_idx differs between the ranks: .*int64 .n, 4. {at}"),
        (buffer.dispatch, {"x": mine.x, **where, **topk},
         {"topk_idx": mine.topk_idx.int()}, f"topk_idx differs between .*int32 .n, 3. {at}"),
        (buffer.dispatch, {"x": mine.x, **where, **topk},
         {"topk_idx": None, "topk_weights": None}, f"topk_idx differs between .*none {at}"),
        (buffer.dispatch, {"x": mine.x, **where}, more, "called different operations"),
        (buffer.dispatch, {"x": mine.x, "handle": found[4]}, {"x": mine.x.half()},
         "called different operations"),
        (buffer.dispatch, {"x": mine.x, "handle": found[4]}, {"handle": later[4]},
         "called different operations"),
        (buffer.dispatch, {"x": mine.x, "handle": found[4]}, {"handle": None, **where},
         "called different operations"),
        (buffer.combine, {"x": found[0], "handle": found[4]}, {"handle": later[4]},
         "combines the rows of dispatch"),
        (buffer.combine, {"x": found[0], "handle": found[4]}, {"topk_weights": found[2]},
         "called different operations"),
    ]  # fmt: skip
    for function, arguments, odds, cause in differing:
        _, text = raised(function, **{**arguments, **(odds if is_odd else {})})
        assert re.search(cause, text), (cause, text)
        go_on(me, buffer, seeds)


@pytest.mark.parametrize("odd", [0, 2])
def test_differences_between_ranks(odd, crews):
    crews.get("shm", SIZE).call(differences_on_rank, odd)


# ---- mistakes beside losses and lateness


def late_on_rank(me: harness.Rank, name: str, late: int) -> None:
    """The rank with the wrong arguments was skipped. The others have had their results."""
    buffer = Buffer(dist.group.WORLD, normal_crew.AMPLE, timeout=TIMEOUT)
    given = normal_crew.drawn(9, COUNTS, EXPERTS)
    mine, left = given[me.rank], [rank for rank in range(SIZE) if rank != late]
    call = {
        **layout(buffer, mine.topk_idx, EXPERTS),
        "topk_idx": mine.topk_idx, "topk_weights": mine.weights, "timeout_us": 300_000,
    }  # fmt: skip
    whole = buffer.dispatch(mine.x, **{**call, "timeout_us": 100_000_000})
    answers = normal_crew.answers_of(given, EXPERTS, left)
    if me.rank == late:
        me.board.wait_all(f"{name}-done", left)
        assert "x must be a tensor" in raised(buffer.dispatch, None, **call)[1]
        assert "x must be a tensor" in raised(buffer.combine, None, whole[4], timeout_us=9)[1]
    else:
        found = buffer.dispatch(mine.x, **call)
        normal_crew.check_dispatch(me, found, given, EXPERTS, active=left)
        combined = buffer.combine(answers[me.rank], found[4], timeout_us=300_000)
        normal_crew.check_combine(
            me, combined, answers, given, EXPERTS, buffer.missing_contributions,
            active=left, still_active=left,
        )  # fmt: skip
        me.board.set(f"{name}-done-{me.rank}")
    go_on(me, buffer, iter(range(20, 30)))


@pytest.mark.parametrize("late", [0, 3])
def test_a_mistake_of_a_rank_that_was_skipped(late, crews):
    crews.get("shm", SIZE).call(late_on_rank, f"mistake-{late}", late)


def dying_on_rank(me: harness.Rank, where: str) -> None:
    """A rank announces an error and dies on the way, or another one dies then."""
    buffer = Buffer(dist.group.WORLD, normal_crew.AMPLE, timeout=TIMEOUT)
    mine = normal_crew.drawn(3, COUNTS, EXPERTS)[me.rank]
    call = layout(buffer, mine.topk_idx, EXPERTS)
    buffer.dispatch(mine.x, **call)
    victim = 3
    me.board.set(f"ready-{me.rank}")
    me.board.wait_all("ready", range(SIZE))
    wrong = 3 if where == "announcing" else 1
    if me.rank == victim:
        extension.load().arm_failpoint("park", 1, False)
    if where == "announcing" and me.rank != victim:
        # The error counts if it came before the end.
        x = mine.x
        try:
            found = buffer.dispatch(x, **call)
            assert found[4].route.participants == [True] * 3 + [False]
        except ValueError as error:
            assert "rank 3 could not go on: dispatch: x must be a tensor" in str(error)  # noqa: PT017
    else:
        time.sleep(0.3 * (me.rank == wrong))  # the others are in the call by then, as a rule
        _, text = raised(buffer.dispatch, None if me.rank == wrong else mine.x, **call)
        assert "x must be a tensor" in text
    if me.rank == victim:
        signal.raise_signal(signal.SIGKILL)
    given = normal_crew.drawn(4, COUNTS, EXPERTS)
    mine, left = given[me.rank], range(3)
    found = buffer.dispatch(
        mine.x, **layout(buffer, mine.topk_idx, EXPERTS),
        topk_idx=mine.topk_idx, topk_weights=mine.weights,
    )  # fmt: skip
    normal_crew.check_dispatch(me, found, given, EXPERTS, active=left)


@pytest.mark.parametrize("where", ["announcing", "hearing"])
def test_losses_beside_a_mistake(where):
    with harness.starting(SIZE, dying_on_rank, where) as ranks:
        ranks.results(dead=[3])
