"""The child of host_time.py: times steps of tiny layers, where all time is host time.

A layer is a Linear of 4 x 4 on 2 rows: it computes for a fraction of a microsecond, and has parameters,
so that its backward does what a real layer's does. For cells of many parameters it is tiny blocks of a transformer,
of 12 parameters each, and a Linear for what is left. On a GPU nothing waits for what was launched: a step starts when
the GPU has nothing to do, and what is timed is the host.

The garbage collector is off while a step is timed and has nothing left to do when a step starts, for every
peer; gradients are absent when a step starts, as after `zero_grad()`.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import Answer, Request, pipeline, serve
from benchmarks.timing import synchronize

WIDTH = 4
ROWS = 2

Model = Callable[[Tensor], Tensor]


# ---- The layers.


def wrap(peer: str, layers: nn.Sequential, request: Request) -> Model:
    """Return the peer's pipeline; for `plain` the layers called micro-batch by micro-batch."""
    m = request["m"]
    if peer == "plain":
        return lambda x: torch.cat([layers(chunk) for chunk in x.chunk(m)])

    model: Model = pipeline(layers, request)
    return model


def tiny_layers(count: int, parameters: int = 2) -> nn.Sequential:
    """Return layers of so many parameters each."""
    return nn.Sequential(*[_tiny_layer(parameters) for _ in range(count)])


