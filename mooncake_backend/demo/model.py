"""A character-level language model and its text."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


class CharModel(nn.Module):
    """A decoder-only transformer, small enough for a CPU core."""

    def __init__(self, symbols: int, context: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(symbols, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                nhead=4,
                dim_feedforward=4 * width,
                dropout=0.0,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, symbols: Tensor, following: Tensor) -> Tensor:
        """The loss of predicting `following` from `symbols`, both [batch, context]."""
        hidden = self.token(symbols) + self.position
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        scores = self.head(self.norm(hidden))
        return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


class Text:
    """Every character of the documents, as a number."""

    def __init__(self, files: list[Path]) -> None:
        content = "\n".join(file.read_text(encoding="utf-8") for file in files)
        alphabet = sorted(set(content))
        number = {character: index for index, character in enumerate(alphabet)}
        self.symbols = len(alphabet)
        self.data = torch.tensor([number[character] for character in content])

    def batch(self, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.data) - context - 1, (size, 1), generator=generator)
        index = starts + torch.arange(context)
        return self.data[index], self.data[index + 1]


def documents() -> list[Path]:
    """The project's own documents, where this file lies in a clone."""
    root = Path(__file__).resolve().parents[2]
    return sorted(root.glob("*.md")) + sorted(root.glob("docs/**/*.md"))
