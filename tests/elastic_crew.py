"""ElasticBuffer against mooncake.ep.reference, for functions of ranks."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import ep_crew
import torch

from mooncake.ep import ElasticBuffer, EPHandle, reference

SIZE, HIDDEN, TOPK, MOST = 4, 256, 3, 96
AMPLE, LITTLE = 4 << 20, 2 << 20
# Of answers: with these a sum has other bits in another order.
FACTORS = [3.0, 2.0**25, -(2.0**25), 5.0]
LONG = 4096  # channels with which large calls run in pieces in LITTLE


class Form(NamedTuple):
    expand: bool
    sync: bool
    alignment: int
    fp8: bool

    def arguments(self, experts: int) -> dict[str, Any]:
        return {
            "num_experts": experts,
            "num_max_tokens_per_rank": MOST,
            "expert_alignment": self.alignment,
            "do_expand": self.expand,
            "do_cpu_sync": self.sync,
        }


FORMS = [Form(*one) for one in itertools.product((False, True), (True, False), (1, 16), (False,))]
FORMS += [Form(False, True, 1, True), Form(True, True, 16, True), Form(True, False, 1, True)]


def local_of(chosen: torch.Tensor, mine: list[int]) -> list[int]:
    return [mine.index(one) if one in mine else -1 for one in chosen.tolist()]


class Expected:
    """What a rank receives."""

    def __init__(self, rank: int, given: Any, experts: int, active: Any = None) -> None:
        self.rank, self.size, self.given = rank, len(given), ep_crew.on_cpu(given)
        self.active = range(self.size) if active is None else active
        self.chosen = [one.topk_idx for one in self.given]
        self.owners = reference.default_owners(experts, self.size)
        self.rows = reference.normal_rows(self.chosen, self.owners, rank, self.active)
        self.mine = reference.local_experts(self.owners, rank)
        self.local = [
            local_of(self.chosen[source][token], self.mine) for source, token in self.rows
        ]

    def of(self, what: Any) -> list[torch.Tensor]:
        return [what(self.given[source])[token] for source, token in self.rows]


def check_dispatch(found: Any, form: Form, expected: Expected) -> None:
    recv_x, recv_idx, recv_weights, handle, _ = found
    rows, rank, size = expected.rows, expected.rank, expected.size
    count = len(rows) if form.sync else size * MOST
    counts = [sum(one.count(e) for one in expected.local) for e in range(len(expected.mine))]
    room = [-(-one // form.alignment) * form.alignment for one in counts]
    assert (handle.do_expand, handle.expert_alignment) == (form.expand, form.alignment)
    assert handle.num_recv_tokens == count
    assert handle.num_recv_tokens_per_expert_list == (room if form.sync else [])
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    ends = [sum(source <= r for source, _ in rows) for r in range(size)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == ends
    metadata = handle.recv_src_metadata.cpu()
    assert (metadata.dtype, tuple(metadata.shape)) == (torch.int32, (count, TOPK + 2))
    metadata = metadata[: len(rows)]
    assert metadata[:, 0].tolist() == [source * MOST + token for source, token in rows]
    for (source, _), local, row in zip(rows, expected.local, metadata[:, 1].tolist(), strict=True):
        assert row == source * TOPK + max(p for p, one in enumerate(local) if one >= 0)
    fields = {"x": recv_x}
    parts = {"x": expected.of(lambda one: one.x)}
    if form.fp8:
        fields = dict(zip(("x", "scales"), recv_x, strict=True))
        parts["x"] = expected.of(lambda one: ep_crew.cast(one.x)[0].float())
        parts["scales"] = expected.of(lambda one: ep_crew.cast(one.x)[1])
    assert ep_crew.are_at_home(recv_weights, *fields.values())
    weights = expected.of(lambda one: one.weights)
    if not form.expand:
        assert handle.psum_num_recv_tokens_per_expert.tolist() == list(itertools.accumulate(room))
        assert tuple(recv_idx.shape) == tuple(recv_weights.shape) == (count, TOPK)
        assert recv_idx[: len(rows)].tolist() == expected.local
        assert (recv_idx[len(rows) :] == -1).all()
        for row, local in enumerate(expected.local):
            here = torch.tensor(local, device="cpu") >= 0
            assert torch.equal(recv_weights[row].cpu(), weights[row].masked_fill(~here, 0))
        for name, rows_of in parts.items():
            assert len(fields[name]) == count
            got = fields[name][: len(rows)].cpu()
            if rows_of:
                assert torch.equal(got.float(), torch.stack(rows_of).float()), name
        return
    assert recv_idx is None
    slots, ends = reference.expanded_rows(
        expected.chosen, expected.owners, rank, expected.active, form.alignment
    )
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    assert metadata[:, 2:].tolist() == slots
    total = sum(room)
    if not form.sync:
        worst = size * MOST * min(TOPK, len(counts)) + (form.alignment - 1) * len(counts)
        total = max(sum(room), -(-worst // form.alignment) * form.alignment)
    assert tuple(recv_weights.shape) == (total,)
    used = set()
    for row, of_choices in enumerate(slots):
        for place, slot in enumerate(of_choices):
            if slot < 0:
                continue
            used.add(slot)
            assert recv_weights[slot].item() == weights[row][place].item()
            for name, rows_of in parts.items():
                assert torch.equal(fields[name][slot].cpu().float(), rows_of[row].float()), name
    gaps = sorted(set(range(sum(room))) - used)
    assert not recv_weights.cpu()[gaps].any()
    for field in fields.values():
        assert len(field) == total
        assert not field[: sum(room)].cpu().float()[gaps].any()


def answers_of(given: Any, experts: int, expand: bool, active: Any = None) -> list[torch.Tensor]:
    """The answers of each rank to its rows, with `expand` one for each choice."""
    made = []
    for rank in range(len(given)):
        there = active if active is None or rank in active else None
        expected = Expected(rank, given, experts, there)
        rows = [one * FACTORS[rank] for one in expected.of(lambda one: one.x)]
        if expand:
            rows = [torch.stack([row * FACTORS[place] for place in range(TOPK)]) for row in rows]
        hidden = given[0].x.size(1)
        shape = (0, TOPK, hidden) if expand else (0, hidden)
        empty = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
        made.append(torch.stack(rows) if rows else empty)
    return made


def given_to_combine(answers: torch.Tensor, handle: EPHandle) -> torch.Tensor:
    """The answers in the places of the received rows; other rows are NaN."""
    count = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
    hidden = answers.size(-1)
    x = torch.full((count, hidden), float("nan"), dtype=torch.bfloat16, device="cpu")
    if handle.do_expand:
        slots = handle.recv_src_metadata[: len(answers), 2:].cpu()
        x[slots[slots >= 0].long()] = answers[slots >= 0]
    else:
        x[: len(answers)] = answers
    return x.to(torch.get_default_device())


def check_combine(
    buffer: ElasticBuffer, combined: Any, answers: Any, expected: Expected, **how: Any
) -> None:
    with torch.device("cpu"):
        sums, missing = reference.elastic_combine(
            expected.rank, answers, expected.chosen, expected.owners, **how
        )
    assert ep_crew.are_at_home(combined[0])
    assert torch.equal(buffer.missing_contributions.cpu(), missing)
    assert torch.equal(combined[0].cpu(), sums)
