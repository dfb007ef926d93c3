"""A language model like GPT, with every half of a block a layer: attention, and what comes after it.

No parameters are shared between embedding and head, for they are on the first and on the last device.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Attention", "Block", "Embedding", "FeedForward", "gpt"]


class Embedding(nn.Module):
    """Tokens and their places, as vectors."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return output


class Attention(nn.Module):
    """Each place looks at itself and at those before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, input: Tensor) -> Tensor:
        batch, length, width = input.shape
        heads = self.queries_keys_values(self.norm(input)).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: Tensor = input + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return output


class FeedForward(nn.Module):
    """The same for every place; the hidden layer is four times as wide unless it is told otherwise."""

    def __init__(self, width: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 4 * width
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, hidden)
        self.output = nn.Linear(hidden, width)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = input + self.output(F.gelu(self.wide(self.norm(input))))
        return output


class Block(nn.Module):
    """Both as one layer."""

    def __init__(self, width: int, heads: int, hidden: int | None = None) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width, hidden)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.feed_forward(self.attention(input))
        return output


def gpt(vocabulary: int, layers: int, heads: int, width: int, context: int) -> nn.Sequential:
    """Return a GPT: tokens of shape (batch, length) to logits of shape (batch, length, vocabulary).

    Args:
        vocabulary: the number of different tokens
        layers: the number of blocks
        heads: of each attention
        width: the length of the vectors
        context: the largest length of an input

    Raises:
        ValueError: ``width`` is not a multiple of ``heads``.
    """
    if width % heads:
        raise ValueError(f"the heads share the width, so it must be a multiple of {heads}, but is {width}")

    named: OrderedDict[str, nn.Module] = OrderedDict()
    named["embedding"] = Embedding(vocabulary, context, width)
    for k in range(layers):
        named[f"block{k}_attention"] = Attention(width, heads)
        named[f"block{k}_feed_forward"] = FeedForward(width)
    named["norm"] = nn.LayerNorm(width)
    named["head"] = nn.Linear(width, vocabulary, bias=False)
    return nn.Sequential(named)
