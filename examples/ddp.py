"""Trains a convolutional network in several processes, each of which has a pipeline: DistributedDataParallel around GPipe.

Each process takes its share of every mini-batch, and DistributedDataParallel, with its default settings, averages the
gradients. The batch norms are deferred: their running statistics are those of the mini-batch of all processes. At the
end every process has the same parameters and statistics, and the first one evaluates alone.

    python examples/ddp.py                  # two processes, some seconds on two CPU cores
    python examples/ddp.py --processes 1    # the same mini-batches in one process

The images are those of ``rebalance.py``. The accelerators of the machine are dealt out to the processes; where there are
too few, all partitions are on the CPU.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from rebalance import CLASSES, gratings
from torch import multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from torchgpipe import GPipe

SIZE = 16  # pixels


def build(rank: int, options: argparse.Namespace) -> GPipe:
    """Takes images (batch, 1, SIZE, SIZE); scores each class: (batch, CLASSES). The same weights in every process."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 1
    for width in (16, 32, 32):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(16 * channels, CLASSES))
    n = options.partitions
    balance = [len(part) for part in torch.arange(len(model)).tensor_split(n)]
    enough = torch.accelerator.device_count() >= n * options.processes
    kind = torch.accelerator.current_accelerator() if enough else None
    devices = ["cpu"] * n if kind is None else [f"{kind.type}:{n * rank + j}" for j in range(n)]
    return GPipe(model, balance, devices=devices, chunks=options.chunks, deferred_batch_norm=True)


def train(rank: int, folder: str, options: argparse.Namespace) -> None:
    """What one of the processes does."""
    if not torch.accelerator.is_available():
        torch.set_num_threads(1)
    torch.manual_seed(0)
    pipeline = build(rank, options)
    backend = "gloo" if pipeline.devices[0].type == "cpu" else None
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=options.processes)
    model = DistributedDataParallel(pipeline)  # without device_ids, because it has several devices
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    with tqdm(desc=f"{options.processes} processes", total=options.steps, unit=" steps", disable=rank > 0) as progress:
        for _ in range(options.steps):
            images, classes = gratings(options.batch, SIZE, draw)
            mine = slice(rank, None, options.processes)
            scores = model(images[mine])
            loss = F.cross_entropy(scores, classes[mine].to(scores.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            progress.update()

    here = torch.cat([tensor.detach().double().flatten().cpu() for tensor in pipeline.state_dict().values()])
    apart = float(here.sub(first_of_all(here, pipeline)).abs().max())
    print(f"process {rank} differs from process 0 by {apart}")
    if rank == 0:
        print(f"{evaluate(pipeline):.1%} of new images are classified right")
    dist.destroy_process_group()


def first_of_all(values: torch.Tensor, pipeline: GPipe) -> torch.Tensor:
    """The values of process 0."""
    values = values.to(pipeline.devices[0], copy=True)
    dist.broadcast(values, 0)
    return values.cpu()


@torch.no_grad()
def evaluate(pipeline: GPipe) -> float:
    """The pipeline itself, without DistributedDataParallel, waits for no other process."""
    images, classes = gratings(256, SIZE, torch.Generator().manual_seed(2))
    scores = pipeline.eval()(images)
    return float((scores.argmax(1).cpu() == classes).double().mean())


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train in several processes, each with a pipeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--processes", type=int, default=2, help="how many pipelines there are")
    add("--partitions", type=int, default=2, help="into how many the layers are split")
    add("--chunks", type=int, default=2, help="micro-batches in the share of a process")
    add("--batch", type=int, default=64, help="images in a mini-batch, of all processes together")
    add("--steps", type=int, default=60, help="mini-batches to learn from")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.processes == 1:
            train(0, folder, options)
        else:
            multiprocessing.spawn(train, (folder, options), nprocs=options.processes)


if __name__ == "__main__":
    main()
