"""The child of overhead.py: time steps of tiny layers, where all time is host time.

A layer is a Linear of 4 x 4 on 2 rows: it computes for a fraction of a microsecond, and has parameters,
so that its backward does what a real layer's does. For cells of many parameters it is tiny blocks of a transformer,
of 12 parameters each, and a Linear for what is left. Forward ends when `forward` returns; backward includes
the release of the graph, which a training loop pays as well. On a GPU neither waits for what it has launched: a step
starts when the GPU has nothing to do, and what is timed is the host.

The garbage collector is off while a step is timed and has nothing left to do when a step starts, for every
peer; gradients are absent when a step starts, as after `zero_grad()`.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter, process_time

import torch
from torch import Tensor, nn

from benchmarks.peers import Answer, Request, pipeline, serve

WIDTH = 4
ROWS = 2

Model = Callable[[Tensor], Tensor]


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


def timed_step(layers: nn.Sequential, model: Model, x: Tensor, grad: Tensor) -> dict[str, float]:
    """Return the seconds of one forward and of one backward: by the clock, and of CPU in all threads."""
    layers.zero_grad(set_to_none=True)
    gc.collect()
    if grad.is_cuda or x.is_cuda:
        torch.cuda.synchronize()

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
    return {name: min(own) for name, own in zip(runs, zip(*times))}


def step(peer: str, request: Request) -> Answer:
    """Return microseconds per cell: of each figure the lowest of all steps, and the median."""
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
    cells = m * len(request["balance"])
    answer: Answer = {}
    for name in times[0]:
        seconds = [each[name] for each in times]
        answer[name] = min(seconds) / cells * 1e6
        answer[f"{name}_typical"] = statistics.median(seconds) / cells * 1e6
    return answer


def deep(peer: str, request: Request) -> Answer:
    """Return the milliseconds to construct a pipeline of very many layers, and of its first step."""
    layers = tiny_layers(sum(request["balance"]))
    x = torch.randn(request["m"] * ROWS, WIDTH)
    grad = torch.ones(request["m"] * ROWS, WIDTH)

    gc.collect()
    start = perf_counter()
    model = wrap(peer, layers, request)
    construct = perf_counter() - start
    seconds = {"construct": construct, **timed_step(layers, model, x, grad)}

    return {name: value * 1e3 for name, value in seconds.items()}


def nodes(peer: str, request: Request) -> Answer:
    """Return the autograd nodes of one step, counted by name."""
    layers = tiny_layers(sum(request["balance"]))
    model = wrap(peer, layers, request)
    output = model(torch.randn(request["m"] * ROWS, WIDTH))

    seen: set[object] = set()
    names: Counter[str] = Counter()
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names[node.name()] += 1
        waiting.extend(function for function, _ in node.next_functions)
    return {"nodes": dict(names.most_common())}


def answer(peer: str, request: Request) -> Answer:
    return {"step": step, "deep": deep, "nodes": nodes}[request["kind"]](peer, request)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A graph is as deep as its cells in a row. Destroying or walking it would exceed the default limit.
    sys.setrecursionlimit(10_000)
    serve(answer)
