"""The child of speed.py: trains models, and times the steps.

A step is all that a training loop does: forward, a loss, backward, and an optimizer, which has a learning rate of 0,
so that a figure does not depend on the steps before it. On a CPU each thread of a pipeline has one core, and so has the
plain model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.models import amoebanetd, gpt, resnet, resnet101, unet
from benchmarks.peers import Answer, Request, pipeline, serve

__all__ = ["TASKS", "TINY", "Task"]


class Task(NamedTuple):
    """A model to train, and on what.

    Attributes:
        make: makes the model
        sample: the shape of a sample: an image's, or one number, the length of a text
        batch: the size of a mini-batch
        chunks: the micro-batches that it is split into
    """

    make: Callable[[], nn.Sequential]
    sample: tuple[int, ...]
    batch: int
    chunks: int


def mlp(layers: int, width: int) -> nn.Sequential:
    """Return layers of few operations and parameters."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)])


#: Micro-batches so small that all devices wait for the host: in cells of many operations, and of few.
TINY = {
    "gpt-tiny": Task(lambda: gpt(64, 4, 2, 8, 4), (4,), 32, 32),
    "mlp-tiny": Task(lambda: mlp(8, 16), (1, 16), 32, 32),
}

#: By size and name. The names are those of the architectures, however small they are made.
TASKS: dict[str, dict[str, Task]] = {
    "small": {
        "resnet101": Task(lambda: resnet((1, 1, 1), 10, width=16), (3, 64, 64), 16, 4),
        # So many small operations that a micro-batch takes more samples to be as efficient as those of the others.
        "amoebanetd": Task(lambda: amoebanetd(10, 3, 16), (3, 32, 32), 64, 4),
        "unet": Task(lambda: unet(2, 2, 8), (3, 32, 32), 16, 4),
        "gpt": Task(lambda: gpt(256, 4, 4, 64, 32), (32,), 16, 4),
        **TINY,
    },
    # What trains on one large GPU also without a pipeline.
    "gpu": {
        "resnet101": Task(resnet101, (3, 224, 224), 128, 8),
        "amoebanetd": Task(lambda: amoebanetd(1000, 18, 128), (3, 224, 224), 64, 8),
        "unet": Task(lambda: unet(5, 5, 64), (3, 192, 192), 32, 8),
        "gpt": Task(lambda: gpt(50257, 12, 12, 768, 1024), (1024,), 16, 8),
        **TINY,
    },
    "paper": {
        "resnet101": Task(resnet101, (3, 224, 224), 256, 32),
        "amoebanetd": Task(lambda: amoebanetd(1000, 18, 256), (3, 224, 224), 128, 32),
        "unet": Task(lambda: unet(5, 5, 64), (3, 192, 192), 64, 32),
        "gpt": Task(lambda: gpt(50257, 24, 16, 1024, 1024), (1024,), 64, 32),
        **TINY,
    },
    # For `step.py`: halves of the layers take the same time, and a micro-batch is large beside its host time.
    "step": {
        "mlp": Task(lambda: mlp(8, 512), (1, 512), 1024, 8),
        "gpt": Task(lambda: gpt(64, 4, 4, 128, 64), (64,), 32, 8),
    },
}


@lru_cache(maxsize=1)
def made(size: str, name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return TASKS[size][name].make()


def inputs(task: Task, batch: int, device: str) -> Tensor:
    """Return images, or tokens from the start of the vocabulary."""
    torch.manual_seed(0)
    if len(task.sample) == 1:
        return torch.randint(64, (batch, *task.sample)).to(device)
    return torch.rand(batch, *task.sample).to(device)


def closed_units(module: nn.Sequential) -> Iterator[nn.Sequential]:
    """Yield the layers in the smallest pieces that no skip leaves; only these can be checkpointed by themselves."""
    unit: list[nn.Module] = []
    open_skips = 0
    for layer in module:
        unit.append(layer)
        open_skips += len(getattr(layer, "stashable_names", ())) - len(getattr(layer, "poppable_names", ()))
        if open_skips == 0:
            yield nn.Sequential(*unit)
            unit = []


def segments(module: nn.Sequential) -> int:
    """Return the number of pieces for `checkpoint_sequential`."""
    return round(math.sqrt(len(list(closed_units(module)))))


def runner(peer: str, module: nn.Sequential, request: Request) -> Callable[[Tensor], Tensor] | None:
    """Return the function that is trained; None if the peer cannot train this model."""
    if peer in ("ours", "original"):
        model: Callable[[Tensor], Tensor] = pipeline(module, request)
        return model
    module.to(request["devices"][0])
    if peer == "plain":
        if request.get("split"):
            return lambda x: torch.cat([module(part) for part in x.chunk(request["m"])])
        return module
    units, pieces = list(closed_units(module)), segments(module)
    if pieces < 2:
        return None
    divided: Callable[..., Tensor] = checkpoint_sequential
    return lambda x: divided(units, pieces, x, use_reentrant=False)


def synchronize(devices: list[str]) -> None:
    for device in set(devices):
        if torch.device(device).type != "cpu":
            torch.accelerator.synchronize(torch.device(device))


def train(peer: str, request: Request) -> Answer:
    """Return the seconds of each step; or the reason why there are none."""
    module = made(request["size"], request["model"])
    try:
        return _train(peer, module, request)
    except torch.OutOfMemoryError:
        return {"none": "out of memory"}
    finally:
        # Free the devices for the other peers, which run next.
        module.zero_grad()
        module.to("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _train(peer: str, module: nn.Sequential, request: Request) -> Answer:
    devices = request["devices"]
    x = inputs(TASKS[request["size"]][request["model"]], request["batch"], devices[0])
    run = runner(peer, module, request)
    if run is None:
        return {"none": "skips"}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

    seconds, forward = [], []
    for _ in range(request["warm_up"] + request["steps"]):
        synchronize(devices)
        start = perf_counter()
        optimizer.zero_grad()
        loss = run(x).square().mean()
        if peer == "plain":  # On one device, waiting here costs nothing.
            synchronize(devices)
            forward.append(perf_counter() - start)
        torch.autograd.backward(loss)
        optimizer.step()
        synchronize(devices)
        seconds.append(perf_counter() - start)
    first = request["warm_up"]
    return {"seconds": seconds[first:], "forward": forward[first:]}


def balance(peer: str, request: Request) -> Answer:
    """Return balances by time for each number of partitions, from one profile of a micro-batch.

    A balance is of the layers and, for a pipeline that cannot be cut where a skip passes, of the units that no skip
    leaves; None if there are fewer units than partitions.
    """
    from torchgpipe_balancing import partition, profile

    module = made(request["size"], request["model"])
    sample = inputs(TASKS[request["size"]][request["model"]], request["rows"], "cpu")
    report = profile(module, sample, device=request["device"], timeout=request["seconds"])
    # PyTorch's pipelines recompute nothing.
    costs = iter(report.costs("time", recompute=False))
    units = [sum(islice(costs, len(unit))) for unit in closed_units(module)]
    return {
        "segments": segments(module),
        "balances": [
            {"balance": report.balance(n), "units": partition(units, n) if n <= len(units) else None}
            for n in request["partitions"]
        ],
    }


def answer(peer: str, request: Request) -> Answer:
    kinds: dict[str, Any] = {"train": train, "balance": balance}
    result: Answer = kinds[request["kind"]](peer, request)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(answer)
