"""Buffer's normal mode against mooncake.ep.reference, for functions of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ep_crew
import harness
import torch

from mooncake.ep import Buffer, reference

SIZE, HIDDEN, TOPK = 4, 96, 3


def drawn(seed: int, counts: Any, experts: int, topk: int = TOPK, hidden: int = HIDDEN) -> Any:
    return ep_crew.inputs(seed, counts, hidden, topk, experts)


def owners_of(experts: int, size: int) -> list[int]:
    return reference.default_owners(experts, size)


def layout(buffer: Buffer, topk_idx: torch.Tensor, experts: int) -> dict[str, Any]:
    found = buffer.get_dispatch_layout(topk_idx, experts)
    names = (
        "num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert",
        "is_token_in_rank",
    )  # fmt: skip
    return dict(zip(names, found, strict=False))


def check_dispatch(
    me: harness.Rank, found: Any, given: list[SimpleNamespace], experts: int, active: Any = None
) -> torch.Tensor:
    size = len(given)
    active = range(size) if active is None else active
    owners = owners_of(experts, size)
    recv_x, recv_topk_idx, recv_weights, per_expert, handle, _ = found
    ways = reference.normal_rows([one.topk_idx for one in given], owners, me.rank, active)
    expected = [given[source].x[token] for source, token in ways]
    if isinstance(recv_x, tuple):
        recv_x, scales = recv_x
        casts = [ep_crew.cast(one.x) for one in given]
        assert recv_x.dtype == torch.float8_e4m3fn
        recv_x = recv_x.float()
        expected = [casts[source][0].float()[token] for source, token in ways]
        for row, (source, token) in zip(scales, ways, strict=True):
            assert torch.equal(row, casts[source][1][token])
    assert recv_x.is_contiguous()
    assert len(recv_x) == len(ways)
    if ways:
        assert torch.equal(recv_x, torch.stack(expected))
    mine = reference.local_experts(owners, me.rank)
    counts = [0] * len(mine)
    for row, (source, token) in enumerate(ways):
        local = [mine.index(e) if e in mine else -1 for e in given[source].topk_idx[token].tolist()]
        for one in local:
            if one >= 0:
                counts[one] += 1
        if recv_topk_idx is not None:
            assert recv_topk_idx[row].tolist() == local
            weights = given[source].weights[token]
            here = torch.tensor(local) >= 0
            assert torch.equal(recv_weights[row], weights.masked_fill(~here, 0))
    if per_expert is not None:
        assert per_expert == counts
    prefix, _, recv_channels, src_idx, is_in_rank, send_head = handle
    assert src_idx.tolist() == [token for _, token in ways]
    ends = [sum(source <= rank for source, _ in ways) for rank in range(size)]
    assert prefix[:, me.rank].tolist() == ends
    assert is_in_rank.dtype == torch.bool
    assert ((send_head >= 0) == is_in_rank).all()
    assert recv_channels.shape == (size, 10)
    return recv_x


def check_combine(
    me: harness.Rank,
    found: Any,
    answers: list[torch.Tensor],
    given: list[SimpleNamespace],
    experts: int,
    missing: torch.Tensor,
    **how: Any,
) -> None:
    combined, _, _ = found
    expected, lacks = reference.normal_combine(
        me.rank, answers, [one.topk_idx for one in given], owners_of(experts, len(given)), **how
    )
    assert torch.equal(missing, lacks)
    assert torch.equal(combined, expected)


def answers_of(given: Any, experts: int, active: Any = None) -> list[torch.Tensor]:
    """The answers of each rank to its rows; every rank can compute those of all."""
    size = len(given)
    everybody = range(size)
    active = everybody if active is None else active
    owners, made = owners_of(experts, size), []
    for rank in everybody:
        ways = reference.normal_rows(
            [one.topk_idx for one in given], owners, rank, active if rank in active else everybody
        )
        rows = [given[source].x[token] * (rank + 2) for source, token in ways]
        made.append(torch.stack(rows) if rows else torch.empty(0, given[0].x.size(1)).bfloat16())
    return made


AMPLE = 1 << 20
# One token: a row, and in the combine one for each rank. Calls then run in several pieces.
LITTLE = 8 * 4 * 1024
