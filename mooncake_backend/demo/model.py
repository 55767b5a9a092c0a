"""A character-level language model and its text."""

from __future__ import annotations

import ctypes
import re
import signal
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from mooncake_backend.options import env_flag

PR_SET_PDEATHSIG = 1
PATIENCE = 15.0  # most seconds that a job goes on for the replacement of a rank


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
        self.content = "\n".join(file.read_text(encoding="utf-8") for file in files)
        self.alphabet = sorted(set(self.content))
        number = {character: index for index, character in enumerate(self.alphabet)}
        self.symbols = len(self.alphabet)
        self.data = torch.tensor([number[character] for character in self.content])

    def batch(self, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.data) - context - 1, (size, 1), generator=generator)
        index = starts + torch.arange(context)
        return self.data[index], self.data[index + 1]

    def words(self, symbols: Tensor) -> str:
        return "".join(self.alphabet[symbol] for symbol in symbols.tolist())

    def sentences(self, first: int, before: int, length: int) -> list[int]:
        """Starts of sentences, from `first` on, with `before` characters before and `length`
        after."""
        begin, end = max(first, before), len(self.content) - length
        found = [match.start() for match in re.finditer(r"(?<=\s)[A-Z][a-z]* [a-z]", self.content)]
        return [place for place in found if begin <= place < end] or [begin]


def documents() -> list[Path]:
    """The project's documents in a clone; otherwise our Python sources, which are always there."""
    package = Path(__file__).resolve().parents[1]
    root = package.parent
    if (root / "docs" / "architecture.md").is_file():
        return sorted(root.glob("*.md")) + sorted(root.glob("docs/**/*.md"))
    return sorted(package.glob("**/*.py"))


def die_with_launcher() -> None:
    """Makes the kernel kill this process when its launcher dies: a killed launcher cannot do it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def is_replacement() -> bool:
    """Whether mooncake-run has started this process in place of a rank that died."""
    return env_flag("MOONCAKE_REJOIN", "0")


def report_of(folder: Path, rank: int, is_replacement: bool) -> Path:
    """The file of a rank's first process, or of its replacement."""
    return folder / f"rank-{rank}{'.1' * is_replacement}.jsonl"
