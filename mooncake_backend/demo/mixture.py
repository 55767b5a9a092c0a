"""A mixture-of-experts transformer: in each layer, a router chooses two experts for each character.

While the model learns, each rank computes all experts. Afterwards each expert runs on its own rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, EXPERT_WIDTH, LAYERS, CHOSEN = 128, 4, 128, 2, 2
EXPERTS_OF_A_RANK = 2
CONTEXT = 128
PROMPT, LENGTH = 24, 96  # characters of a sentence: given, and generated
# Each rank generates several sentences at once, one turn after the other. In the last turn of
# TURNS_BEFORE a rank is killed. TURNS_AFTER follow once its replacement is there.
TURNS_BEFORE, TURNS_AFTER = 2, 2
# The model sees a character together with the characters before it, hashed into a table, so that it
# learns words in seconds.
LOOK_BACK, TABLE = 3, 8192
BALANCE = 0.01  # weight of the loss for uneven use of the experts

# Takes rows [n, WIDTH], the chosen experts and their weights, both [n, CHOSEN]. Returns the
# weighted sum of the experts' answers, [n, WIDTH].
Exchange = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Past:
    """Keys and values of all previous characters, per layer."""

    of_layers: list[tuple[Tensor, Tensor] | None] = field(default_factory=lambda: [None] * LAYERS)

    def __len__(self) -> int:
        first = self.of_layers[0]
        return 0 if first is None else first[0].size(2)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        before = self.of_layers[layer]
        if before is not None:
            keys, values = torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)
        self.of_layers[layer] = keys, values
        return keys, values


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, layer: int, past: Past) -> Tensor:
        batch, length, _ = x.shape
        parts = self.into(self.norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        keys, values = past.append(layer, keys, values)
        # The first call has many characters. Later ones have one, which may attend to all.
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=length > 1
        )
        mixed: Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return mixed


class Experts(nn.Module):
    """The router and the experts of a layer, all of them or this rank's share."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, EXPERT_WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(experts, EXPERT_WIDTH, WIDTH) * EXPERT_WIDTH**-0.5 / 2)
        self.exchange: Exchange | None = None
        self.avoided = torch.zeros(experts, dtype=torch.bool)
        self.imbalance = torch.zeros(())

    def keep(self, mine: slice, exchange: Exchange) -> None:
        """Keeps `mine`; from now on `exchange` computes with the experts of all ranks."""
        self.up = nn.Parameter(self.up[mine].clone())
        self.down = nn.Parameter(self.down[mine].clone())
        self.exchange = exchange

    def answer(self, rows_of: list[Tensor]) -> list[Tensor]:
        """Applies each expert of this rank to its rows."""
        weights = zip(self.up.unbind(), self.down.unbind(), strict=True)
        return [
            functional.gelu(rows @ up) @ down
            for rows, (up, down) in zip(rows_of, weights, strict=True)
        ]

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).view(-1, WIDTH)
        scores = self.router(rows).masked_fill(self.avoided, float("-inf")).softmax(-1)
        weights, chosen = scores.topk(CHOSEN)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = (self.exchange or self._all_here)(rows, chosen, weights)
        if self.training:
            share = torch.bincount(chosen.flatten(), minlength=len(self.up)) / chosen.numel()
            self.imbalance = len(self.up) * (scores.mean(0) * share).sum()
        return mixed.view_as(x)

    def _all_here(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        places = [torch.where(chosen == expert) for expert in range(len(self.up))]
        answers = self.answer([rows[row] for row, _ in places])
        mixed = torch.zeros_like(rows)
        for (row, choice), answer in zip(places, answers, strict=True):
            mixed = mixed.index_add(0, row, weights[row, choice, None] * answer)
        return mixed


class MixtureModel(nn.Module):
    def __init__(self, symbols: int, experts: int) -> None:
        super().__init__()
        self.token = nn.Embedding(symbols, WIDTH)
        self.recent = nn.Embedding(TABLE, WIDTH)
        nn.init.normal_(self.token.weight, std=0.3)
        nn.init.normal_(self.recent.weight, std=0.1)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.experts = nn.ModuleList(Experts(experts) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, symbols)

    def forward(self, symbols: Tensor, past: Past | None = None) -> Tensor:
        """Scores of the next symbol: symbols [b, LOOK_BACK + t] gives [b, t, symbols]."""
        past = past or Past()
        key = symbols[:, LOOK_BACK:]
        here = slice(len(past), len(past) + key.size(1))
        x = self.token(key) + self.position[here]
        for back in range(1, LOOK_BACK + 1):
            before = symbols[:, LOOK_BACK - back : symbols.size(1) - back]
            key = (key * 31_337 + before + back) % 1_000_003
            x = x + self.recent(key % TABLE)
        for layer, (attention, experts) in enumerate(
            zip(self.attention, self.experts, strict=True)
        ):
            x = x + attention(x, layer, past)
            x = x + experts(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def loss_of(scores: Tensor, symbols: Tensor) -> Tensor:
    """symbols: [b, LOOK_BACK + t + 1]; the scores come from all but the last one."""
    return functional.cross_entropy(scores.flatten(0, 1), symbols[:, LOOK_BACK + 1 :].flatten())
