"""Scores of a gate, from which programs choose experts."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> Tensor:
    """float32 [n, E]. With its top-k, rank 0 gets about `ratio` times the tokens of another rank,
    and with `precise` exactly so: then all choices of a token are of one rank."""
    per_rank = num_experts // num_ranks
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    if precise:
        if num_topk > per_rank:
            raise ValueError(f"a rank has {per_rank} experts, fewer than top-{num_topk}")
        share = ratio / (ratio + num_ranks - 1)
        ranks = torch.zeros(num_tokens, dtype=torch.int64)
        others = torch.arange(round(num_tokens * (1 - share)))
        ranks[: len(others)] = 1 + others % max(1, num_ranks - 1)
        ranks = ranks[torch.randperm(num_tokens)]
        of_experts = torch.arange(num_experts) // per_rank
        return scores + (of_experts == ranks.unsqueeze(1))
    if ratio == 1 or num_ranks == 1:
        return scores
    # The scores of rank 0 are scaled, by a factor that is found in halving steps.
    low, high = 1.0, 100.0
    for _ in range(20):
        factor = (low + high) / 2
        chosen = _scaled(scores, per_rank, factor).topk(num_topk, dim=1).indices // per_rank
        counts = torch.nn.functional.one_hot(chosen, num_ranks).amax(1).sum(0).float()
        if counts[0] > ratio * counts[1:].mean():
            high = factor
        else:
            low = factor
    return _scaled(scores, per_rank, low)


def _scaled(scores: Tensor, per_rank: int, factor: float) -> Tensor:
    scaled = scores.clone()
    scaled[:, :per_rank] *= factor
    return scaled
