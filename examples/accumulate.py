"""Train on texts of all lengths, one at a time, and accumulate their gradients: in a pipeline, and without one.

    python examples/accumulate.py                      # in less than a minute on two CPU cores
    python examples/accumulate.py --window 16 --steps 200

A small language model learns English, one character after another, from the paragraphs of the manual that comes with
Python. Each batch is one paragraph, without padding, and the gradients of a window of them make a step. Without a
pipeline, that is a loop of `loss.backward()`. In a pipeline it is one `step`, in which the paragraphs of a window are
on different devices at the same time. The script prints the losses of both side by side.

The example uses all accelerators of the machine. On a CPU the partitions share the cores.
"""

import argparse
import copy
import random
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe
from torchgpipe import MicroBatches, windows

LONGEST = 128  # characters


class LanguageModel(nn.Module):
    """A transformer that predicts the next character, and returns the mean loss of all."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, width)
        self.positions = nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(layers)
            ]
        )
        self.head = nn.Linear(width, 128)

    def forward(self, text: Tensor) -> Tensor:
        input, target = text[:, :-1], text[:, 1:]
        x = self.characters(input) + self.positions(torch.arange(input.size(1), device=input.device))
        mask = nn.Transformer.generate_square_subsequent_mask(input.size(1), device=input.device)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return F.cross_entropy(self.head(x).mT, target)


def paragraphs(count: int, seed: int) -> list[Tensor]:
    """Return texts (1, length) in an order of their own."""
    found = [text for _, topic in sorted(topics.items()) for text in topic.split("\n\n") if len(text) >= 16]
    chosen = random.Random(seed).choices(found, k=count)
    return [torch.tensor([list(text[:LONGEST].encode("ascii", "replace"))]) for text in chosen]


def train(model: LanguageModel, texts: list[Tensor], options: argparse.Namespace) -> list[float]:
    """Train in a loop that accumulates, and return the losses of its steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for window in windows(texts, options.window):
        count = sum(text.size(1) - 1 for text in window)
        total = 0.0
        for text in window:
            loss = model(text) * ((text.size(1) - 1) / count)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train_in_pipeline(model: Any, texts: list[Tensor], options: argparse.Namespace) -> list[float]:
    """Train in a pipeline, and return the losses of its steps."""
    torchgpipe.pipelined(model, MicroBatches(texts[:2]), schedule=options.schedule)
    print(f"As a pipeline:\n{model.layout}\n")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for window in windows(texts, options.window):
        # A character weighs the same in a long paragraph and in a short one.
        window = MicroBatches(window, weights=[text.size(1) - 1 for text in window])
        losses.append(model.step(window).item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    torch.manual_seed(options.seed)
    plain = LanguageModel(options.layers, options.width)
    texts = paragraphs(options.steps * options.window, options.seed)
    lengths = [text.size(1) for text in texts]
    print(
        f"{len(texts)} texts of {min(lengths)} to {max(lengths)} characters, {options.window} in a step\n", flush=True
    )
    ours = train_in_pipeline(copy.deepcopy(plain), texts, options)
    theirs = train(plain, texts, options)
    print(f"{'steps':>12}{'pipeline':>14}{'plain':>14}{'difference':>14}")
    part = max(1, options.steps // 10)
    for first in range(0, options.steps, part):
        steps = slice(first, min(first + part, options.steps))
        one, other = (sum(losses[steps]) / len(losses[steps]) for losses in (ours, theirs))
        print(f"{f'{steps.start}-{steps.stop - 1}':>12}{one:>14.6f}{other:>14.6f}{one - other:>14.6f}")


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train on texts of all lengths, one at a time, and accumulate their gradients.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=4, help="layers of the model")
    add("--width", type=int, default=64, help="length of the vector at each character")
    add("--window", type=int, default=8, help="texts in a step")
    add("--steps", type=int, default=100, help="training steps")
    add("--schedule", default="1F1B", help="order of forward and backward in a step")
    add("--seed", type=int, default=0, help="seed of weights and texts")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # The tensors are small: more threads would wait for each other.
    main()
