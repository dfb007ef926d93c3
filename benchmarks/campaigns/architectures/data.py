"""Draws random text, images and labels, and counts the labels that a loss counts.

Text is padded on the right to the longest row, as the attention mask says, and some labels are -100 at random, so
micro-batches have different numbers of labels. Each row keeps one label at least.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

__all__ = ["LENGTH", "VOCABULARY", "all_labels", "classes", "images", "noise", "shifted_labels", "text", "tokens"]

VOCABULARY = 99
LENGTH = 10
PAD = 0


def tokens(rows: int, generator: Generator, length: int = LENGTH, high: int = VOCABULARY) -> Tensor:
    """Return token ids, none of them special: shape ``(rows, length)``."""
    return torch.randint(5, high, (rows, length), generator=generator)


def text(
    rows: int, generator: Generator, length: int = LENGTH, high: int = VOCABULARY, padded: bool = True
) -> dict[str, Tensor]:
    """Return token ids, their mask, and the same ids as labels, some of them -100."""
    ids = tokens(rows, generator, length, high)
    lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
    mask = torch.arange(length) < (lengths if padded else torch.full((rows, 1), length))
    hidden = torch.rand(rows, length, generator=generator) < 0.2
    hidden[:, 1] = False
    labels = ids.masked_fill(hidden | ~mask, -100)
    return {"input_ids": ids.masked_fill(~mask, PAD), "attention_mask": mask.long(), "labels": labels}


def classes(rows: int, generator: Generator, count: int = 5) -> Tensor:
    """Return a class for each row."""
    return torch.randint(count, (rows,), generator=generator)


def noise(*shape: int, generator: Generator) -> Tensor:
    """Return normal numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def images(rows: int, generator: Generator, size: int = 32, channels: int = 3) -> Tensor:
    """Return square images of noise."""
    return noise(rows, channels, size, size, generator=generator)


def shifted_labels(arguments: Mapping[str, Any]) -> float:
    """Count the labels that a causal loss counts: it predicts each token from those before it."""
    return float((arguments["labels"][:, 1:] != -100).sum())


def all_labels(arguments: Mapping[str, Any]) -> float:
    """Count the labels that are not -100."""
    return float((arguments["labels"] != -100).sum())