def _tiny_layer(parameters: int) -> nn.Module:
    if parameters == 2:
        return nn.Linear(WIDTH, WIDTH)
    blocks: list[nn.Module] = [
        nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True) for _ in range(parameters // 12)
    ]
    layer = nn.Sequential(*blocks, *[nn.Linear(WIDTH, WIDTH) for _ in range(parameters % 12 // 2)])
    assert len(list(layer.parameters())) == parameters
    return layer


def tiny_shape(request: Request) -> tuple[int, ...]:
    """Return the shape of a mini-batch."""
    rows = request["m"] * ROWS
    return (rows, WIDTH) if request.get("parameters", 2) == 2 else (rows, ROWS, WIDTH)


class Chain(nn.Module):
    """Layers that a module of its own class calls one after the other.

    Args:
        blocks: the layers
        residual: whether each layer's output is added to its input: an operation between two layers
    """

    def __init__(self, blocks: Iterable[nn.Module], residual: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.residual = residual

    def forward(self, input: Tensor) -> Tensor:
        for block in self.blocks:
            input = input + block(input) if self.residual else block(input)
        return input


# ---- How they are timed.


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector off in a ``with`` block. Objects that are there are not visited again."""
    gc.collect()
    gc.freeze()  # So collecting is cheap in the block.
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def timed_step(layers: nn.Sequential, model: Model, x: Tensor, grad: Tensor) -> dict[str, float]:
    """Return the seconds of one forward and of one backward: by the clock, and of CPU in all threads.

    Forward ends when `forward` returns; backward includes the release of the graph, which a training loop pays as well.
    """
    layers.zero_grad(set_to_none=True)
    gc.collect()
    synchronize([str(x.device), str(grad.device)])

    cpu_start, start = process_time(), perf_counter()
    output = model(x)
    cpu_middle, middle = process_time(), perf_counter()
    torch.autograd.backward(output, grad)
    del output
    cpu_end, end = process_time(), perf_counter()

    return {
        "forward": middle - start,
        "backward": end - middle,
        "forward_cpu": cpu_middle - cpu_start,
        "backward_cpu": cpu_end - cpu_middle,
    }


def lowest(runs: Mapping[str, Callable[[], object]], turns: int, start: Callable[[], object]) -> dict[str, float]:
    """Return the lowest seconds of each run; in a turn, each of them runs once, after ``start``, which is not timed."""

    def timed(run: Callable[[], object]) -> float:
        start()
        begin = perf_counter()
        run()
        return perf_counter() - begin

    for run in [*runs.values()] * 2:
        timed(run)
    with uncollected():
        times = [[timed(run) for run in runs.values()] for _ in range(turns)]
    return {name: min(seconds) for name, seconds in zip(runs, zip(*times))}


# ---- What can be asked.


def cells(peer: str, request: Request) -> Answer:
    """Return microseconds per cell, forward and backward: of each figure the lowest of all steps, and the median."""
    first, last = request["devices"][0], request["devices"][-1]
    layers = tiny_layers(sum(request["balance"]), request.get("parameters", 2)).to(first)
    model = wrap(peer, layers, request)
    m = request["m"]
    x = torch.randn(tiny_shape(request)).to(first)
    grad = torch.ones(tiny_shape(request)).to(last)

    for _ in range(2):
        timed_step(layers, model, x, grad)

    with uncollected():
        times = [timed_step(layers, model, x, grad) for _ in range(request["steps"])]
    count = m * len(request["balance"])
    answer: Answer = {}
    for name in times[0]:
        seconds = [step[name] for step in times]
        answer[name] = min(seconds) / count * 1e6
        answer[f"{name}_typical"] = statistics.median(seconds) / count * 1e6
    return answer


def mean(output: Tensor, _target: Any = None) -> Tensor:
    return output.mean()


def step(peer: str, request: Request) -> Answer:
    """Return microseconds per cell of `GPipe.step`, of forward and backward, and of the plain layers.

    The plain layers compute in the order of a step, without recomputation: a backward pass for each micro-batch takes
    longer than one for all of them.
    """
    from torchgpipe import GPipe

    devices, m, n = request["devices"], request["m"], request["n"]
    layers = tiny_layers(n, request["parameters"])
    how = {"devices": devices, "chunks": m, "checkpoint": request["mode"], "schedule": request["schedule"]}
    model: Any = GPipe(layers, [1] * n, loss_fn=mean, **how)
    x = torch.randn(tiny_shape(request)).to(devices[0])
    runs: dict[str, Callable[[], object]] = {
        "call": lambda: torch.autograd.backward(mean(model(x))),
        "step": lambda: model.step(x),
    }
    if len({torch.device(device).type for device in devices}) == 1:
        runs["plain"] = one_by_one(layers, x, m)

    def start() -> None:
        model.zero_grad(set_to_none=True)
        synchronize(devices)

    return {name: seconds / (m * n) * 1e6 for name, seconds in lowest(runs, request["steps"], start).items()}


def one_by_one(model: Model, x: Tensor, m: int) -> Callable[[], None]:
    """Return a function that trains a plain model, micro-batch by micro-batch."""

    def run() -> None:
        for part in x.chunk(m):
            torch.autograd.backward(mean(model(part)) / m)

    return run


def pipelined(peer: str, request: Request) -> Answer:
    """Return microseconds per micro-batch of a pipelined module, and of the plain one."""
    from torchgpipe import pipelined as pipelined_model

    m, count = request["m"], request["layers"]
    x = torch.randn(m * ROWS, WIDTH)

    def made() -> Chain:
        torch.manual_seed(0)
        return Chain(tiny_layers(count), request["glue"])

    how = {"chunks": m, "devices": request["devices"], "balance": [count // 2, count - count // 2]}
    model: Any = pipelined_model(made(), (x[:ROWS],), loss_fn=mean, **how)
    runs: dict[str, Callable[[], object]] = {
        "plain": one_by_one(made(), x, m),
        "step": lambda: model.step(x),
        "call": lambda: torch.autograd.backward(mean(model(x))),
    }
    quickest = lowest(runs, request["steps"], start=lambda: None)
    return {name: seconds / m * 1e6 for name, seconds in quickest.items()}


KINDS = {"cells": cells, "step": step, "pipelined": pipelined}


def answer(peer: str, request: Request) -> Answer:
    return KINDS[request["kind"]](peer, request)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A graph is as deep as its cells in a row. Destroying or walking it would exceed the default limit.
    sys.setrecursionlimit(10_000)
    serve(answer)
