"""Train on sequences of different lengths in one mini-batch, through a pipeline.

The model learns the remainder of a number modulo three from its digits; the remainder is that of the sum of the digits.
Numbers have different lengths, so they are padded, and the lengths are passed through all layers:

    python examples/sequences.py                       # in some seconds on two CPU cores
    python examples/sequences.py --longest 30 --steps 600

The tensors of a mini-batch have the batch first, so that they can be split into micro-batches: the digits (batch, time)
and the lengths (batch,). The embedding table has no batch dimension, and is passed whole to every micro-batch in
`NoChunk`. PyTorch's recurrent layers have time first by default; `Recurrent` transposes around its GRU.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from tqdm import tqdm

from torchgpipe import GPipe, NoChunk

Value = dict[str, Tensor]


class Embedding(nn.Module):
    """Embed digits (batch, time) by a table (10, width) as vectors (batch, time, width)."""

    def forward(self, value: Value) -> Value:
        return {"x": value["table"][value["digits"]], "lengths": value["lengths"]}


class Recurrent(nn.Module):
    """A GRU that stops at the end of each number; time is first only inside this layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, value: Value) -> Value:
        x, lengths = value["x"], value["lengths"]
        packed = pack_padded_sequence(x.transpose(0, 1), lengths.cpu(), enforce_sorted=False)
        read, _ = pad_packed_sequence(self.gru(packed)[0], total_length=x.shape[1])
        return {"x": self.norm(x + read.transpose(0, 1)), "lengths": lengths}


class Decide(nn.Module):
    """Map the vector at the last digit to scores of the three remainders (batch, 3)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, 3)

    def forward(self, value: Value) -> Tensor:
        x, lengths = value["x"], value["lengths"]
        scores: Tensor = self.scores(x[torch.arange(len(x), device=x.device), lengths - 1])
        return scores


def numbers(batch: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw digits (batch, time), padded with zeros at the end, and the number of digits of each number."""
    lengths = torch.randint(1, longest + 1, (batch,), generator=generator)
    digits = torch.randint(10, (batch, int(lengths.max())), generator=generator)
    return digits * (torch.arange(digits.shape[1]) < lengths[:, None]), lengths


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    torch.manual_seed(options.seed)
    layers = [Embedding(), *[Recurrent(options.width) for _ in range(options.layers)], Decide(options.width)]
    table = nn.Parameter(torch.randn(10, options.width))
    partitions = min(torch.accelerator.device_count() or 2, len(layers))
    balance = [len(part) for part in torch.arange(len(layers)).tensor_split(partitions)]
    model = GPipe(nn.Sequential(*layers), balance, chunks=options.chunks)
    optimizer = torch.optim.Adam([table, *model.parameters()], lr=options.lr)

    generator = torch.Generator().manual_seed(options.seed)
    right = torch.tensor(0.0)
    with tqdm(range(options.steps), unit=" steps") as progress:
        for step in progress:
            digits, lengths = numbers(options.batch, options.longest, generator)
            scores = model({"digits": digits, "lengths": lengths, "table": NoChunk(table)})
            target = (digits.sum(1) % 3).to(scores.device)
            loss = F.cross_entropy(scores, target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            right = right.lerp((scores.argmax(1) == target).float().mean().cpu(), 1 if step == 0 else 0.05)
            progress.set_postfix(loss=f"{loss.item():.3f}", right=f"{right:.0%}", refresh=False)

    model.eval()
    with torch.inference_mode():
        digits, lengths = numbers(1000, options.longest, generator)
        scores = model({"digits": digits, "lengths": lengths, "table": NoChunk(table)})
    right = (scores.argmax(1).cpu() == digits.sum(1) % 3).float().mean()
    print(f"{right:.1%} of 1000 new numbers of up to {options.longest} digits are classified correctly")


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Learn remainders modulo three from numbers of different lengths.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--longest", type=int, default=8, help="digits of the longest number")
    add("--layers", type=int, default=2, help="recurrent layers")
    add("--width", type=int, default=32, help="length of the vector at each digit")
    add("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    add("--steps", type=int, default=300, help="number of training steps")
    add("--batch", type=int, default=64, help="numbers in a mini-batch")
    add("--lr", type=float, default=5e-3, help="learning rate")
    add("--seed", type=int, default=0, help="seed of the initial weights and of the numbers")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # The tensors are small: more threads would wait for each other.
    main()
