"""Train adapters of low rank (LoRA) on a frozen language model, and generate text before and after.

First a model learns English from the docstrings that come with Python. Then all of its parameters are frozen, and an
adapter beside every linear layer of the last blocks learns the names of Python's modules, one in each line. The
pipeline needs no settings for this: the frozen layers before the first adapter are neither recomputed nor
differentiated. Only the adapters need to be saved.

    python examples/adapters.py                  # in less than a minute on two CPU cores
    python examples/adapters.py --rank 8 --blocks 4

Text is generated in evaluation mode, one character at a time. The sequences grow; the pipeline accepts any length.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from torchgpipe import GPipe

CONTEXT = 48  # characters


class Embedding(nn.Module):
    """Embed characters (batch, time) as vectors (batch, time, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(128, width)
        self.position = nn.Embedding(CONTEXT, width)

    def forward(self, text: Tensor) -> Tensor:
        position: Tensor = self.position(torch.arange(text.shape[1], device=text.device))
        return self.character(text) + position


class Block(nn.Module):
    """A pre-norm transformer block: attention to earlier characters, then a network at each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.think_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.think_norm(x))))


class Adapted(nn.Module):
    """A frozen linear layer, and a trained product of low rank beside it, which is zero at first."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def adapt(module: nn.Module, rank: int) -> None:
    """Put an adapter beside every linear layer in ``module``."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Adapted(child, rank))
        else:
            adapt(child, rank)


def wrap(layers: nn.Sequential, options: argparse.Namespace) -> GPipe:
    partitions = min(torch.accelerator.device_count() or 2, len(layers))
    balance = [len(part) for part in torch.arange(len(layers)).tensor_split(partitions)]
    return GPipe(layers, balance, chunks=options.chunks)


def encode(text: str) -> Tensor:
    return torch.tensor(list(text.encode("ascii", "replace")))


def english() -> str:
    """Return prose that every Python has: the docstrings of its modules."""
    modules = sorted(name for name in sys.stdlib_module_names if name in sys.modules)
    return "\n".join(" ".join((sys.modules[name].__doc__ or "").split()) for name in modules)


def names() -> str:
    return "\n".join(sorted(sys.stdlib_module_names))


def train(model: nn.Module, text: Tensor, steps: int, lr: float, options: argparse.Namespace, what: str) -> None:
    """Train the parameters that are not frozen."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=lr)
    generator = torch.Generator().manual_seed(options.seed)
    model.train()
    with tqdm(range(steps), desc=f"{what}, {sum(p.numel() for p in wanted)} parameters", unit=" steps") as progress:
        for _ in progress:
            starts = torch.randint(len(text) - CONTEXT, (options.batch, 1), generator=generator)
            window = text[starts + torch.arange(CONTEXT + 1)]
            scores = model(window[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten().to(scores.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def generate(model: nn.Module, prompt: str, length: int, seed: int) -> Iterator[str]:
    """Yield generated characters."""
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    text = encode(prompt)[None]
    with torch.inference_mode():
        for _ in range(length):
            scores = model(text[:, -CONTEXT:])[:, -1].cpu()
            text = torch.cat([text, (scores / 0.5).softmax(1).multinomial(1, generator=generator)], dim=1)
            yield chr(text[0, -1])


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    torch.manual_seed(options.seed)
    layers = nn.Sequential(
        Embedding(options.width),
        *[Block(options.width) for _ in range(options.layers)],
        nn.Sequential(nn.LayerNorm(options.width), nn.Linear(options.width, 128)),
    )
    model = wrap(layers, options)
    train(model, encode(english()), options.steps, 3e-3, options, "the model")
    print(repr("".join(generate(model, "The ", 80, options.seed))))

    layers = model.unwrap().requires_grad_(False)
    for block in list(layers)[-1 - options.blocks : -1]:
        adapt(block, options.rank)
    model = wrap(layers, options)
    train(model, encode(names()), options.steps // 2, 1e-2, options, "adapters")
    print(repr("".join(generate(model, "\n", 80, options.seed))))

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapters = {name: tensor for name, tensor in model.state_dict().items() if name in trained}
    print(f"Only {len(adapters)} of {len(model.state_dict())} tensors need saving, such as {next(iter(adapters))!r}")


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a language model, freeze it, and train adapters on another text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=4, help="blocks of the model")
    add("--blocks", type=int, default=2, help="number of blocks, from the end, that get adapters")
    add("--rank", type=int, default=4, help="rank of the adapters")
    add("--width", type=int, default=64, help="length of the vector at each character")
    add("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    add("--batch", type=int, default=32, help="windows of text in a mini-batch")
    add("--steps", type=int, default=300, help="training steps of the model; adapters get half as many")
    add("--seed", type=int, default=0, help="seed of weights, batches and samples")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # The tensors are small: more threads would wait for each other.
    main()
