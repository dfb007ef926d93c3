"""Train in several processes with a pipeline in each: DistributedDataParallel around GPipe.

A convolutional network classifies excerpts of source code by their module of Python's standard library. Each process
takes its share of every mini-batch, and DistributedDataParallel, with its default settings, averages the gradients.
The batch norms are deferred: their running statistics are those of whole shares, and the first process's are kept. At
the end every process has the same parameters, and the first process evaluates alone, on held-out excerpts.

    python examples/ddp.py                  # two processes, some seconds on two CPU cores
    python examples/ddp.py --processes 1    # the same mini-batches in one process

Each process gets accelerators of its own. If the machine has too few, all partitions are on the CPU.
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from torchgpipe import GPipe

CLASSES = 8  # modules
CONTEXT = 128  # bytes in an excerpt


class Embedding(nn.Module):
    """Embed bytes (batch, time) as vectors (batch, width, time)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)

    def forward(self, text: Tensor) -> Tensor:
        return self.byte(text).mT


def build(rank: int, options: argparse.Namespace) -> GPipe:
    """Build a model from bytes (batch, CONTEXT) to scores (batch, CLASSES), with the same weights in every process."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [Embedding(32)]
    for _ in range(3):
        layers += [nn.Conv1d(32, 32, 5, padding=2, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * CONTEXT // 8, CLASSES))
    n = options.partitions
    balance = [len(part) for part in torch.arange(len(model)).tensor_split(n)]
    enough = torch.accelerator.device_count() >= n * options.processes
    kind = torch.accelerator.current_accelerator() if enough else None
    devices = ["cpu"] * n if kind is None else [f"{kind.type}:{n * rank + j}" for j in range(n)]
    return GPipe(model, balance, devices=devices, chunks=options.chunks, deferred_batch_norm=True)


def read_modules() -> tuple[list[Tensor], list[Tensor]]:
    """Return the bytes of the largest modules of the standard library: all but the last tenth, and the last tenth."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda file: file.stat().st_size)
    texts = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files[-CLASSES:]]
    return [text[: len(text) * 9 // 10] for text in texts], [text[len(text) * 9 // 10 :] for text in texts]


def excerpts(texts: list[Tensor], batch: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random excerpts (batch, CONTEXT), and the index of each excerpt's text."""
    classes = torch.randint(CLASSES, (batch,), generator=draw)
    parts = []
    for k in classes.tolist():
        start = int(torch.randint(len(texts[k]) - CONTEXT, (), generator=draw))
        parts.append(texts[k][start : start + CONTEXT])
    return torch.stack(parts).long(), classes


def train(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Run as one of the processes."""
    if not torch.accelerator.is_available():
        torch.set_num_threads(1)
    learn, held_out = read_modules()
    pipeline = build(rank, options)
    backend = "gloo" if pipeline.devices[0].type == "cpu" else None
    meeting = f"file://{folder}/meeting"
    size = options.processes
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size)
    # Without device_ids, because the pipeline has several devices.
    model = DistributedDataParallel(pipeline)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # All processes draw the same mini-batch, and take their shares.
    draw = torch.Generator().manual_seed(1)
    with tqdm(total=options.steps, unit=" steps", disable=rank > 0) as progress:
        for _ in range(options.steps):
            texts, classes = excerpts(learn, options.batch, draw)
            mine = slice(rank, None, options.processes)
            scores = model(texts[mine])
            loss = F.cross_entropy(scores, classes[mine].to(scores.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            progress.update()

    apart = difference(pipeline)
    if rank == 0:
        print(f"parameters of the processes differ by {apart}")
        print(f"{evaluate(pipeline, held_out):.1%} of new excerpts are recognised, 1 in {CLASSES} by chance")
    dist.destroy_process_group()


def difference(pipeline: GPipe) -> float:
    """Return the largest difference of any parameter in a process from the parameter in process 0."""
    device = pipeline.devices[0]
    here = torch.cat([tensor.detach().flatten().to(device, torch.float64) for tensor in pipeline.parameters()])
    first = here.clone()
    dist.broadcast(first, 0)
    apart = (here - first).abs().max()
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return float(apart)


@torch.no_grad()
def evaluate(pipeline: GPipe, held_out: list[Tensor]) -> float:
    """Return the accuracy. Without DistributedDataParallel, the pipeline waits for no other process."""
    texts, classes = excerpts(held_out, 256, torch.Generator().manual_seed(2))
    scores = pipeline.eval()(texts)
    return float((scores.argmax(1).cpu() == classes).double().mean())


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train in several processes, each with a pipeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--processes", type=int, default=2, help="number of processes, each with a pipeline")
    add("--partitions", type=int, default=2, help="number of partitions in a pipeline")
    add("--chunks", type=int, default=2, help="micro-batches in the share of a process")
    add("--batch", type=int, default=64, help="excerpts in a mini-batch, of all processes together")
    add("--steps", type=int, default=150, help="number of training steps")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.processes == 1:
            train(0, folder, options)
        else:
            spawn(train, (folder, options), nprocs=options.processes)


if __name__ == "__main__":
    main()
